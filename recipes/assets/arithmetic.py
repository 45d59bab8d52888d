"""Sums of small numbers as a verl data set, each with its right answer: generated, seeded, no download.

Two wordings: `chain` (`3+4+5=`) for the tiny model, `calculate` (`Calculate 3 + 4.`) for pretrained ones; recipes/rewards.py
scores either. reasoning-gym's `chain_sum` makes the same sums, but it draws train and test with replacement (with numbers
this small most test prompts would be trained on), and it installs ten exactly pinned packages, some built from C source.
"""

import os
import random
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet as parquet

from recipes.assets.folders import build_once
from recipes.errors import UserError

VERSION = 1
SCHEMA = pyarrow.schema(
    {
        "data_source": pyarrow.string(),
        "prompt": pyarrow.list_(pyarrow.struct({"role": pyarrow.string(), "content": pyarrow.string()})),
        "ability": pyarrow.string(),
        "reward_model": pyarrow.struct({"style": pyarrow.string(), "ground_truth": pyarrow.string()}),
        "extra_info": pyarrow.struct({"split": pyarrow.string(), "index": pyarrow.int64()}),
    }
)


@dataclass(frozen=True)
class Wording:
    data_source: str  # what recipes/rewards.py chooses its rule by
    prompt: str
    plus: str

    def ask(self, numbers: tuple[int, ...]) -> str:
        return self.prompt.format(self.plus.join(map(str, numbers)))


WORDINGS = {
    "chain": Wording("arithmetic/chain", prompt="{}=", plus="+"),
    "calculate": Wording("arithmetic/calculate", prompt="Calculate {}.", plus=" + "),
}


@dataclass(frozen=True)
class Sums:
    """What decides the data set; the same values give the same bytes.

    Args:
        seed: chooses which sums, and which of them are for the test.
        wording: `chain` or `calculate`.
        terms: numbers in each sum.
        numbers: how many different numbers there are, counted from 0 (10: one digit).
        train_size, test_size: rows.

    Raises:
        UserError: no data set can be like this.
    """

    seed: int = 0
    wording: str = "chain"
    terms: int = 3
    numbers: int = 10
    train_size: int = 872
    test_size: int = 128

    def __post_init__(self):
        if self.wording not in WORDINGS:
            raise UserError(f"data.prepare.wording={self.wording}: there is no such wording. Choose one of {', '.join(WORDINGS)}.")
        for name, least in {"terms": 2, "numbers": 2, "train_size": 1, "test_size": 1}.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise UserError(f"data.prepare.{name}={value}: must be a whole number >= {least}.")
        if self.train_size + self.test_size > self.different:
            raise UserError(
                f"data.prepare.train_size={self.train_size} and test_size={self.test_size}: only {self.different} different sums of "
                f"{self.terms} terms below {self.numbers} exist. Ask for fewer rows, or raise data.prepare.terms or data.prepare.numbers."
            )

    @property
    def different(self) -> int:
        return self.numbers**self.terms


def prepare(folder: str | os.PathLike, **chosen) -> Path:
    """Writes `train.parquet` and `test.parquet`, which share no prompt, unless they are there already.

    Args:
        folder: where they go.
        chosen: the fields of `Sums`.

    Raises:
        UserError: fields that no data set can have; `folder` holds something else or cannot be written.
    """
    sums = Sums(**chosen)
    return build_once(folder, {"name": "arithmetic", "version": VERSION, **asdict(sums)}, lambda part: _write(part, sums))


def _write(folder: Path, sums: Sums) -> None:
    wording = WORDINGS[sums.wording]
    drawn = random.Random(sums.seed).sample(range(sums.different), sums.train_size + sums.test_size)
    for split, codes in {"train": drawn[: sums.train_size], "test": drawn[sums.train_size :]}.items():
        rows = [_row(wording, _digits(code, sums.terms, sums.numbers), split, index) for index, code in enumerate(codes)]
        parquet.write_table(pyarrow.Table.from_pylist(rows, SCHEMA), folder / f"{split}.parquet")


def _digits(code: int, length: int, base: int) -> tuple[int, ...]:
    return tuple(code // base**place % base for place in range(length))


def _row(wording: Wording, numbers: tuple[int, ...], split: str, index: int) -> dict:
    return {
        "data_source": wording.data_source,
        "prompt": [{"role": "user", "content": wording.ask(numbers)}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(sum(numbers))},
        "extra_info": {"split": split, "index": index},
    }
