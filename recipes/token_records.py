"""Reads back what was recorded of single tokens (`token_records`): counts over a whole run, and single responses.

Files are taken one at a time: those of a long run are more than fits into memory. One that cannot be read is left out.
"""

from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recipes.run_files import token_files

SCHEMA = pa.schema({  # of trustregion.verl_plugin.token_records, which needs torch
    "step": pa.int32(), "update": pa.int32(), "sequence": pa.string(), "position": pa.int32(), "token_id": pa.int32(),
    "token": pa.string(), "log_prob_old": pa.float32(), "log_prob": pa.float32(), "advantage": pa.float32(),
    "entropy_old": pa.float32(), "entropy": pa.float32(), "divergence": pa.float32(), "active": pa.bool_(),
    "cause": pa.string(),
})  # fmt: skip
CAN_BE_NULL = ("entropy_old", "entropy", "divergence")
CAUSES = ("region", "entropy", "dual_clip")


@dataclass(frozen=True)
class TokenCount:
    """How often something happened to a token string.

    Args:
        token: the string.
        count: how often it happened.
        seen: how often the string was recorded at all.
        blocked: the share of these that anything blocked.
        p_old: the mean of the anchor's probability where it happened.
    """

    token: str
    count: int
    seen: int
    blocked: float
    p_old: float


@dataclass
class Records:
    """Those of a run.

    Args:
        files: by step, ascending; those that could be read.
        damaged: the others.
        recorded: how many responses; one in two updates counts twice.
        sums: by token string and cause ("" where kept, else one or more of CAUSES joined by "+"): how many tokens, and
            the sum of the anchor's probabilities.
    """

    files: dict[int, list[Path]] = field(default_factory=dict)
    damaged: list[Path] = field(default_factory=list)
    recorded: int = 0
    sums: dict[tuple[str, str], tuple[int, float]] = field(default_factory=dict)

    def count(self, cause: str | None = None) -> int:
        """How many tokens were recorded; those that a cause blocked, alone or with others; or with "" those kept."""
        return sum(n for (_, causes), (n, _) in self.sums.items() if cause is None or cause in causes.split("+"))

    def most_often(self, cause: str, most: int) -> list[TokenCount]:
        """The token strings that a cause blocked most often, or with "" that were most often kept; at most `most`."""
        seen, kept, counted, p_old = {}, {}, {}, {}
        for (token, causes), (n, total) in self.sums.items():
            seen[token] = seen.get(token, 0) + n
            kept[token] = kept.get(token, 0) + n * (causes == "")
            if cause in causes.split("+"):
                counted[token], p_old[token] = counted.get(token, 0) + n, p_old.get(token, 0) + total
        chosen = sorted(counted, key=lambda token: (-counted[token], token))[:most]
        return [TokenCount(t, counted[t], seen[t], 1 - kept[t] / seen[t], p_old[t] / counted[t]) for t in chosen]

    def responses(self, cause: str, most: int) -> list[list[dict]]:
        """The rows of the responses in which a cause blocked most tokens, in the last step where it blocked any.

        Each is of one update, and no two answer the same prompt.
        """
        for paths in reversed(self.files.values()):
            rows = pa.concat_tables(map(_read, paths))
            blocked = {}
            for row in rows.select(["sequence", "update", "cause"]).to_pylist():
                if cause in row["cause"].split("+"):
                    key = row["sequence"], row["update"]
                    blocked[key] = blocked.get(key, 0) + 1
            best = {}  # by prompt
            for sequence, update in sorted(blocked, key=lambda key: (-blocked[key], key)):
                best.setdefault(sequence.partition("_")[0], (sequence, update))
            if best:
                return [_of_response(rows, *key) for key in [*best.values()][:most]]
        return []


def read_records(run_dir: Path) -> Records | None:
    """None where nothing was recorded."""
    files, found = token_files(run_dir), Records()
    for step, paths in files.items():
        for path in paths:
            try:
                rows = _read(path)
            except (OSError, KeyError, pa.ArrowException):
                found.damaged.append(path)
                continue
            found.files.setdefault(step, []).append(path)
            found.recorded += len(rows.group_by(["update", "sequence"]).aggregate([]))
            rows = rows.append_column("p_old", pc.exp(rows["log_prob_old"].cast(pa.float64())))
            sums = rows.group_by(["token", "cause"]).aggregate([("p_old", "count"), ("p_old", "sum")])
            for row in sums.to_pylist():
                n, total = found.sums.get((row["token"], row["cause"]), (0, 0.0))
                found.sums[row["token"], row["cause"]] = n + row["p_old_count"], total + row["p_old_sum"]
    return found if files else None


def _read(path: Path) -> pa.Table:
    """Raises OSError, KeyError or ArrowException where it is not what the recorder writes."""
    rows = pq.read_table(path.absolute()).select(SCHEMA.names).cast(SCHEMA)
    if any(rows[name].null_count for name in SCHEMA.names if name not in CAN_BE_NULL):
        raise pa.ArrowInvalid("has rows without a value")
    return rows


def _of_response(rows: pa.Table, sequence: str, update: int) -> list[dict]:
    mine = (pc.field("sequence") == sequence) & (pc.field("update") == update)
    return rows.filter(mine).sort_by("position").to_pylist()
