"""What papers have published, from configs/published_results.csv: facts, each with where it was found."""

import csv
import math
from dataclasses import dataclass
from pathlib import Path

from recipes.errors import UserError
from trustregion.presets import configs_folder

COLUMNS = ("paper", "base_model", "method", "benchmark", "metric", "value", "provenance", "note")
OPTIONAL = ("note",)


@dataclass(frozen=True)
class Published:
    """One number, in per cent, under the names that the paper uses; `provenance` says how good the source is."""

    paper: str
    base_model: str
    method: str
    benchmark: str
    metric: str
    value: float
    provenance: str
    note: str

    @property
    def source(self) -> str:
        return f"{self.paper}, {self.provenance}"


def read_published(path: Path | None = None) -> list[Published]:
    """The rows of `path`, by default of configs/published_results.csv.

    Raises UserError that names file, line and column: columns are missing or others, a cell is empty, a value is no
    percentage, or a number is there twice.
    """
    path = path or configs_folder() / "published_results.csv"
    found = {}
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if tuple(reader.fieldnames or ()) != COLUMNS:
                raise UserError(f"{path}, line 1: the columns are {', '.join(reader.fieldnames or ['none'])}; they must be {', '.join(COLUMNS)}")
            for row in reader:
                one = _published(row, f"{path}, line {reader.line_num}")
                key = (one.paper, one.base_model, one.method, one.benchmark, one.metric)
                if key in found:
                    raise UserError(f"{path}, line {reader.line_num}: {' / '.join(key)} is there twice. Remove one of the two.")
                found[key] = one
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    return [*found.values()]


def _published(row: dict, at: str) -> Published:
    if None in row or None in row.values():
        raise UserError(f"{at}: has {'more' if None in row else 'fewer'} cells than the {len(COLUMNS)} columns. Quote cells that have commas.")
    if empty := [name for name in COLUMNS if name not in OPTIONAL and not row[name].strip()]:
        raise UserError(f"{at}: {', '.join(empty)} is empty. Fill it in, or remove the line: a number that nobody published has none.")
    try:
        value = float(row["value"])
    except ValueError:
        value = math.nan
    if not 0 <= value <= 100:
        raise UserError(f"{at}: value = {row['value']!r}: must be a number of per cent, 0 to 100")
    return Published(**{**row, "value": value})
