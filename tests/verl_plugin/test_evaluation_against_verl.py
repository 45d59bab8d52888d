"""recipes.evaluate's estimators against verl's own, of the same samples."""

import numpy as np
import pytest

from recipes.evaluation.scores import powers_to
from recipes.evaluation.statistics import DRAWS, maj_at_k, mean_at_k, verl_best_at_k

pytest.importorskip("verl")
from verl.trainer.ppo.metric_utils import process_validation_metrics  # noqa: E402

RNG = np.random.default_rng(0)
CORRECT = RNG.random((40, 12)) < np.linspace(0, 1, 40)[:, None]  # problems from hopeless to sure
ANSWERS = [["7" if right else RNG.choice(["5", "6"]) for right in row] for row in CORRECT]


@pytest.fixture(scope="module")
def verls() -> dict[str, float]:
    """Of each metric, the mean over problems."""
    problems, n = CORRECT.shape
    infos = {"acc": CORRECT.flatten().astype(float).tolist(), "pred": [answer for row in ANSWERS for answer in row]}
    uids = [str(problem) for problem in range(problems) for _ in range(n)]
    return process_validation_metrics(["sums"] * len(uids), uids, infos)["sums"]["acc"]


@pytest.mark.parametrize("k", powers_to(12)[1:])
def test_best_at_k_is_verls(verls, k):
    """Both draw DRAWS times, from other generators: equal to five standard errors of the two, and to the exact value."""
    ours, theirs = verl_best_at_k(CORRECT, k, seed=0), verls[f"best@{k}/mean"]
    solved = 1 - (1 - CORRECT.mean(axis=1)) ** k  # of k draws with replacement one is right
    # verl takes the same draws for every problem, so that its error does not shrink with their number.
    error = np.sqrt(solved * (1 - solved) / DRAWS).mean()
    assert theirs == pytest.approx(solved.mean(), abs=5 * error) and ours == pytest.approx(solved.mean(), abs=5 * error)
    assert ours == pytest.approx(theirs, abs=5 * 2**0.5 * error) and error < 0.02


def test_best_at_k_is_verls_to_the_last_digit_of_the_same_draws(verls, monkeypatch):
    k, n = 8, CORRECT.shape[1]
    np.random.seed(42)  # verl's own
    draws = np.random.choice(n, (DRAWS, k), replace=True)

    class SameDraws:
        def integers(self, low, high, shape):
            assert (low, high, shape) == (0, n, (DRAWS, k))
            return draws

    monkeypatch.setattr(np.random, "default_rng", lambda seed: SameDraws())
    assert verl_best_at_k(CORRECT, k, seed=0) == pytest.approx(verls[f"best@{k}/mean"], rel=1e-12)


def test_means_are_verls(verls):
    assert mean_at_k(CORRECT) == pytest.approx(verls["mean@12"], rel=1e-12)


def test_majorities_are_verls_but_for_ties_and_replacement(verls):
    """verl votes among draws with replacement, and gives a tie to the answer that comes first; ours are all n, a tie's mean."""
    assert maj_at_k(ANSWERS, CORRECT, 12, seed=0) == pytest.approx(verls["maj@12/mean"], abs=0.05)
