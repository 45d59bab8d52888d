#!/usr/bin/env bash
# On a machine with a CUDA GPU: builds the kernels for it, tests them on it, times them, in a few minutes and without a
# download. Writes benchmarks/results/gpu.csv.
#   benchmarks/gpu.sh
# PYTHON: one that has a CUDA torch, setuptools, pytest, mpmath and PyYAML; unset: .venv's. CUDA_HOME: as in docs/kernels.md.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
say() { echo "gpu.sh: $*"; }
command -v "$python" >/dev/null || { say "no $python: set PYTHON to one that has a CUDA torch" >&2; exit 1; }

TORCH_CUDA_ARCH_LIST=$("$python" - <<'PYTHON'
import importlib.util, sys
missing = [name for name in ("torch", "setuptools", "pytest", "mpmath", "yaml", "numpy") if not importlib.util.find_spec(name)]
if missing:
    sys.exit(f"gpu.sh: {sys.executable} has no {', '.join(missing)}: set PYTHON to one that has")
import torch
if not torch.cuda.is_available():
    sys.exit(f"gpu.sh: torch {torch.__version__} of {sys.executable} finds no CUDA GPU")
print("%d.%d" % torch.cuda.get_device_capability())
PYTHON
)
export TORCH_CUDA_ARCH_LIST PYTHONSAFEPATH=1 PYTHONPATH=build/gpu:.

say "building for compute capability $TORCH_CUDA_ARCH_LIST"
rm -rf build/gpu
TRUSTREGION_BUILD=cuda "$python" setup.py -q build --build-lib build/gpu --build-temp build/gpu-objects
say "testing"
TRUSTREGION_OPS=native "$python" -m pytest -o pythonpath=build/gpu tests/ops/test_on_gpu.py tests/ops/test_cuda_library.py
say "timing"
TRUSTREGION_OPS=native "$python" -m benchmarks.gpu
