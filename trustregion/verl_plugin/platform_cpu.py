"""A CPU as a platform of verl, chosen with VERL_PLATFORM=cpu and never by itself."""

import contextlib
import os
import types

import psutil
import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _nothing(*_args, **_kwargs):
    return None


def _zero_bytes(*_args, **_kwargs):
    return 0


class _CpuDeviceModule(types.ModuleType):
    """`torch.cpu` with the accelerator functions that verl calls on a device module; those about memory do nothing."""

    empty_cache = ipc_collect = reset_peak_memory_stats = synchronize = set_device = staticmethod(_nothing)
    memory_allocated = memory_reserved = staticmethod(_zero_bytes)
    max_memory_allocated = max_memory_reserved = staticmethod(_zero_bytes)

    def __getattr__(self, name):
        return getattr(torch.cpu, name)

    @staticmethod
    def is_available():
        return False  # "no accelerator": verl's memory helpers then return early

    @staticmethod
    def get_device_name(*_args):
        return "CPU"

    @staticmethod
    def current_device():
        return 0

    @staticmethod
    def device_count():
        return 1

    @staticmethod
    def mem_get_info(*_args):
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    @staticmethod
    def get_rng_state(*_args):
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state, *_args):
        torch.set_rng_state(state)


_DEVICE_MODULE = _CpuDeviceModule("trustregion.cpu")


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """One "device" a process. Ray counts it as a logical GPU, the only resource that verl's pools know."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _DEVICE_MODULE

    set_device = synchronize = set_allocator_settings = empty_cache = staticmethod(_nothing)
    profiler_start = profiler_stop = cudart = staticmethod(_nothing)

    def is_available(self):
        return True

    def is_platform_available(self, use_smi_check=False):
        # A CPU is everywhere: were it found by probing, a GPU job would fall back to it in silence.
        return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"

    def current_device(self):
        return "cpu"  # goes into Tensor.to(): an integer would mean cuda:N

    def device_count(self):
        return 1

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    def manual_seed_all(self, seed):
        torch.manual_seed(seed)

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"  # what Ray sets for its GPU resource

    @contextlib.contextmanager
    def nvtx_range(self, msg):
        yield

    def ray_resource_name(self):
        return "GPU"

    def ray_noset_envvars(self):
        return []

    def is_ipc_supported(self):
        return False  # weights travel to vLLM through POSIX shared memory
