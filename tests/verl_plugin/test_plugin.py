"""verl loads the plugin, and what goes wrong when it does not is said aloud."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl")

from verl.plugin.platform.platform_manager import PlatformRegistry  # noqa: E402
from verl.trainer.ppo.core_algos import get_policy_loss_fn  # noqa: E402
from verl.utils.config import omega_conf_to_dataclass  # noqa: E402

from trustregion import ConfigError  # noqa: E402
from trustregion.verl_plugin.policy_loss import trust_region_loss  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
CLASH = """
from verl.trainer.ppo.core_algos import register_policy_loss

@register_policy_loss("trust_region")
def theirs(*args, **kwargs):
    return None
"""


def doctor(tmp_path, **env):
    return subprocess.run(
        [sys.executable, "-m", "trustregion.doctor"],
        env={**os.environ, "PYTHONPATH": str(tmp_path), **env},
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )


def test_import_verl_registers_loss_and_platform():
    assert get_policy_loss_fn("trust_region") is trust_region_loss
    assert PlatformRegistry.get("cpu").__module__.startswith("trustregion.")


def test_cpu_platform_is_never_found_by_probing(monkeypatch):
    platform = PlatformRegistry.get("cpu")()
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    assert not platform.is_platform_available(use_smi_check=True)
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    assert platform.is_platform_available(use_smi_check=True)


def test_policy_loss_config_is_built_and_validated_by_verl():
    config = {"_target_": "trustregion.verl_plugin.config.TrustRegionLossConfig"}
    method = {"region": "ratio_interval", "eps_low": 0.2, "eps_high": 0.28, "surrogate": "clip", "anchor": "old"}
    built = omega_conf_to_dataclass({**config, "method": method})
    assert built.loss.region.eps_high == 0.28 and built.loss_mode == "trust_region"
    with pytest.raises(Exception) as raised:  # hydra wraps it
        omega_conf_to_dataclass({**config, "method": {**method, "eps_low": "oops"}})
    assert "method.eps_low = 'oops'" in str(raised.value)
    assert isinstance(raised.value, ConfigError) or "ConfigError" in repr(raised.value.__cause__)


@pytest.mark.slow
def test_doctor_is_content_here(tmp_path):
    done = doctor(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "knows the policy loss 'trust_region'" in done.stdout


@pytest.mark.slow
def test_doctor_names_the_plugin_that_came_first(tmp_path):
    (tmp_path / "clash_first.py").write_text(CLASH)
    done = doctor(tmp_path, VERL_USE_EXTERNAL_MODULES="clash_first")  # loaded before the plugins, which verl then drops
    assert done.returncode == 1
    assert "clash_first.theirs" in done.stdout and "Uninstall that plugin" in done.stdout


@pytest.mark.slow
def test_doctor_shows_the_error_that_verl_hides(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Broken:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'trustregion.verl_plugin.policy_loss':\n"
        "            raise ImportError('broken on purpose')\n"
        "sys.meta_path.insert(0, Broken())\n"
    )
    done = doctor(tmp_path)
    assert done.returncode == 1 and "because of ImportError: broken on purpose" in done.stdout, done.stdout + done.stderr
