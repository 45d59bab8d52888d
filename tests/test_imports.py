"""Who may import whom: recipes -> trustregion.verl_plugin -> the core -> torch, and nothing the other way."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "trustregion"
HEAVY = {"verl", "ray", "vllm", "hydra", "omegaconf", "transformers", "tensordict"}
PLUGIN = PACKAGE / "verl_plugin"

USE_THE_CORE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {heavy!r}:
            raise ImportError(f"{{name}} must not be needed")

sys.meta_path.insert(0, Refuse())
sys.path.insert(0, {root!r})
import torch
import trustregion

assert trustregion.__file__.startswith({root!r}), trustregion.__file__
logits, token_ids, ones = torch.randn(1, 2, 50, requires_grad=True), torch.tensor([[3, 7]]), torch.ones(1, 2)
old = trustregion.token_stats(logits.detach() + 0.1 * torch.randn(1, 2, 50), token_ids, topk=20)
for name in trustregion.preset_names():
    new = trustregion.token_stats(logits, token_ids, cell_ids=old.cell_ids)
    out = trustregion.PolicyLoss.from_preset(name)(
        trustregion.TokenBatch(
            new.log_prob, old.log_prob, torch.tensor([[1.0, -1.0]]), ones, entropy=new.entropy, entropy_old=old.entropy,
            cell_log_prob=new.cell_log_prob, cell_log_prob_old=old.cell_log_prob,
        )
    )
    out.token_loss.sum().backward()
loaded = {heavy!r} & {{name.partition(".")[0] for name in sys.modules}}
assert not loaded, loaded
print(len(trustregion.preset_names()))
"""


def imported_modules(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}, line {node.lineno}: a relative import, which this test cannot follow"
            names.add(node.module)
    return names


def test_the_core_runs_without_verl_ray_vllm_and_without_a_compiler(tmp_path):
    code = USE_THE_CORE.format(heavy=HEAVY, root=str(ROOT))
    environment = {"PATH": str(tmp_path), "CC": "/no/compiler", "CXX": "/no/compiler", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 20


CORE_FILES = [file for file in sorted(PACKAGE.rglob("*.py")) if not file.is_relative_to(PLUGIN)]


@pytest.mark.parametrize("file", CORE_FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_core_files_import_nothing_heavy(file):
    imported = imported_modules(file)
    assert not {name for name in imported if name.partition(".")[0] in HEAVY}
    if file.name != "doctor.py":  # `python -m trustregion.doctor` hands over to the plugin's doctor
        assert not {name for name in imported if name.startswith("trustregion.verl_plugin")}
        allowed = {"torch", "yaml", "trustregion", *sys.stdlib_module_names}
        if file.name == "explain.py":  # to draw, when asked to: tests/core/test_explain.py runs the rest without it
            allowed.add("matplotlib")
        if file.name == "build.py":  # compiles the kernels, for setup.py or when asked to
            allowed.add("setuptools")
        assert {name.partition(".")[0] for name in imported} <= allowed


def test_the_library_never_imports_recipes():
    for file in PACKAGE.rglob("*.py"):
        assert not {name for name in imported_modules(file) if name.partition(".")[0] == "recipes"}, file
