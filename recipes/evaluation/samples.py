"""Samples on disk, one JSON object a line: a header that says what they are samples of, then each as it was finished.

The first line names the benchmark and model by their hashes, `n`, the seed and how was sampled; the others have

    problem, k       "<benchmark>/<row>" and which of the n samples
    seed             its own, from (seed, problem, k)
    text, finish     the response, and why it ended: "stop", or "length" at max_tokens
    tokens           of the response
    source, truth    what chooses the rule, and the right answer: with them the text can be graded again
    answer, correct  what the response answers (null: nothing), and the verdict
"""

import hashlib
import json
import os
import re
import reprlib
from dataclasses import dataclass, field
from pathlib import Path

from recipes.errors import UserError

IN_HEADER = {"benchmark": str, "benchmark_sha256": str, "problems": int, "n": int, "seed": int, "model": str, "model_sha256": str, "sampling": dict}
IN_SAMPLE = {"problem": str, "k": int, "seed": int, "text": str, "finish": str, "tokens": int, "source": str, "truth": str, "answer": str, "correct": bool}
ROW = re.compile("0|[1-9][0-9]{0,8}")  # of a problem's name


def sample_seed(seed: int, problem: str, k: int) -> int:
    """A seed in [0, 2^56): the same whenever and by whichever server the sample is made."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{k}/{problem}".encode()).digest()[:7], "big")


@dataclass
class Samples:
    """What one file holds.

    Args:
        file: where it is.
        header: by the names of IN_HEADER.
        rows: (problem, k) -> sample.
        size: bytes of whole lines; what a killed process left after them is no sample.
    """

    file: Path
    header: dict
    rows: dict[tuple[str, int], dict] = field(default_factory=dict)
    size: int = 0

    def missing(self, problems: list[str]) -> list[tuple[str, int]]:
        return [(problem, k) for problem in problems for k in range(self.header["n"]) if (problem, k) not in self.rows]

    def complete(self) -> "Samples":
        """Itself; raises UserError when samples are missing."""
        wanted = self.header["problems"] * self.header["n"]
        if len(self.rows) < wanted:
            raise UserError(f"{self.file}: has {len(self.rows)} of {wanted} samples. Start the evaluation that made it again: it continues.")
        return self

    def open(self):
        """The file, to add samples to, with its header; half a line at its end is cut off."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with open(self.file, "ab") as file:
            file.truncate(self.size)
        if self.size == 0:
            self._write(self.header)
        return self

    def add(self, sample: dict):
        self.rows[sample["problem"], sample["k"]] = sample
        self._write(sample)

    def _write(self, value: dict):
        with open(self.file, "ab") as file:
            file.write(json.dumps(value).encode() + b"\n")


def read(file: Path) -> Samples | None:
    """The samples in `file`; None when it is not there, or has not even a header.

    Raises:
        UserError: a line that is damaged, twice there, or belongs to other samples than the header says.
    """
    if not file.is_file():
        return None
    try:
        written = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}). Give yourself the right to, or remove it.") from error
    size = written.rfind(b"\n") + 1
    lines = written[:size].splitlines()
    if not lines:
        return None
    found = Samples(file, _parse(file, 1, lines[0], IN_HEADER), size=size)
    for number, line in enumerate(lines[1:], start=2):
        sample = _parse(file, number, line, IN_SAMPLE)
        problem, k = sample["problem"], sample["k"]
        benchmark, _, row = problem.rpartition("/")
        if benchmark != found.header["benchmark"] or sample["seed"] != sample_seed(found.header["seed"], problem, k):
            raise UserError(f"{file}, line {number}: is a sample of another benchmark or seed than the first line says. Remove it, or the file.")
        if not ROW.fullmatch(row) or int(row) >= found.header["problems"]:
            raise UserError(f"{file}, line {number}: {problem} is none of the {found.header['problems']} problems of the first line. Remove it, or the file.")
        if (problem, k) in found.rows or not 0 <= k < found.header["n"]:
            raise UserError(f"{file}, line {number}: sample {k} of {problem} is there twice or beyond n = {found.header['n']}. Remove it, or the file.")
        found.rows[problem, k] = sample
    return found


def resume(file: Path, header: dict) -> Samples:
    """What is in `file` already, when it was made as `header` says. Raises UserError when it was made otherwise."""
    found = read(file)
    if found is None:
        return Samples(file, header)
    for key in IN_HEADER:
        if key != "model" and found.header[key] != header[key]:  # the hash counts: the same model may have moved
            raise UserError(
                f"{file} holds samples of another evaluation: {key} = {found.header[key]} there, {header[key]} now "
                f"(model {found.header['model']} there). Choose another name=..., or remove the file."
            )
    return found


def read_folder(folder: str | os.PathLike, key: str) -> dict[str, Samples]:
    """The complete samples of an evaluation, by benchmark. Raises UserError when there are none, or some are missing."""
    files = sorted((Path(folder) / "samples").glob("*.jsonl"))
    found = {}
    for samples in filter(None, map(read, files)):
        if (other := found.setdefault(samples.header["benchmark"], samples.complete())) is not samples:
            raise UserError(f"{key}={folder}: {other.file.name} and {samples.file.name} are both samples of {samples.header['benchmark']}. Remove one.")
    if not found:
        raise UserError(f"{key}={folder}: has no samples (looked for {Path(folder).absolute()}/samples/*.jsonl). Give the folder of an evaluation.")
    kinds = []
    for samples in found.values():
        sampling = samples.header["sampling"] | {"max_tokens": None}  # benchmarks have their own
        kinds.append({"model_sha256": samples.header["model_sha256"], "sampling": sampling})
    if any(kind != kinds[0] for kind in kinds):
        raise UserError(f"{key}={folder}: its files are samples of different models or settings; their first lines say which. Part them.")
    return found


def _parse(file: Path, number: int, line: bytes, kinds: dict[str, type]) -> dict:
    try:
        value = json.loads(line)
        if not isinstance(value, dict) or not kinds.keys() <= value.keys():
            raise ValueError("lacks " + ", ".join(key for key in kinds if key not in value))
        for key, kind in kinds.items():
            if type(value[key]) is not kind and not (key == "answer" and value[key] is None):
                raise ValueError(f"{key} = {reprlib.repr(value[key])}, which must be of type {kind.__name__}")
        if least := [key for key in ("problems", "n") if value.get(key, 1) < 1]:
            raise ValueError(f"{least[0]} = {value[least[0]]}, which must be 1 or more")
    except (ValueError, TypeError, RecursionError) as error:
        what = "header" if kinds is IN_HEADER else "sample"
        raise UserError(f"{file}, line {number}: is no {what} ({error}). Remove the line, or the file.") from error
    return value
