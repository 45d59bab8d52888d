"""Configurations as `python -m recipes.train` would have them, without the better part of a second that Hydra takes for each."""

import copy
import functools

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from recipes.train import GROUPS, compose


@pytest.fixture(scope="session")
def configure():
    """configure("model=folder", "seed=3", ...) -> DictConfig, to be changed at will.

    Each choice of groups is composed once by Hydra; single values are read by Hydra's parser and set on a copy of that.
    """
    compose_once = functools.cache(lambda *overrides: compose([*overrides]))
    parser = OverridesParser.create()

    def configure(*overrides: str) -> DictConfig:
        parsed = parser.parse_overrides([*overrides])
        config = copy.deepcopy(compose_once(*(o.input_line for o in parsed if o.key_or_group in GROUPS)))
        for override in parsed:
            if override.key_or_group not in GROUPS:
                OmegaConf.update(config, override.key_or_group, override.value(), force_add=override.is_add())
        return config

    return configure
