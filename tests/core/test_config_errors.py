"""Configurations that cannot be used are refused with key, value, what is allowed and what to do."""

import math
import re
from dataclasses import dataclass

import pytest
import yaml

from trustregion import (
    DIVERGENCES,
    All,
    Clip,
    ConfigError,
    DivergenceBall,
    EntropyBand,
    Mask,
    MethodConfig,
    PolicyLoss,
    RatioInterval,
    load_preset,
    preset_names,
    presets,
)
from trustregion.presets import read_preset

BALL = {"region": "divergence_ball", "divergence": "kl", "delta": 0.05, "surrogate": "clip"}
INTERVAL = {"region": "ratio_interval", "eps_low": 0.2, "eps_high": 0.28, "surrogate": "clip"}


def message(config, build=MethodConfig.from_flat) -> str:
    with pytest.raises(ConfigError) as caught:
        build(config)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


@pytest.mark.parametrize("value", [0, -0.1, math.nan, math.inf, 10**400, "oops", "0.1", True, False, [0.1], {}])
@pytest.mark.parametrize(("base", "key", "requirement"), [
    (BALL, "delta", "must be a number > 0 (a divergence radius, e.g. 0.05)"),
    (BALL, "delta_low", "must be a number > 0 (the radius for falling ratios)"),
    (BALL, "delta_high", "must be a number > 0 (the radius for rising ratios)"),
    (BALL, "relax_low", "must be a number > 0 and <= 1 (how far the ratio may always fall, e.g. 0.2)"),
    (BALL, "relax_high", "must be a number > 0 (how far the ratio may always rise, e.g. 0.28)"),
    (INTERVAL, "eps_low", "must be a number > 0 and <= 1 (how far the ratio may fall below 1, e.g. 0.2)"),
    (INTERVAL, "eps_high", "must be a number > 0 (how far the ratio may rise above 1, e.g. 0.28)"),
])
def test_numbers_are_checked_for_type_and_range(base, key, requirement, value):
    assert message({**base, key: value}).startswith(f"method.{key} = {value!r}: {requirement}")


@pytest.mark.parametrize("value", [1, 0.5, 0, -1, math.nan, -math.inf, "3", True])
@pytest.mark.parametrize(("base", "key", "requirement"), [
    (BALL, "ratio_cap", "must be a number > 1 (the largest ratio, e.g. 10, .inf allowed), or null"),
    (
        INTERVAL,
        "dual_clip",
        "must be a number > 1 (the largest ratio that counts where the advantage is negative, e.g. 3, .inf allowed), "
        "or null",
    ),
])
def test_caps_are_above_one(base, key, requirement, value):
    assert message({**base, key: value}) == f"method.{key} = {value!r}: {requirement}"


def test_truncation_is_positive():
    for value in (0, -1, math.nan, "5"):
        text = message({**BALL, "surrogate": "mask", "C": value})
        assert text.startswith(f"method.C = {value!r}: must be a number > 0 (where the importance weight is truncated")
    assert MethodConfig.from_flat({**BALL, "surrogate": "mask", "C": math.inf}).surrogate == Mask(math.inf)


def test_a_radius_that_constrains_nothing_is_refused():
    for key in ("delta", "delta_low", "delta_high"):
        assert message({**BALL, "divergence": "tv", key: 1.5}) == (
            f"method.{key} = 1.5: must be a number > 0 and <= 1 (no two policies are further apart in tv, so that it "
            "would constrain nothing)"
        )
    assert MethodConfig.from_flat({**BALL, "divergence": "tv", "delta": 1}).region.delta == 1.0
    assert MethodConfig.from_flat({**BALL, "divergence": "chi2", "delta": 5}).region.delta == 5.0


def test_each_side_needs_a_radius():
    for given in ({}, {"delta_low": 0.1}, {"delta_high": 0.1}):
        text = message({**BALL, "delta": None, **given})
        assert text == "method.delta = None: must be set, or both delta_low and delta_high (a radius, e.g. 0.05)"
    both = MethodConfig.from_flat({**BALL, "delta": None, "delta_low": 0.1, "delta_high": 0.2}).region
    assert (both.delta_low, both.delta_high) == (0.1, 0.2)


def test_names_are_checked():
    assert message({**BALL, "divergence": "KL"}) == (
        f"method.divergence = 'KL': must be one of {', '.join(DIVERGENCES)}, alpha (an f-divergence, anchor first)"
    )
    assert message({**BALL, "partition": "top_k"}).startswith("method.partition = 'top_k': must be one of binary, topk")
    assert message({**BALL, "on_invalid": "ignore"}).startswith("method.on_invalid = 'ignore': must be one of raise, drop")
    assert message({**BALL, "anchor": "reference"}).startswith(
        "method.anchor = 'reference': must be one of old, rollout"
    )
    assert message({**BALL, "region": "ball"}) == (
        "method.region = 'ball': no such type. Allowed: ratio_interval, dcpo_interval, divergence_ball, entropy_band"
    )
    assert message({**BALL, "surrogate": "clamp"}).startswith("method.surrogate = 'clamp': no such type.")
    for missing in ("region", "surrogate"):
        config = {key: value for key, value in BALL.items() if key != missing}
        assert message(config).startswith(f"method.{missing} = None: no such type. Allowed: ")


def test_missing_fields_are_named():
    assert message({**INTERVAL, "eps_low": None}).startswith("method.eps_low: missing; must be a number > 0 and <= 1")
    assert message({**BALL, "divergence": None}).startswith("method.divergence: missing; must be one of kl, ")


def test_unknown_keys_list_the_allowed_ones():
    text = message({**BALL, "detla": 0.1})
    assert text.startswith("method.detla: unknown key. Did you mean 'delta'? Allowed: region, surrogate, anchor, on_i")
    assert text.endswith("relax_high, dual_clip")
    assert message({**BALL, "detla": None}).startswith("method.detla: unknown key.")  # null hides no typing error
    assert message({**BALL, "eps_low": 0.2}).startswith(
        "method.eps_low = 0.2: not a field of region 'divergence_ball' or surrogate 'clip'; remove it or set it to "
        "null. Allowed: "
    )
    assert MethodConfig.from_flat({**BALL, "eps_low": None}) == MethodConfig.from_flat(BALL)


def test_fields_that_shape_an_interval_do_not_go_with_mask():
    for key, value in (("ratio_cap", 10.0), ("relax_low", 0.2), ("relax_high", 0.28)):
        text = (
            f"{key} = {value}: shapes an interval, and surrogate 'mask' uses none; remove it (null), "
            "or use surrogate 'clip'"
        )
        assert message({**BALL, "surrogate": "mask", key: value}) == f"method.{text}"
        with pytest.raises(ConfigError, match=re.escape(text)):
            PolicyLoss(DivergenceBall("kl", delta=0.05, **{key: value}), Mask())


def test_a_region_without_interval_does_not_go_with_clip():
    @dataclass(frozen=True)
    class Cloud:
        has_interval = False

    with pytest.raises(ConfigError, match="'clip': needs a region that is an interval of ratios, and Cloud is none"):
        PolicyLoss(Cloud(), Clip())


TOPK = {**BALL, "partition": "topk", "K": 20, "surrogate": "mask"}


def test_a_top_k_ball_has_no_interval():
    for surrogate in ("clip", "preserve", "cispo"):
        assert message({**TOPK, "surrogate": surrogate}) == (
            f"method.surrogate = {surrogate!r}: needs a region that is an interval of ratios, and DivergenceBall over the "
            "partition 'topk' is none; use surrogate 'mask'"
        )
    both = {**TOPK, "region": ["ratio_interval", "divergence_ball"], "eps_low": 0.2, "eps_high": 0.2}
    assert "use surrogate 'mask'" in message({**both, "surrogate": "clip"})
    assert MethodConfig.from_flat(both).region.requires(0) == {"cells"}


def test_fields_of_one_partition_or_divergence_belong_to_it():
    assert message({**TOPK, "K": None}) == "method.K = None: must be set for partition 'topk'"
    assert message({**BALL, "K": 20}) == (
        "method.K = 20: is for partition 'topk', and partition is 'binary'; remove it (null)"
    )
    for K in (0, -1, 2.5, "20", math.inf):
        assert message({**TOPK, "K": K}).startswith(f"method.K = {K!r}: must be a whole number > 0 (the anchor's most")
    assert MethodConfig.from_flat({**TOPK, "K": 20.0}).region.K == 20
    assert message({**BALL, "divergence": "alpha"}) == "method.alpha = None: must be set for divergence 'alpha'"
    assert message({**BALL, "alpha": 0.5}) == (
        "method.alpha = 0.5: is for divergence 'alpha', and divergence is 'kl'; remove it (null)"
    )
    assert message({**BALL, "divergence": "alpha", "alpha": 1e9}).startswith("method.alpha = 1000000000.0: ")
    assert message({**BALL, "divergence": "alpha", "alpha": 0.5, "delta": 4.5}).startswith(
        "method.delta = 4.5: must be a number > 0 and <= 4 (no two policies are further apart in alpha(0.5)"
    )


ERC = {**INTERVAL, "region": ["ratio_interval", "entropy_band"], "beta_low": 0.05, "beta_high": 0.05}


def test_a_list_of_regions_is_their_conjunction():
    region = All([RatioInterval(0.2, 0.28), EntropyBand(0.05, 0.05)])
    assert MethodConfig.from_flat(ERC).region == region
    nested = {
        "region": [
            {"type": "ratio_interval", "eps_low": 0.2, "eps_high": 0.28},
            {"type": "entropy_band", "beta_low": 0.05, "beta_high": 0.05},
        ],
        "surrogate": {"type": "clip"},
    }
    assert PolicyLoss.from_config(nested) == PolicyLoss(region, Clip())
    nested["region"][1]["beta_low"] = 2
    assert message(nested, PolicyLoss.from_config).startswith("region[1].beta_low = 2: must be a number > 0 and <= 1")
    assert message({**ERC, "region": ["ratio_interval", "ratio_interval"]}).startswith(
        "method.region = ['ratio_interval', 'ratio_interval']: names a region twice"
    )
    assert message({**ERC, "region": []}).startswith("method.region = []: must name at least one region")
    assert message({**ERC, "delta": 0.1}).startswith("method.delta = 0.1: not a field of region ['ratio_interval', ")
    ball = {**BALL, "region": ["divergence_ball", "entropy_band"], "beta_low": 0.05, "beta_high": 0.05}
    assert message({**ball, "surrogate": "mask", "ratio_cap": 10.0}).startswith("method.ratio_cap = 10.0: shapes an")


def test_an_entropy_band_needs_the_recomputed_anchor():
    assert message({**ERC, "anchor": "rollout"}) == (
        "method.anchor = 'rollout': an entropy band needs the anchor's entropy, and the inference engine returns none; "
        "use anchor 'old'"
    )


def test_dataclasses_check_themselves():
    for build, text in (
        (lambda: RatioInterval(-0.2, 0.2), "eps_low = -0.2: must be a number > 0 and <= 1"),
        (lambda: DivergenceBall("kl", delta="oops"), "delta = 'oops': must be a number > 0"),
        (lambda: Clip(dual_clip=1), "dual_clip = 1: must be a number > 1"),
    ):
        with pytest.raises(ConfigError, match=f"^{re.escape(text)}"):
            build()
    assert RatioInterval(1, 2) == RatioInterval(1.0, 2.0) and isinstance(RatioInterval(1, 2).eps_low, float)


def test_flat_and_nested_end_in_the_same_objects():
    nested = {
        "region": {"type": "divergence_ball", "divergence": "kl", "delta": 0.05, "ratio_cap": 10},
        "surrogate": {"type": "clip", "dual_clip": 10},
        "anchor": "rollout",
    }
    flat = {**BALL, "ratio_cap": 10, "dual_clip": 10, "anchor": "rollout"}
    assert MethodConfig.from_nested(nested) == MethodConfig.from_flat(flat)
    del nested["anchor"]
    assert PolicyLoss.from_config(nested) == PolicyLoss.from_preset("band_kl")


def test_nested_errors_carry_their_path():
    def nested(region=None, surrogate=None, **rest):
        region = {"type": "divergence_ball", "divergence": "kl", "delta": 0.05} | (region or {})
        surrogate = {"type": "mask"} | (surrogate or {})
        return message({"region": region, "surrogate": surrogate, **rest}, PolicyLoss.from_config)

    assert nested({"delta": -1}).startswith("region.delta = -1: must be a number > 0")
    assert nested(surrogate={"C": 0}).startswith("surrogate.C = 0: must be a number > 0")
    assert nested({"type": "os.system"}).startswith("region.type = 'os.system': no such type.")
    assert nested({"eps_low": 0.1}).startswith("region.eps_low: unknown key. Allowed: type, divergence")
    assert nested(regoin={}).startswith("regoin: unknown key. Did you mean 'region'?")
    assert nested(anchor="x").startswith("anchor = 'x': must be one of old, rollout")
    assert nested({"ratio_cap": 10.0}).startswith("ratio_cap = 10.0: shapes an interval")
    assert message({"region": "clip"}, PolicyLoss.from_config).startswith("region = 'clip': must be a mapping")


def test_unknown_presets_list_those_that_exist():
    for name in ("band_lk", "../method/band_kl", "band_kl.yaml", "", None):
        text = message(name, load_preset)
        assert text.startswith(f"method = {name!r}: no such preset.") and "Allowed: band_alpha, band_chi2, " in text
    assert "Did you mean 'band_kl'?" in message("band_lk", load_preset)


def test_overrides_go_by_field_name():
    assert PolicyLoss.from_preset("band_kl", delta=0.03).region == DivergenceBall("kl", delta=0.03, ratio_cap=10.0)
    assert PolicyLoss.from_preset("grpo", eps_high=0.28, dual_clip=None) == PolicyLoss(RatioInterval(0.2, 0.28), Clip())
    one_side = PolicyLoss.from_preset("dppo_binary_tv", delta_low=0.3, C=None)
    assert one_side == PolicyLoss(DivergenceBall("tv", delta=0.15, delta_low=0.3), Mask())
    masked = PolicyLoss.from_preset("band_kl", surrogate="mask", ratio_cap=None, dual_clip=None)
    assert masked == PolicyLoss(DivergenceBall("kl", delta=0.05), Mask())
    with pytest.raises(ConfigError, match="method.delta = -0.1: must be a number > 0"):
        PolicyLoss.from_preset("band_kl", delta=-0.1)


def test_presets_are_plain_data_and_run_no_code(tmp_path, monkeypatch):
    assert read_preset("band_kl")["delta"] == 0.05
    for name in preset_names():
        assert all(isinstance(value, str | float | int | list) for value in read_preset(name).values())
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "trap.yaml").write_text("region: !!python/object/apply:os.getcwd []\n")
    monkeypatch.setattr(presets, "_FOLDERS", (tmp_path,))
    with pytest.raises(yaml.YAMLError, match="python/object/apply"):
        load_preset("trap")


@pytest.mark.parametrize("config", [None, [], "grpo", 3])
def test_what_is_no_mapping_is_refused(config):
    assert message(config).startswith(f"method = {config!r}: must be a mapping of a method's fields")
    assert message(config, MethodConfig.from_nested).startswith(f"config = {config!r}: must be a mapping")


def test_wrong_types_of_a_methods_own_keys():
    for key, value in (("anchor", ["old"]), ("on_invalid", 0), ("schedule", False), ("schedule", [])):
        assert message({**BALL, key: value}).startswith(f"method.{key} = {value!r}: must be ")
    with pytest.raises(ConfigError, match="method.name: unknown key"):
        load_preset("band_kl", name="grpo")


def test_conjunctions_may_be_nested():
    inner = All([All([DivergenceBall("kl", "topk", delta=0.1, K=3)]), EntropyBand(0.1, 0.1)])
    method = MethodConfig(inner, Mask())
    assert method.topk == 3 and method.entropy_every_k_steps == 1
    assert PolicyLoss.from_method(method).with_values({"delta": 0.2}).region.regions[0].regions[0].delta == 0.2
    with pytest.raises(ConfigError, match="partition 'topk'"):
        MethodConfig(inner, Clip())
