"""What an installed wheel has, away from the checkout."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trustregion import preset_names

ROOT = Path(__file__).resolve().parents[1]
USE = """
import trustregion
from trustregion import PolicyLoss, preset_names
assert trustregion.__file__.startswith({site!r}), trustregion.__file__
for name in preset_names():
    PolicyLoss.from_preset(name)
print(*preset_names())
"""


@pytest.mark.slow
def test_presets_and_programs_come_with_the_wheel(tmp_path):
    def run(*command, **kwargs):
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, timeout=300, cwd=tmp_path, **kwargs
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    # From a copy, so that nothing is built in the checkout.
    subprocess.run(f"git ls-files -co --exclude-standard -z | xargs -0 cp --parents -t {tmp_path}", shell=True, cwd=ROOT, check=True)
    site = str(tmp_path / "site")
    no_kernels = {**os.environ, "TRUSTREGION_BUILD": "none"}  # they take minutes, and tests/ops has them
    run("-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index", "--target", site, str(tmp_path), env=no_kernels)
    environment = {**os.environ, "PYTHONPATH": site}
    (tmp_path / "elsewhere").mkdir()
    assert run("-c", f"import os; os.chdir('elsewhere')\nimport sys; sys.path.remove('')\n{USE.format(site=site)}", env=environment).split() == preset_names()
    assert "ratio_cap" in run("-P", "-m", "trustregion.explain", "band_kl", env=environment)
    assert "10 published" in run("-P", "-m", "recipes.tables", "experiment=bandpo", "figures=false", env=environment)
