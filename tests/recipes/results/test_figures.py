"""The papers' figures: that they draw what runs have logged, and nothing where there is nothing."""

import numpy as np
import pandas as pd
import pytest

from recipes.results.jobs import Job, read_run
from trustregion import explain, load_preset

figures = pytest.importorskip("recipes.figures")


def drawn(figure) -> dict:
    """The panels, by their titles."""
    return {axes.get_title(loc="left"): axes for axes in figure.axes}


def lines(axes) -> dict[str, np.ndarray]:
    return {line.get_label(): line.get_ydata() for line in axes.lines if not line.get_label().startswith("_")}


def jobs(values: dict[str, list[list[float]]], key: str) -> list[Job]:
    """A job a seed, whose series of `key` are the lists of a method."""
    return [
        Job(method, seed, len(series), {key: dict(enumerate(series, start=1))})
        for method, seeds in values.items() for seed, series in enumerate(seeds)
    ]  # fmt: skip


def tokens(**columns) -> pd.DataFrame:
    return pd.DataFrame({"log_prob_old": -1.0, "log_prob": -1.1, "entropy_ratio": np.nan, "cause": "", "weight": 1.0} | columns)


def test_bounds_are_those_that_explain_prints():
    panels = drawn(figures.bounds())
    assert [*panels] == ["Band-KL", "Band-TV", "Band-χ²"]
    probabilities = 1 / (1 + np.exp(-figures.P[0]))
    (expected,) = explain.explain(load_preset("band_tv", delta=0.10), [probabilities[150]])
    assert lines(panels["Band-TV"])["δ = 0.10"][150] == pytest.approx(expected.upper) and 1 < expected.upper < 10
    assert lines(panels["Band-KL"])["clip_higher: 0.8 to 1.28"][0] == pytest.approx(1.28)


def test_entropy_is_the_mean_of_seeds_between_the_lowest_and_the_highest():
    panels = drawn(figures.entropy(jobs({"grpo": [[0.1, 0.2], [0.3, 0.6]], "band_kl": [[0.5, 0.5]]}, "entropy")))
    assert lines(panels["grpo"])["grpo"] == pytest.approx([0.2, 0.4]) and lines(panels["band_kl"])["band_kl"] == pytest.approx([0.5, 0.5])
    (band,) = panels["grpo"].collections
    assert sorted({y for _, y in band.get_paths()[0].vertices}) == pytest.approx([0.1, 0.2, 0.3, 0.6]) and not panels["band_kl"].collections
    assert panels["grpo"].get_ylim() == panels["band_kl"].get_ylim()


def test_seeds_of_different_lengths_are_averaged_where_both_are():
    panels = drawn(figures.entropy(jobs({"grpo": [[0.1, 0.2, 0.9], [0.3, 0.6]]}, "entropy")))
    assert lines(panels["grpo"])["grpo"] == pytest.approx([0.2, 0.4])


def test_clip_rates_are_drawn_in_per_cent_by_bucket():
    found = jobs({"grpo": [[0.1, 0.2]]}, "trust/clip_fraction_up/0-0.01") + jobs({"band_kl": [[0.0, 0.0]]}, "trust/clip_fraction_up/0.8-1")
    panels = drawn(figures.clip_high(found))
    assert [*panels] == ["p in 0-0.01"] and lines(panels["p in 0-0.01"])["grpo"] == pytest.approx([10, 20])  # nothing in the others


def test_causes_are_bars_of_the_mean_over_steps_and_seeds():
    found = jobs({"erc_dapo": [[0.1, 0.2], [0.3, 0.4]]}, "trust/blocked_by_entropy") + jobs({"grpo": [[0.02, 0.04]]}, "trust/blocked_by_region")
    (axes,) = figures.blocked(found).axes
    widths = {container.get_label(): [bar.get_width() for bar in container] for container in axes.containers}
    assert widths == {"by the region": pytest.approx([0, 3]), "by entropy": pytest.approx([25, 0]), "by dual clip": [0, 0]}
    assert [label.get_text() for label in axes.get_yticklabels()] == ["erc_dapo", "grpo"]


def test_entropy_ratios_are_weighted_and_the_band_is_drawn():
    kept, blocked = tokens(entropy_ratio=[1.0, 1.01], weight=[6.0, 3.0]), tokens(entropy_ratio=[3.0], cause="region+entropy")
    found = [Job("erc_dapo", 0, 1, {}, tokens=pd.concat([kept, blocked])), Job("grpo", 0, 1, {}, tokens=tokens(cause=["region"]))]
    panels = drawn(figures.entropy_ratio(found))
    assert [*panels] == ["erc_dapo"]
    heights = {bars[0].get_label(): [bar.get_height() for bar in bars] for bars in panels["erc_dapo"].containers}
    assert sum(heights["kept"]) == pytest.approx(90) and heights["blocked by entropy"][-1] == pytest.approx(10)  # beyond the edge: the last
    assert [line.get_xdata()[0] for line in panels["erc_dapo"].lines] == pytest.approx([0.95, 1.05])


def test_tokens_are_points_coloured_by_cause():
    rows = tokens(log_prob_old=np.log([0.1, 0.2, 0.3]), log_prob=np.log([0.2, 0.3, 0.4]), cause=["", "region", "region+dual_clip"])
    axes = drawn(figures.moves([Job("dppo_topk_kl", 0, 1, {}, tokens=rows), Job("stability", 0, 1, {}, tokens=rows)]))
    points = {dots.get_label(): dots.get_offsets().tolist() for dots in axes["dppo_topk_kl"].collections if dots.get_label()[0] != "_"}
    assert points["kept"] == [pytest.approx([0.1, 0.2])] and points["blocked by entropy"] == []
    assert points["blocked by region"] == [pytest.approx([0.2, 0.3]), pytest.approx([0.3, 0.4])]
    assert points["blocked by dual clip"] == [pytest.approx([0.3, 0.4])]
    shaded = [dots for dots in axes["dppo_topk_kl"].collections if dots.get_label()[0] == "_"]
    assert len(shaded) == 1 and not [dots for dots in axes["stability"].collections if dots.get_label()[0] == "_"]  # no preset


def test_what_was_not_recorded_is_not_drawn(tmp_path):
    assert figures.draw_all(tmp_path, [Job("grpo", 0, 3, {"reward": {1: 0.5}})], with_bounds=False) == []
    (tmp_path / "moves.png").touch()
    assert figures.draw_all(tmp_path, [], with_bounds=False) == [] and not list(tmp_path.iterdir())  # nor left from before


@pytest.mark.slow
def test_all_figures_of_a_study_are_pictures(make_study, tmp_path):
    sweep = make_study(("grpo", "erc_gppo", "dppo_topk_kl"), seeds=(0, 1), tokens=True)
    found = [read_run(sweep / f"method={method}+seed={seed}", method, seed) for method in ("grpo", "erc_gppo", "dppo_topk_kl") for seed in (0, 1)]
    written = figures.draw_all(tmp_path / "figures", found)
    assert [path.stem for path in written] == ["bounds", "clip_high", "entropy", "blocked", "entropy_ratio", "moves"]
    for path in written:
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
    before = written[2].read_bytes()
    assert figures.draw_all(tmp_path / "figures", found)[2].read_bytes() == before
