"""The compiled kernels: finds and loads them once, and says why there are none where there are none.

TRUSTREGION_OPS: `native` insists on them, `torch` does without; unset: wherever they are there.
TRUSTREGION_JIT=1: what is not installed is compiled on import, once for all processes.
"""

import contextlib
import os
import warnings

import torch

from trustregion.ops import build

MODES = ("", "torch", "native")
DEVICES = ("cpu", "cuda")


class _State:
    mode = os.environ.get("TRUSTREGION_OPS", "")
    missing: dict[str, str] = {}  # by device, why its kernels are not there
    warned: set[str] = set()


def native(device: str) -> bool:
    """Whether operators run as compiled kernels on tensors of that device type; warns once where they could but do not.

    Raises RuntimeError: TRUSTREGION_OPS insists on them and they are not there, or is no mode.
    """
    if _State.mode not in MODES:
        raise RuntimeError(f"TRUSTREGION_OPS = {_State.mode!r}: must be torch or native, or unset")
    if _State.mode == "torch" or device not in DEVICES:
        return False
    reason = _State.missing.get(device)
    if reason is None:
        return True
    if _State.mode == "native":
        raise RuntimeError(f"TRUSTREGION_OPS = 'native', but there are no kernels for {device}: {reason}")
    if device not in _State.warned:
        _State.warned.add(device)
        warnings.warn(
            f"trustregion computes in pure torch on {device}, as it has no kernels for it: {reason}. "
            "TRUSTREGION_OPS=torch says that this is as intended (docs/kernels.md)",
            stacklevel=3,
        )
    return False


def is_loaded(device: str = "cpu") -> bool:
    """Whether that library is there; that of the CPU defines the operators, on whatever device."""
    return device not in _State.missing


@contextlib.contextmanager
def using(mode: str):
    """Overrides TRUSTREGION_OPS for a while: `torch`, `native`, or "" for whatever is there."""
    before, _State.mode = _State.mode, mode
    try:
        yield
    finally:
        _State.mode = before


def describe() -> str:
    """Which kernels are used, and why not where they are not, in a line."""
    if _State.mode == "torch":
        return "pure torch, as TRUSTREGION_OPS says"
    there = []
    if "cpu" not in _State.missing:
        there.append(f"native on cpu ({torch.ops.trustregion.build_info()[2]})")
    if "cuda" not in _State.missing:
        there.append("native on cuda")
    there += [f"pure torch on {device} ({reason})" for device, reason in _State.missing.items()]
    return "; ".join(there)


def _load(device: str) -> None:
    """Raises RuntimeError or OSError: the reason why that library is not there."""
    if device == "cuda" and torch.version.cuda is None:
        raise RuntimeError(f"torch {torch.__version__} is built without CUDA")
    library = build.PACKAGE / f"_{device}.so"
    if not library.exists():
        if os.environ.get("TRUSTREGION_JIT", "0") in ("", "0"):
            raise RuntimeError(
                f"{library.name} was not built. Install with a C++ compiler (pip install -v --no-build-isolation . says "
                "what is skipped and why), or set TRUSTREGION_JIT=1"
            )
        library = build.build_just_in_time(device)
    torch.ops.load_library(str(library))
    info = torch.ops.trustregion.build_info if device == "cpu" else torch.ops.trustregion.build_info_cuda
    built_with, sources, _ = info()
    if built_with != torch.__version__.partition("+")[0]:
        raise RuntimeError(f"{library} was built with torch {built_with}, this is {torch.__version__}: install again")
    if sources != build.source_hash():
        raise RuntimeError(f"{library} was built from other sources than these: install again")


for _device in DEVICES:
    try:
        if _State.mode == "torch":
            raise RuntimeError("TRUSTREGION_OPS was torch when trustregion was imported")
        if "cpu" in _State.missing:
            raise RuntimeError("they need those for cpu")
        _load(_device)
    except (RuntimeError, OSError) as error:
        _State.missing[_device] = str(error)
