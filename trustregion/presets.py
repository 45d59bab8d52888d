"""Methods by name: the flat YAML files of `configs/method`, the one source of truth for Hydra and Python alike."""

from pathlib import Path
from typing import Any

import yaml

from trustregion.config import MethodConfig, unknown_name
from trustregion.fields import ConfigError

_PACKAGE = Path(__file__).resolve().parent
# An installed wheel carries the YAML files inside the package; a checkout has them beside it.
_FOLDERS = (_PACKAGE / "configs", _PACKAGE.parent / "configs")


def preset_names() -> list[str]:
    """The names of all presets, sorted."""
    return sorted(path.stem for path in (configs_folder() / "method").glob("*.yaml"))


def read_preset(name: str) -> dict[str, Any]:
    """The fields of a preset, flat, as its YAML file has them. Raises ConfigError when there is no such preset."""
    if name not in preset_names():  # only names that are there, so that no path can be smuggled in
        raise ConfigError(unknown_name(f"method = {name!r}: no such preset", name, preset_names()))
    return yaml.safe_load((configs_folder() / "method" / f"{name}.yaml").read_text(encoding="utf-8"))


def load_preset(name: str, /, **overrides: Any) -> MethodConfig:
    """A preset as a validated configuration, fields overridden by name; None unsets an optional field.

    Raises:
        ConfigError: unknown preset, unknown field, or a value out of range.
    """
    return MethodConfig.from_flat({**read_preset(name), **overrides})


def configs_folder() -> Path:
    """The folder of all YAML files, this installation's own. Raises FileNotFoundError when the installation is broken."""
    for folder in _FOLDERS:
        if (folder / "method").is_dir():
            return folder
    raise FileNotFoundError(f"no presets in {' or '.join(map(str, _FOLDERS))}: reinstall trustregion")
