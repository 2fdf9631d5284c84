"""The order of the rows, step by step, and the tensors of a step. The position is a small, exact JSON value."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch

from megatrain.datasets import Row
from megatrain.errors import UserError

IGNORED = -100
_SAMPLED_STEPS = 32


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The micro-batches of one optimizer step, and its tokens counted three ways."""

    micro_batches: list[dict[str, torch.Tensor]]
    target_tokens: int
    real_tokens: int
    padded_tokens: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Position:
    """Where the next step begins: ``row`` rows of ``epoch`` (from 0) have been used."""

    epoch: int = 0
    row: int = 0


def mean_padded_tokens(lengths: Sequence[int], batch_size: int, micro_batch_size: int) -> float:
    """Tokens of a usual step, padding counted, over rows of these ``lengths``: a sample of `Batches`' steps."""
    draw = random.Random(0)
    steps = []
    for _ in range(_SAMPLED_STEPS):
        chosen = sorted(draw.sample(lengths, batch_size), reverse=True)
        groups = (chosen[i : i + micro_batch_size] for i in range(0, batch_size, micro_batch_size))
        steps.append(sum(len(group) * group[0] for group in groups))
    return fmean(steps)


def steps_differ(rows: Sequence[Row], batch_size: int) -> bool:
    """Whether steps are of several shapes: rows differ in length, or the last step of an epoch has fewer of them."""
    return len({len(row) for row in rows}) > 1 or (len(rows) > batch_size and len(rows) % batch_size > 0)


class Batches:
    """Steps of ``batch_size`` rows; the last step of an epoch takes what is left.

    The order of an epoch depends on (seed, epoch) alone, so a run continues anywhere from its position.
    Within a step, rows of like length share a micro-batch: the result does not depend on the split, padding does.
    """

    def __init__(
        self,
        rows: list[Row],
        *,
        batch_size: int,
        micro_batch_size: int,
        seed: int,
        shuffle: bool,
        pad_id: int,
        fingerprint: str,
    ) -> None:
        self._rows, self._batch_size, self._micro = rows, batch_size, micro_batch_size
        self._seed, self._shuffle, self._pad_id, self._fingerprint = seed, shuffle, pad_id, fingerprint
        self._order: tuple[int, list[int]] | None = None
        self.position = Position()

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self._rows) // self._batch_size)

    @property
    def largest(self) -> tuple[int, int, int]:
        """``(rows, tokens, micro-batches)`` of the largest step that can occur."""
        rows = min(self._batch_size, len(self._rows))
        micro = min(self._micro, rows)
        return micro, max(len(r) for r in self._rows), -(-rows // micro)

    @property
    def ragged(self) -> bool:
        """Whether some micro-batches are smaller than others."""
        rows = min(self._batch_size, len(self._rows))
        return steps_differ(self._rows, self._batch_size) or rows % min(self._micro, rows) > 0

    def next_step(self) -> StepBatch:
        """The next step's micro-batches; moves the position."""
        epoch, start = self.position.epoch, self.position.row
        order = self._epoch_order(epoch)
        chosen = sorted((self._rows[i] for i in order[start : start + self._batch_size]), key=len, reverse=True)
        end = start + len(chosen)
        self.position = Position(epoch, end) if end < len(order) else Position(epoch + 1, 0)
        groups = [chosen[i : i + self._micro] for i in range(0, len(chosen), self._micro)]
        return StepBatch(
            [self._collate(group) for group in groups],
            target_tokens=sum(int(r.target[1:].sum()) for r in chosen),
            real_tokens=sum(len(r) for r in chosen),
            padded_tokens=sum(len(group) * len(group[0]) for group in groups),
            epoch=epoch,
        )

    def state(self) -> dict[str, Any]:
        """The position as JSON, with what identifies the rows."""
        return {**asdict(self.position), "rows": len(self._rows), "fingerprint": self._fingerprint}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue at a saved position. Raises :class:`UserError` if the rows are not those of the saved run."""
        if state["fingerprint"] != self._fingerprint:
            raise UserError(
                f"data.train: not the rows that the saved run was trained on\n"
                f"  found: {len(self._rows)} rows, {state['rows']} in the save\n"
                "  fix:   give the same file, template and data options, or start anew in another output_dir"
            )
        self.position = Position(state["epoch"], state["row"])

    def _epoch_order(self, epoch: int) -> list[int]:
        if self._order is None or self._order[0] != epoch:
            order = list(range(len(self._rows)))
            if self._shuffle:
                random.Random(f"{self._seed} {epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1]

    def _collate(self, rows: list[Row]) -> dict[str, torch.Tensor]:
        """Rows padded on the right to the longest. No attention mask: causal attention never looks to the right, and
        a mask would cost the fast kernel. Padding is told from the end marker by position, never by its id."""
        width = max(len(r) for r in rows)
        ids = torch.full((len(rows), width), self._pad_id, dtype=torch.int64)
        labels = torch.full((len(rows), width), IGNORED, dtype=torch.int64)
        for i, row in enumerate(rows):
            tokens = torch.from_numpy(row.ids).to(torch.int64)
            ids[i, : len(row)] = tokens
            labels[i, : len(row)] = torch.where(torch.from_numpy(row.target), tokens, IGNORED)
        return {"input_ids": ids, "labels": labels}
