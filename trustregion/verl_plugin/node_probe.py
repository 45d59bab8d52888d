"""What a node of a Ray cluster says of itself. Sent there by value: it may have another trustregion, or none."""

import hashlib
import os
import platform
from importlib import metadata, util
from pathlib import Path

PACKAGES = ("torch", "vllm", "verl", "ray", "transformers", "TransferQueue", "trustregion")
# Variables that change what verl, vLLM and torch do, beside those that a run sets everywhere itself.
PREFIXES = ("VERL_", "VLLM_", "NCCL_", "GLOO_", "HF_", "TORCH_", "TORCHDYNAMO_")
OWN = ("VLLM_HOST_IP",)  # of each node, like all that end in _IFNAME


def probe(paths: list[str], imports: list[str]) -> dict:
    """One node's answer: `versions` (name -> text), `environment`, `plugin` ("" when verl has ours, else why not), and of
    the `paths` and modules asked for those that are `missing`."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    versions["trustregion source"], versions["recipes source"] = source("trustregion"), source("recipes")
    versions["GPUs"] = _gpus()
    return {
        "versions": versions,
        "environment": {
            key: value
            for key, value in sorted(os.environ.items())
            if key.startswith(PREFIXES) and not key.endswith("_IFNAME") and key not in OWN
        },
        "plugin": _plugin(),
        "missing": [path for path in paths if not Path(path).expanduser().exists()]
        + [f"module {name}" for name in imports if util.find_spec(name) is None],
    }


def source(package: str) -> str:
    """The first eight digits of a hash over the package's Python files and YAML files."""
    spec = util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return "not found"
    folder, digest = Path(spec.submodule_search_locations[0]), hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".yaml")):
        digest.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:8]


def _plugin() -> str:
    try:
        from trustregion.verl_plugin.doctor import require_plugin

        require_plugin()
    except Exception as error:  # whatever keeps verl from being imported there
        return f"{type(error).__name__}: {error}"
    return ""


def _gpus() -> str:
    """"8 x 80 GiB", by NVIDIA's own library: Ray hides the GPUs from a task that asks for none."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        memory = {round(pynvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30) for handle in handles}
    except Exception:  # no library, no driver
        return "none"
    return f"{len(handles)} x {'/'.join(map(str, sorted(memory)))} GiB" if handles else "none"
