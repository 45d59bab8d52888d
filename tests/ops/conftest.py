import pytest
import torch

from trustregion.ops.library import is_loaded, using

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _native(request):
    """Operators run as kernels here, or the test is skipped; those of the build, and of what they compile, need none."""
    if request.module.__name__.endswith(("test_build", "test_token_stats_cuda")):
        yield
        return
    if not is_loaded():
        pytest.skip("the kernels are not built: pip install --no-build-isolation --no-deps -e .")
    with using("native"):
        yield
