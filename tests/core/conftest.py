import pytest
import torch

from trustregion.ops import using
from trustregion.ops.library import is_loaded

# Tensors here are small: on a busy machine, OpenMP's threads would spend the time waiting for each other.
torch.set_num_threads(1)


@pytest.fixture(params=["torch", "native"])
def either_path(request):
    """The test runs in pure torch and, where they are built, with the kernels."""
    if request.param == "native" and not is_loaded():
        pytest.skip("the kernels are not built: pip install --no-build-isolation --no-deps -e .")
    with using(request.param):
        yield request.param
