"""Every `python -m recipes.train ...` of the documentation is a configuration that passes the checks."""

import re
import shlex
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from recipes.checks import check
from recipes.train import GROUPS, check_choices
from trustregion.presets import read_preset

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md")), *(ROOT / "examples").glob("*.md")]
COMMAND = re.compile(r"(?:^ *(?:\$ )?|`)python -m recipes\.train ([^`\n]*(?:\\\n[^`\n]*)*)", re.MULTILINE)


def overrides(command: str) -> tuple[str, ...]:
    words = shlex.split(command.replace("\\\n", " "), comments=True)
    return tuple(word for word in words if word not in ("--help", "--dry-run", "-m") and not word.startswith("hydra"))


FOUND = {overrides(text) for page in PAGES for text in COMMAND.findall(page.read_text(encoding="utf-8"))}
COMMANDS = sorted(FOUND - {()})


def test_there_are_such_commands():
    assert len(COMMANDS) > 40


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_documented_command_is_a_valid_configuration(configure, command):
    check_choices([*command])
    groups = {word.split("=")[0]: word for word in command if word.split("=")[0] in GROUPS}
    # Hydra takes its time for each composition, and a method alone is nothing but its file.
    method = None if "experiment" in groups else groups.pop("method", None)
    config = configure(*groups.values(), "name=x", "dry_run=true")
    if method:
        config.method = OmegaConf.create(read_preset(method.split("=")[1]))
    values = [word for word in command if word.split("=")[0] not in GROUPS]
    for override in OverridesParser.create().parse_overrides(values):
        value = next(override.sweep_iterator()) if override.is_sweep_override() else override.value()
        OmegaConf.update(config, override.key_or_group, value, force_add=override.is_add())
    check(config)
