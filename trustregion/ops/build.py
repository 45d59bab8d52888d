"""Compiles trustregion/csrc: for setup.py, and just in time. Imports nothing of trustregion, and torch only when asked.

Two libraries come of it: `_cpu`, all .cpp files but those named *_cuda.cpp, which defines the operators; and `_cuda`,
the .cu and *_cuda.cpp files, which adds their CUDA kernels. Each source registers the operators it implements.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
SOURCES = PACKAGE / "csrc"
CHOICES = ("", "none", "cpu", "cuda")  # of TRUSTREGION_BUILD
CUDA_ARCHITECTURES = "8.0;9.0+PTX"
# What loops need to be vectorized: math functions without errno, comparisons without traps.
CXX_FLAGS = ["-O3", "-g0", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-Wno-unknown-pragmas"]
NVCC_FLAGS = ["-O3", "-lineinfo"]


def parts() -> dict[str, list[Path]]:
    """The sources of each library."""
    cuda = [*SOURCES.glob("*.cu"), *SOURCES.glob("*_cuda.cpp")]
    return {"cpu": sorted(set(SOURCES.glob("*.cpp")) - set(cuda)), "cuda": sorted(cuda)}


def obstacle(part: str) -> str | None:
    """Why that part cannot be compiled here, or None."""
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError as error:
        return f"torch cannot be imported where the build runs ({error}): install torch, build with --no-build-isolation"
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler.split()[0]) is None:
        return f"no C++ compiler {compiler!r} on PATH: install one, or set CXX"
    if part == "cuda":
        if torch.version.cuda is None:
            return f"torch {torch.__version__} is built without CUDA"
        return toolkit_obstacle(cpp_extension.CUDA_HOME, torch.version.cuda)
    return None


def toolkit_obstacle(home: str | None, wanted: str) -> str | None:
    """Why the CUDA toolkit in that folder cannot compile for torch's CUDA version `wanted`, or None.

    torch would find out while it builds, and then the CPU's kernels fail with the GPU's.
    """
    if home is None or not (Path(home) / "bin" / "nvcc").exists():
        return "no nvcc: install the CUDA toolkit, or set CUDA_HOME"
    folders = Path(home).glob("include"), Path(home).glob("targets/*/include")
    if not any((folder / "cuda_runtime_api.h").exists() for found in folders for folder in found):
        return f"{home} has an nvcc, but not CUDA's headers: set CUDA_HOME to the toolkit's own folder"
    said = subprocess.run([f"{home}/bin/nvcc", "--version"], capture_output=True, text=True).stdout
    release = re.search(r"release ((\d+)\.\d+)", said)
    if release and release[2] != wanted.split(".")[0]:
        return f"{home} is CUDA {release[1]}, torch of CUDA {wanted}: set CUDA_HOME to a toolkit of torch's version"
    return None


def setup_arguments(root: Path) -> dict:
    """`ext_modules` and `cmdclass` for setup(). TRUSTREGION_BUILD: `none` skips all, `cpu` or `cuda` insists on it.

    Raises RuntimeError: what is insisted on cannot be built.
    """
    wanted = os.environ.get("TRUSTREGION_BUILD", "")
    if wanted not in CHOICES:
        raise RuntimeError(f"TRUSTREGION_BUILD = {wanted!r}: must be one of none, cpu, cuda, or unset")
    required = {"cpu": ("cpu",), "cuda": ("cpu", "cuda")}.get(wanted, ())
    extensions = []
    for part in ("cpu", "cuda"):
        reason = "TRUSTREGION_BUILD is none" if wanted == "none" else obstacle(part)
        if reason is None and wanted == "cpu" and part == "cuda":
            reason = "TRUSTREGION_BUILD is cpu"
        if reason is None:
            extensions.append(_extension(part, root, optional=part not in required))
        elif part in required:
            raise RuntimeError(f"TRUSTREGION_BUILD = {wanted!r}, but the {part} kernels cannot be built: {reason}")
        else:
            print(f"trustregion: {part} kernels skipped: {reason}", file=sys.stderr)
    return {"ext_modules": extensions, "cmdclass": {"build_ext": _build_command()}} if extensions else {}


def source_hash() -> str:
    digest = hashlib.sha256()
    for file in sorted(SOURCES.iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def cxx_flags() -> list[str]:
    """Ours, and then those of CXXFLAGS, which setuptools would put before ours."""
    return [*CXX_FLAGS, *os.environ.get("CXXFLAGS", "").split()]


def cache_key(part: str) -> str:
    """Of what a library depends on: sources, torch, CUDA, the GPU architectures, the machine and flags."""
    import torch

    key = [source_hash(), torch.__version__, os.uname().machine, *cxx_flags()]
    if part == "cuda":
        key += [torch.version.cuda, os.environ.get("TORCH_CUDA_ARCH_LIST", CUDA_ARCHITECTURES), *NVCC_FLAGS]
    return hashlib.sha256("\0".join(key).encode()).hexdigest()[:16]


def build_just_in_time(part: str) -> Path:
    """The library of that part, compiled unless the cache has it. Safe when many processes start at once.

    The cache is TRUSTREGION_CACHE, else ~/.cache/trustregion. Raises RuntimeError: it cannot be compiled.
    """
    cache = Path(os.environ.get("TRUSTREGION_CACHE") or Path.home() / ".cache" / "trustregion")
    library = cache / f"{part}-{cache_key(part)}.so"
    if library.exists():
        return library
    if (reason := obstacle(part)) is not None:
        raise RuntimeError(reason)
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{library.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel lets go of it when its holder dies: no lock is ever stale
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=cache, prefix=f"{library.name}.") as folder:
                built = _compile(part, Path(folder))
                os.replace(built, library)  # whole or not at all
    return library


def _compile(part: str, folder: Path) -> Path:
    """In a process of its own, as compilers print to wherever their caller does."""
    with (folder / "log").open("w+") as log:
        code = f"import runpy; runpy.run_path({str(Path(__file__).resolve())!r})['compile_here']({part!r}, {str(folder)!r})"
        command = [sys.executable, "-c", code]
        if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log).returncode:
            log.seek(0)
            said = [line.strip() for line in log if line.strip()]
            raise RuntimeError(f"compiling the {part} kernels failed: {said[-1] if said else 'no word'}")
    return next((folder / "lib").rglob(f"_{part}.so"))


def compile_here(part: str, folder: str) -> None:
    """Leaves the library somewhere below `folder`/lib."""
    from setuptools import Distribution

    distribution = Distribution({"name": "trustregion", "ext_modules": [_extension(part, Path("/"), optional=False)]})
    command = _build_command()(distribution)
    command.build_lib, command.build_temp = f"{folder}/lib", f"{folder}/temp"
    command.ensure_finalized()
    command.run()


def _extension(part: str, root: Path, optional: bool):
    """`root`: what the sources' paths are relative to; setuptools wants that of setup.py."""
    from torch.utils import cpp_extension

    kind = cpp_extension.CppExtension if part == "cpu" else cpp_extension.CUDAExtension
    flags = cxx_flags() if part == "cpu" else {"cxx": cxx_flags(), "nvcc": NVCC_FLAGS}
    if part == "cuda":
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", CUDA_ARCHITECTURES)
    return kind(
        f"trustregion._{part}",
        [os.path.relpath(file, root) if root != Path("/") else str(file) for file in parts()[part]],
        depends=[str(file) for file in SOURCES.glob("*.h")],
        define_macros=[("TRUSTREGION_SOURCES", source_hash())],
        extra_compile_args=flags,
        extra_link_args=["-fopenmp"],
        optional=optional,
    )


def _build_command():
    from setuptools.errors import CompileError
    from torch.utils import cpp_extension

    class BuildKernels(cpp_extension.BuildExtension):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.no_python_abi_suffix = True  # they are no Python modules
            self.use_ninja = cpp_extension.is_ninja_available()

        def build_extension(self, extension):
            try:
                super().build_extension(extension)
            except Exception as error:  # setuptools passes over an optional extension for this error alone
                raise CompileError(f"{extension.name}: {error}") from error

    return BuildKernels
