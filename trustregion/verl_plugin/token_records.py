"""What the policy loss sees of a few responses, token by token, as parquet files (`token_records` in configs/train.yaml).

In a step that is due, the trainer asks for it; the engine has its worker's recorder choose responses before an update and
write them after it; in between, the policy loss shows the recorder every micro-batch. docs/report.md has the columns.
Imports no verl.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from trustregion import PolicyLoss, TokenBatch
from trustregion.loss import Diagnosis
from trustregion.verl_plugin.checkpoints import write_whole

FOLDER = "tokens"  # in a run's folder
# Of a response in the batch: its key in verl's queue, which samples/ has as `uid`; and its number among those that are
# recorded in an update, or -1.
SEQUENCE, CHOSEN = "trust_region_sequence", "trust_region_chosen"
SCHEMA = pa.schema({
    "step": pa.int32(), "update": pa.int32(), "sequence": pa.string(), "position": pa.int32(), "token_id": pa.int32(),
    "token": pa.string(), "log_prob_old": pa.float32(), "log_prob": pa.float32(), "advantage": pa.float32(),
    "entropy_old": pa.float32(), "entropy": pa.float32(), "divergence": pa.float32(), "active": pa.bool_(),
    "cause": pa.string(),
})  # fmt: skip

logger = logging.getLogger(__name__)


def is_due(step: int, every: int) -> bool:
    """Whether a training step (from 1) is recorded: the first one and every k-th; none with `every` 0."""
    return every > 0 and (step == 1 or step % every == 0)


class TokenRecorder:
    """The recorder of one worker.

    Args:
        tokenizer: its `decode` makes the strings of tokens.
        rank, workers: which worker this is, among those that have different responses.
    """

    def __init__(self, tokenizer, rank: int = 0, workers: int = 1):
        self._decode = cache(lambda token_id: tokenizer.decode([token_id]))
        self._rank, self._workers = rank, workers
        self._path, self._before = None, []  # the step's file, and the tables of its earlier updates

    def begin(
        self, update: int, names: Sequence[str], token_ids: Sequence[Tensor], masks: Sequence[Tensor],
        *, step: int, folder: str, sequences: int,
    ) -> Tensor:  # fmt: skip
        """Chooses this worker's share of an update's first `sequences` responses; those without a live token do not count.

        Args:
            update: which one in the step, from 0.
            names, token_ids, masks: of the worker's responses in the update; [T] each, and B of them.
            step, folder, sequences: what the trainer asks for.

        Returns the numbers CHOSEN, [B].
        """
        name = f"{step}.parquet" if self._workers == 1 else f"{step}-{self._rank}.parquet"
        if self._path != Path(folder, name):
            self._path, self._before = Path(folder, name), []
        share = sequences // self._workers + (self._rank < sequences % self._workers)
        rows = [row for row, mask in enumerate(masks) if mask.any()][:share]
        self._about = {"step": step, "update": update}
        self._names, self._ids = [names[row] for row in rows], [token_ids[row].tolist() for row in rows]
        self._tables: dict[int, pa.Table] = {}
        chosen = torch.full((len(names),), -1, device=token_ids[0].device)
        chosen[rows] = torch.arange(len(rows), device=chosen.device)
        return chosen

    def record(self, chosen: Tensor, loss: PolicyLoss, batch: TokenBatch):
        """Takes down the chosen responses of a micro-batch. `chosen`: their numbers, [B]."""
        rows = (chosen >= 0).nonzero().flatten()
        if not len(rows):
            return
        tensors = {name: value for name, value in vars(batch).items() if torch.is_tensor(value)}
        seen = loss.diagnose(replace(batch, **{name: value.detach()[rows] for name, value in tensors.items()}))
        for row, number in enumerate(chosen[rows].tolist()):
            self._tables[number] = self._table(number, row, seen)

    def end(self):
        """Writes the step's file: this update's rows after those of the updates before it. Where it cannot be written,
        says so in the log: a run is worth more than what is recorded of it."""
        self._before += [table for _, table in sorted(self._tables.items())]
        if not self._before:
            return
        buffer = pa.BufferOutputStream()
        pq.write_table(pa.concat_tables(self._before), buffer)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, buffer.getvalue().to_pybytes())
        except OSError as error:
            logger.error(
                f"cannot write the token records {self._path} ({error.strerror}). Training goes on without them. Make room "
                "there, or set token_records.every=0."
            )

    def _table(self, number: int, row: int, seen: Diagnosis) -> pa.Table:
        tokens, live = seen.tokens, seen.tokens.live[row]
        positions = live.nonzero().flatten().tolist()
        token_ids = [self._ids[number][position] for position in positions]
        blocked_by = {cause: blocked[row][live].tolist() for cause, blocked in seen.blocked_by.items()}
        causes = ["+".join(cause for cause in blocked_by if blocked_by[cause][i]) for i in range(len(positions))]

        def values(x: Tensor | None) -> pa.Array:
            kind = pa.float32()
            return pa.nulls(len(positions), kind) if x is None else pa.array(x[row][live].float().cpu().numpy(), kind)

        columns = {
            **{name: [value] * len(positions) for name, value in self._about.items()},
            "sequence": [self._names[number]] * len(positions),
            "position": positions,
            "token_id": token_ids,
            "token": [self._decode(token_id) for token_id in token_ids],
            "log_prob_old": values(tokens.log_prob_old),
            "log_prob": values(tokens.log_prob),
            "advantage": values(tokens.advantages),
            "entropy_old": values(tokens.entropy_old),
            "entropy": values(tokens.entropy),
            "divergence": values(seen.verdict.divergence),
            "active": [not cause for cause in causes],
            "cause": causes,
        }
        return pa.table(columns, schema=SCHEMA)
