"""`python -m trustregion.explain`: what it says about known intervals, and what it refuses."""

import math
import sys

import pytest
import torch

from trustregion import TokenBatch, load_preset, preset_names
from trustregion.batch import prepare
from trustregion.explain import PROBABILITIES, describe, explain, main


def row(name, p, **overrides):
    (bounds,) = explain(load_preset(name, **overrides), [p])
    return bounds


# ---- numbers ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("p", "side", "ratio"), [(0.540, "upper", 1.28), (0.671, "upper", 1.2), (0.751, "lower", 0.8)]
)
def test_band_kl_crosses_the_fixed_ranges_where_it_should(p, side, ratio):
    before, after = (getattr(row("band_kl", p + shift), side) for shift in (-5e-4, 5e-4))
    assert min(before, after) < ratio < max(before, after)
    assert getattr(row("band_kl", p), f"{side}_by") == "delta"


def test_ratio_cap_binds_for_rare_tokens():
    rare, common = row("band_kl", 0.00713), row("band_kl", 0.00715)
    assert (rare.upper, rare.upper_by) == (pytest.approx(10), "ratio_cap")
    assert common.upper < 10 and common.upper_by == "delta"
    assert row("band_kl", 0.00713, ratio_cap=None).upper_by == "delta"


@pytest.mark.parametrize(
    ("name", "vanishes", "fills"),
    [("band_tv", 0.05, 0.95), ("band_chi2", 0.05 / 1.05, 1 / 1.05), ("dppo_binary_tv", 0.15, 0.85)],
)
def test_saturation(name, vanishes, fills):
    assert (row(name, 0.99 * vanishes).lower_by, row(name, 0.99 * vanishes).lower) == ("q = 0", 0)
    assert row(name, 1.01 * vanishes).lower_by == "delta"
    assert row(name, 0.99 * fills).upper_by == "delta"
    assert row(name, 1.01 * fills).upper_by == "q = 1"
    assert row(name, 1.01 * fills).upper == pytest.approx(1 / (1.01 * fills))


def test_relaxed_sides_and_radii_of_their_own():
    wide = {"relax_low": 0.2, "relax_high": 0.28, "ratio_cap": None}
    assert (row("band_kl", 0.1, **wide).lower_by, row("band_kl", 0.1, **wide).upper_by) == ("delta", "delta")
    relaxed = row("band_kl", 0.77, **wide)
    assert (relaxed.lower, relaxed.lower_by) == (pytest.approx(0.8), "relax_low")
    assert (relaxed.upper, relaxed.upper_by) == (pytest.approx(1.28), "relax_high")
    own = row("band_kl", 0.5, delta_low=0.01, delta_high=0.1)
    assert (own.lower_by, own.upper_by) == ("delta_low", "delta_high")


def test_fixed_ranges():
    fixed = row("clip_higher", 0.5)
    assert (fixed.lower, fixed.lower_by) == (pytest.approx(0.8), "eps_low")
    assert (fixed.upper, fixed.upper_by) == (pytest.approx(1.28), "eps_high")
    assert row("clip_higher", 0.9).upper_by == "q = 1"  # 1.28 x 0.9 is above 1


@pytest.mark.parametrize("name", [name for name in preset_names() if load_preset(name).region.has_interval])
@pytest.mark.parametrize("p", (0.01, 0.5, 0.99))
def test_the_region_begins_at_the_bounds_that_are_shown(name, p):
    method, bounds = load_preset(name), row(name, p)
    for side, bound in (("outside_down", bounds.lower), ("outside_up", bounds.upper)):
        for inside, factor in ((True, 1 - 1e-9), (False, 1 + 1e-9)):
            ratio = 1 + (bound - 1) * factor
            if not 0 < p * ratio < 1:
                continue
            log_prob, log_prob_old = (torch.tensor([[math.log(x)]], dtype=torch.float64) for x in (p * ratio, p))
            one = torch.ones_like(log_prob)
            tokens = prepare(TokenBatch(log_prob, log_prob_old, one, one, entropy=one, entropy_old=one), ("entropy",))
            verdict = method.region.judge(tokens, as_interval=method.surrogate.needs_interval)
            assert getattr(verdict, side).item() != inside, (side, ratio)


# ---- what is not an interval -----------------------------------------------------------------------------------------
def test_says_what_cannot_be_shown():
    said = describe("x", load_preset("dppo_topk_tv"), PROBABILITIES)
    assert "Not an interval" in said and "never smaller than the binary one" in said
    said = describe("x", load_preset("band_kl_erc"), [0.3])
    assert "blocks tokens by what p does not tell" in said and "DivergenceBall" in said and "EntropyBand" in said
    assert row("band_kl_erc", 0.3) == row("band_kl", 0.3)
    assert row("band_kl_erc", 0.001).upper_by == "ratio_cap"


# ---- the command -----------------------------------------------------------------------------------------------------
def test_table_without_p(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # not needed but for --plot
    assert main(["dppo_binary_kl"]) == 0
    out = capsys.readouterr().out
    assert "are masked" in out and "rollout log-probs" in out
    header, *rows = [line for line in out.splitlines() if line.startswith("  ")]
    assert [float(line.split()[0]) for line in rows] == list(PROBABILITIES)


def test_fields_may_stand_anywhere(capsys):
    assert main(["band_kl", "--p", "0.01", "delta=0.03", "--p", "0.5", "ratio_cap=null"]) == 0
    out = capsys.readouterr().out
    assert "delta=0.03" in out and "ratio_cap" not in out
    (cells,) = [line.split() for line in out.splitlines() if line.startswith("     0.5")]
    low, high = row("band_kl", 0.5, delta=0.03).lower, row("band_kl", 0.5, delta=0.03).upper
    numbers = [0.5, low, high, low / 2, high / 2, 1 - low, high - 1]
    assert [float(cell) for cell in cells[:7]] == pytest.approx(numbers, rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["band_k"], "no such preset. Did you mean 'band_kl'?"),
        (["band_kl", "dleta=0.03"], "method.dleta: unknown key. Did you mean 'delta'?"),
        (["band_kl", "name=grpo"], "method.name: unknown key"),
        (["band_kl", "delta=-1"], "method.delta = -1"),
        (["band_kl", "delta=much"], "method.delta = 'much'"),
        (["band_kl", "delta"], "must be field=value"),
        (["band_kl", "surrogate=mask", "dual_clip=null"], "method.ratio_cap = 10.0: shapes an interval"),
        (["band_kl", "--p", "0"], "p = 0.0: must be a probability, > 0 and < 1"),
        (["band_kl", "--p", "1"], "p = 1.0"),
        (["band_kl", "--p", "nan"], "p = nan"),
        (["band_kl", "--plot", "/no/such/folder/x.png"], "--plot /no/such/folder/x.png"),
    ],
)
def test_errors(arguments, said, capsys):
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


def test_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for name in ("band_kl", "dppo_binary_tv", "grpo"):
        assert main([name, "--plot", str(tmp_path / f"{name}.png")]) == 0
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_plot_says_what_it_needs(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["band_kl", "--plot", str(tmp_path / "x.png")]) == 2
    assert "needs matplotlib" in capsys.readouterr().err
