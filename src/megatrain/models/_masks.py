"""Tells transformers on the host whether a row holds several documents, which it would ask the device.

``find_packed_sequence_indices`` ends in a comparison whose result Python needs: on a GPU the host would wait there for
everything issued before, once a micro-batch. We know the answer before the step, from the positions as given.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import masking_utils


@contextmanager
def packing_known(packed: bool) -> Iterator[None]:
    """Inside the block, masks are built for documents kept apart by restarting positions, or for one a row."""

    def find(position_ids: torch.Tensor) -> torch.Tensor | None:
        if not packed:
            return None
        starts = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1
        return starts.cumsum(-1)

    original = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = find
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = original
