"""The data set as verl will read it, and the rules that score it."""

import json
import time

import pyarrow.parquet as parquet
import pytest

from recipes.assets.arithmetic import prepare
from recipes.data_check import check_prompts
from recipes.errors import UserError
from recipes.rewards import compute_score


def rows_of(folder, split) -> list[dict]:
    return parquet.read_table(folder / f"{split}.parquet").to_pylist()


@pytest.mark.parametrize("arguments", [{}, {"wording": "calculate", "terms": 2, "train_size": 80, "test_size": 20}])
def test_each_sum_has_its_answer_and_no_test_sum_is_trained_on(tmp_path, arguments):
    folder = prepare(tmp_path / "data", **arguments)
    train, test = rows_of(folder, "train"), rows_of(folder, "test")
    assert (len(train), len(test)) == (arguments.get("train_size", 872), arguments.get("test_size", 128))
    prompts = [row["prompt"][0]["content"] for row in train + test]
    assert len(set(prompts)) == len(prompts)
    for split, rows in {"train": train, "test": test}.items():
        check_prompts(folder / f"{split}.parquet")
        for index, row in enumerate(rows):
            expression = row["prompt"][0]["content"].removeprefix("Calculate ").rstrip("=.")
            answer = row["reward_model"]["ground_truth"]
            assert answer == str(sum(map(int, expression.split("+"))))
            assert row["extra_info"] == {"split": split, "index": index}
            assert compute_score(row["data_source"], f"{expression}={answer}", answer) == 1.0
            assert compute_score(row["data_source"], f"{expression}={int(answer) + 1}", answer) == 0.0


def test_every_field_is_in_the_recipe_that_is_compared(tmp_path):
    manifest = json.loads((prepare(tmp_path / "data", seed=3, train_size=50) / "asset.json").read_text())
    assert manifest["recipe"] == {
        "name": "arithmetic", "version": 1, "seed": 3, "wording": "chain", "terms": 3, "numbers": 10, "train_size": 50, "test_size": 128,
    }  # fmt: skip


def test_the_seed_decides_every_byte(tmp_path):
    first, same, other = (prepare(tmp_path / str(i), seed=seed) for i, seed in enumerate((3, 3, 4)))
    for name in ("train.parquet", "test.parquet"):
        assert (first / name).read_bytes() == (same / name).read_bytes()
        assert (first / name).read_bytes() != (other / name).read_bytes()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"wording": "poem"}, "wording=poem.*chain, calculate"),
        ({"terms": 1}, "terms=1.*>= 2"),
        ({"train_size": "many"}, "train_size=many"),
        ({"train_size": 990}, "train_size=990 and test_size=128: only 1000 different sums"),
    ],
)
def test_what_cannot_be_made_is_said(tmp_path, arguments, message):
    with pytest.raises(UserError, match=message):
        prepare(tmp_path / "data", **arguments)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    "response, answer, reward",
    [
        ("7+5=12", "12", 1), ("12", "12", 1), (" 12\n", "12", 1), ("3+4=12=12", "12", 1),
        ("7", "12", 0), ("7+5=13", "12", 0), ("7+5=1", "12", 0), ("12=7", "12", 0), ("7+5=12=", "12", 0), ("7+5=12.", "12", 0),
        ("", "12", 0), (None, "12", 0), ("7+5=١٢", "12", 0), ("9" * 10_000, "12", 0),
    ],
)  # fmt: skip
def test_a_chain_must_end_in_exactly_the_answer(response, answer, reward):
    assert compute_score("arithmetic/chain", response, answer) == reward


@pytest.mark.parametrize(
    "response, answer, reward",
    [
        ("3 + 4 = 7. Not 9.", "7", 1), ("The sum of 3 and 4 is 7.", "7", 1), ("3 + 4 =\n 7", "7", 1), ("It is 07.0", "7", 1),
        ("= 1,234", "1234", 1), ("3 - 5 = -2", "-2", 1), ("10-12", "12", 1), ("= +7", "7", 1), ("= 0", "0", 1), ("7", 7, 1),
        ("3 + 4 = 8, no, 7", "7", 0), ("= 7.5", "7", 0), ("= 70", "7", 0), ("= -7", "7", 0), ("seven", "7", 0), ("3 + 4 =", "7", 0),
        ("", "7", 0), (None, "7", 0), ("= ٧", "7", 0), ("=" * 5000 + "7", "7", 1),
    ],
)  # fmt: skip
def test_the_stated_number_is_found(response, answer, reward):
    assert compute_score("arithmetic/calculate", response, answer) == reward


@pytest.mark.parametrize("piece", ["9", "1,", "= ", "-+", "1.", ",111", "=9", " "])
def test_hostile_text_costs_little_time(piece):
    started = time.perf_counter()
    assert compute_score("arithmetic/calculate", piece * 10_000, "3") == 0.0
    assert compute_score("arithmetic/chain", piece * 10_000, "3") == 0.0
    assert time.perf_counter() - started < 0.5


@pytest.mark.slow
def test_other_data_is_scored_by_verl():
    assert compute_score("openai/gsm8k", "so it is\n#### 3", "3") == 1.0
    with pytest.raises(NotImplementedError, match="unheard_of"):
        compute_score("unheard_of", "3", "3")
