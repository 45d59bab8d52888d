"""Says what is installed, whether verl loaded the plugin and what this machine can run; names the remedy of what is not."""

import importlib
import os
import shutil
from importlib import metadata

from trustregion.verl_plugin.names import LOSS_NAME

NEEDED = {
    "torch": "pip install torch",
    "verl": "pip install 'trustregion[verl]'",
    "TransferQueue": "pip install 'trustregion[verl]'",
    "ray": "pip install 'trustregion[verl]'",
    "transformers": "pip install 'trustregion[cpu]' (or [gpu])",
    "vllm": "run scripts/install.sh cpu (or cuda): verl looks for a distribution of this name",
    "hydra-core": "pip install 'trustregion[verl]'",
}
OPTIONAL = {"flash-attn": "GPU only", "liger-kernel": "GPU only", "wandb": "logging", "matplotlib": "plots", "math-verify": "rewards"}


class PluginMissing(RuntimeError):
    """verl runs without our loss, or with somebody else's under its name."""


def require_plugin():
    """Raises PluginMissing, with the cause that verl hides, unless verl's loss `trust_region` is ours."""
    import verl  # noqa: F401  loads the plugins
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    registered = POLICY_LOSS_REGISTRY.get(LOSS_NAME)
    if registered is None:
        entry_points = [ep.value for ep in metadata.entry_points(group="verl.plugins")]
        if not any(value.startswith("trustregion.") for value in entry_points):
            raise PluginMissing(
                "trustregion has no entry point in the group verl.plugins: it is on the path but not installed. "
                "Run `make setup`, or pip install --no-build-isolation --no-deps -e ."
            )
        try:
            importlib.import_module("trustregion.verl_plugin.plugin")
        except Exception as error:
            raise PluginMissing(f"verl dropped the plugin in silence because of {type(error).__name__}: {error}") from error
        if POLICY_LOSS_REGISTRY.get(LOSS_NAME) is None:
            raise PluginMissing("verl was told not to load plugins: unset VERL_USE_EXTERNAL_PLUGINS")
        raise PluginMissing("verl did not load the plugin, yet it loads by hand: unset VERL_USE_EXTERNAL_PLUGINS")
    if not registered.__module__.startswith("trustregion."):
        raise PluginMissing(
            f"two plugins register the policy loss {LOSS_NAME!r}: {registered.__module__}.{registered.__qualname__} replaced "
            "trustregion's. Uninstall that plugin, or rename its loss."
        )


def version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def kernels() -> str:
    try:
        from trustregion.ops import describe
    except ImportError as error:
        return f"none ({error})"
    return describe()


def main() -> int:
    """Prints the report. Returns 0, or 1 when something needed is missing."""
    problems = []
    print("packages")
    for name, remedy in NEEDED.items():
        found = version(name)
        print(f"  {name:<14} {found or 'MISSING'}")
        if found is None:
            problems.append(f"{name} is not installed: {remedy}")
    for name, use in OPTIONAL.items():
        print(f"  {name:<14} {version(name) or f'not installed ({use})'}")

    print("plugin")
    try:
        require_plugin()
        print(f"  verl           knows the policy loss {LOSS_NAME!r}")
    except (PluginMissing, ImportError) as error:
        print("  verl           does NOT know our policy loss")
        problems.append(f"{type(error).__name__}: {error}")
    if (trl := version("trl")) and int(trl.split(".")[0]) >= 1:
        problems.append(
            f"trl {trl} beside verl: verl's workers import a model from it that TRL 1 no longer has, and end. pip uninstall "
            "trl, and use it in an environment of its own"
        )
    print(f"  kernels        {kernels()}")

    print("machine")
    _print_machine(problems)
    for problem in problems:
        print(f"problem: {problem}")
    print("everything needed is there" if not problems else f"{len(problems)} problem(s)")
    return 1 if problems else 0


def _print_machine(problems: list[str]):
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    shared = shutil.disk_usage("/dev/shm").free / 2**30 if os.path.isdir("/dev/shm") else 0.0
    print(f"  cores          {cores}\n  memory         {memory:.0f} GiB\n  /dev/shm       {shared:.1f} GiB free")
    if shared < 0.5:
        problems.append("/dev/shm has less than 0.5 GiB free: Ray and the weight sync need it (docker run --shm-size=4g)")
    try:
        import torch
    except ImportError:
        return
    gpus = torch.cuda.device_count()
    for i in range(gpus):
        print(f"  GPU {i}          {torch.cuda.get_device_name(i)}")
    print(f"  can run        {'cluster=gpu, cluster=cpu' if gpus else 'cluster=cpu'}")
