"""The CUDA library, with or without a GPU: what it registers and is compiled for. `make test-cuda-build` has one."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

from trustregion.ops import build, describe
from trustregion.ops.library import is_loaded

pytestmark = pytest.mark.skipif(not is_loaded("cuda"), reason=f"no CUDA kernels: {describe()}")


def test_every_operator_has_kernels_for_both_devices():
    operators = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("trustregion::")}
    operators -= {"trustregion::build_info", "trustregion::build_info_cuda"}
    assert len(operators) == 5
    for name in operators:
        for key in ("CPU", "CUDA"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(name, key), (name, key)


def test_fake_tensors_of_a_gpu_have_the_shapes_of_real_ones():
    ops = torch.ops.trustregion
    tokens = torch.full((2, 3), -0.5)
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    ids = torch.arange(6)[:, None]

    def results():
        bounds = ops.band_bounds(tokens, 0, 0.05, 0.05, -9.0, -1e-3, 2.0)
        losses = ops.policy_loss(tokens, tokens, tokens, tokens > -1, None, None, None, [1, 0, 0], [1.0] * 18)
        rows = ops.token_stats(logits, ids, None, None, 4, False)
        log_prob, entropy, cell_ids, cells, largest, log_norm = rows
        given = logits, log_prob, entropy, cells, ids, None, cell_ids, cells, entropy, largest, log_norm
        gradient = ops.token_stats_backward(*given)
        ops.token_stats_backward_(*given)
        return [*bounds, *losses, *rows, gradient]

    real = results()
    with FakeTensorMode() as mode:
        tokens, logits, ids = (mode.from_tensor(x).to("cuda") for x in (tokens, logits, ids))
        fake = results()
    for ours, theirs in zip(fake, real, strict=True):
        assert ours.device.type == "cuda" and (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert ours.stride() == theirs.stride()


def test_it_has_machine_code_for_each_architecture_it_was_built_for():
    """With the TORCH_CUDA_ARCH_LIST of the build."""
    import triton  # comes with a CUDA torch

    bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    tool = shutil.which("cuobjdump") or bundled
    (library,) = (path for path in torch.ops.loaded_libraries if Path(path).name.startswith(("_cuda", "cuda-")))
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", build.CUDA_ARCHITECTURES).replace(".", "").split(";")
    for option, wanted in (("--list-elf", listed), ("--list-ptx", [x for x in listed if x.endswith("+PTX")])):
        said = subprocess.run([tool, option, library], capture_output=True, text=True).stdout
        found = re.findall(r"\.(sm_\w+)\.", said)
        expected = {f"sm_{x.removesuffix('+PTX')}" for x in wanted}
        sources = len(list(build.SOURCES.glob("*.cu")))
        assert {x: found.count(x) for x in found} == dict.fromkeys(expected, sources), said
