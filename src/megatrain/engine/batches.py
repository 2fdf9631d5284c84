"""Micro-batches as users give them, checked and made ready on the host before the step starts.

Everything that depends on the data is decided here: which positions predict a target, and padding. Inside the step a
decision on device data would stop the host until the device has caught up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megatrain.errors import UserError

IGNORED = -100
_KEYS = {"input_ids", "labels", "position_ids", "attention_mask"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBatch:
    """A checked micro-batch on the host; rows are padded on the right, where causal attention never looks back from."""

    input_ids: torch.Tensor
    """``[batch, tokens]``"""
    position_ids: torch.Tensor | None
    index: torch.Tensor
    """``[n]`` flat positions that predict a target, ascending."""
    targets: torch.Tensor
    """``[n]``"""
    source: torch.Tensor
    """``[n]`` flat positions of the targets in the batch as it was given."""

    @property
    def shape(self) -> tuple[int, int]:
        """``(batch, tokens)``"""
        return self.input_ids.shape[0], self.input_ids.shape[1]


def check_batches(micro_batches: Sequence[Mapping[str, torch.Tensor]], vocab_size: int) -> list[HostBatch]:
    """Check every micro-batch of a step; `UserError` names the first field that is wrong."""
    if not isinstance(micro_batches, Sequence) or not micro_batches:
        raise UserError("micro_batches: give a non-empty list of dicts, one a micro-batch")
    return [check_batch(batch, f"micro_batches[{i}]", vocab_size) for i, batch in enumerate(micro_batches)]


def check_batch(batch: Mapping[str, torch.Tensor], name: str, vocab_size: int) -> HostBatch:
    """Check one micro-batch and move left padding to the right."""
    if not isinstance(batch, Mapping):
        raise UserError(f"{name}: {type(batch).__name__}; give a dict of tensors: {', '.join(sorted(_KEYS))}")
    unknown = sorted(set(batch) - _KEYS, key=str)
    if unknown:
        raise UserError(f"{name}: unknown key {unknown[0]!r}; a micro-batch has {', '.join(sorted(_KEYS))}")
    ids = _matrix(batch, "input_ids", name, None)
    labels = _matrix(batch, "labels", name, ids.shape)
    positions = _matrix(batch, "position_ids", name, ids.shape) if "position_ids" in batch else None
    mask = _matrix(batch, "attention_mask", name, ids.shape) if "attention_mask" in batch else None
    if ids.numel() == 0:
        raise UserError(f"{name}.input_ids: shape {tuple(ids.shape)} holds no token")
    _check_range(ids, f"{name}.input_ids", vocab_size, None)
    _check_range(labels, f"{name}.labels", vocab_size, IGNORED)
    origin = torch.arange(ids.numel()).view(ids.shape)
    if positions is not None and bool((positions < 0).any()):
        raise UserError(f"{name}.position_ids: {int(positions.min())} is out of range; positions count from 0")
    if mask is not None:
        if bool(((mask != 0) & (mask != 1)).any()):
            raise UserError(f"{name}.attention_mask: it holds other values than 0 and 1")
        shift = _padding_shift(mask, name)
        columns = (torch.arange(ids.shape[1])[None, :] + shift[:, None]) % ids.shape[1]
        ids, labels, origin = (t.gather(1, columns) for t in (ids, labels, origin))
        positions = None if positions is None else positions.gather(1, columns)
        padding = torch.arange(ids.shape[1])[None, :] >= (mask != 0).sum(1, keepdim=True)
        if bool((labels[padding] != IGNORED).any()):
            raise UserError(f"{name}.labels: a position that attention_mask hides has a label; use {IGNORED} there")
    target = torch.full_like(labels, IGNORED)
    target[:, :-1] = labels[:, 1:]
    index = (target.flatten() != IGNORED).nonzero().flatten()
    if positions is not None and bool((positions == torch.arange(ids.shape[1])).all()):
        positions = None
    return HostBatch(
        input_ids=ids.contiguous(),
        position_ids=positions,
        index=index,
        targets=target.flatten()[index],
        source=origin.flatten()[index + 1] if index.numel() else index,
    )


def _matrix(batch: Mapping[str, torch.Tensor], key: str, name: str, shape: torch.Size | None) -> torch.Tensor:
    value = batch.get(key)
    if not isinstance(value, torch.Tensor):
        found = "missing" if value is None else type(value).__name__
        raise UserError(f"{name}.{key}: {found}; give an integer tensor of shape [batch, tokens]")
    if value.dim() != 2 or value.is_floating_point() or value.is_complex() or value.dtype is torch.bool:
        raise UserError(
            f"{name}.{key}: {value.dtype} of shape {tuple(value.shape)}; give an integer tensor of shape"
            " [batch, tokens]"
        )
    if shape is not None and value.shape != shape:
        raise UserError(f"{name}.{key}: shape {tuple(value.shape)} differs from input_ids' {tuple(shape)}")
    return value.detach().to("cpu", torch.int64)


def _check_range(values: torch.Tensor, name: str, vocab_size: int, ignored: int | None) -> None:
    wrong = (values < 0) | (values >= vocab_size)
    if ignored is not None:
        wrong &= values != ignored
    if bool(wrong.any()):
        also = "" if ignored is None else f" (or {ignored})"
        raise UserError(
            f"{name}: {int(values[wrong][0])} is out of range; the model has token ids 0 to {vocab_size - 1}{also}."
            " Do the tokenizer and the model belong together?"
        )


def _padding_shift(mask: torch.Tensor, name: str) -> torch.Tensor:
    """Columns of left padding of each row; `UserError` where ones are not one run at one side."""
    ones = mask != 0
    changes = (ones[:, 1:] != ones[:, :-1]).sum(1)
    holes = (changes > 1) | ~ones.any(1)
    if bool(holes.any()):
        row = int(holes.nonzero()[0])
        raise UserError(
            f"{name}.attention_mask: row {row} is not one run of ones with padding on one side; drop the row, or give"
            " packed documents by position_ids that restart"
        )
    return torch.where(ones[:, 0], 0, (~ones).sum(1))
