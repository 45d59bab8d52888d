"""The names that stand in two places, ours and verl's: they must be the same."""

import ast
from pathlib import Path

import pytest

pytest.importorskip("verl")

from hydra.utils import get_class  # noqa: E402
from verl.utils.tracking import Tracking  # noqa: E402

from recipes.checks import LOGGERS  # noqa: E402
from trustregion.verl_plugin import config, names  # noqa: E402


def test_the_loss_is_where_its_name_says():
    assert get_class(names.LOSS_CONFIG) is config.TrustRegionLossConfig
    assert config.TrustRegionLossConfig.loss_mode == names.LOSS_NAME


def test_names_can_be_had_without_verl():
    for file in (names.__file__, Path(names.__file__).with_name("__init__.py")):
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)], file


def test_loggers_are_those_that_verl_has():
    assert set(LOGGERS) == set(Tracking.supported_backend)
