import pytest
import torch

from trustregion.ops import using
from trustregion.ops.library import is_loaded

# Tensors here are small: on a busy machine, OpenMP's threads would spend the time waiting for each other.
torch.set_num_threads(1)

# What the kernels compute is tested on both paths, the rest on whichever is there.
ON_BOTH_PATHS = (
    "test_bounds", "test_golden_losses", "test_hostile_values", "test_identity", "test_loss", "test_metrics",
    "test_token_stats", "test_token_stats_gradients",
)  # fmt: skip


def pytest_generate_tests(metafunc):
    if metafunc.module.__name__.rpartition(".")[2] in ON_BOTH_PATHS:
        metafunc.parametrize("path", ["native", "torch"], indirect=True, scope="module")


@pytest.fixture(scope="module", autouse=True)
def path(request):
    """`native` or `torch`, which the test runs with; "" for whichever is there."""
    mode = getattr(request, "param", "")
    if mode == "native" and not is_loaded():
        pytest.skip("the kernels are not built: pip install --no-build-isolation --no-deps -e .")
    with using(mode):
        yield mode
