"""Everything before the first weight is read: model files, tokenizer, rows, order, rate, memory and disk.

What a user may have got wrong is found here, in seconds and before anything is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain import machine
from megatrain.config import RunConfig, parse_bytes
from megatrain.datasets._batches import Batches
from megatrain.datasets._load import Dataset, Progress, load_dataset
from megatrain.errors import UserError
from megatrain.hub import find_model
from megatrain.loggers._screens import DataFigures, data_line, disk_size, size
from megatrain.schedule import Schedule

_STATE_BYTES = 12  # of host memory and of a save, per parameter: FP32 master and two FP32 moments
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a run is made of. Bytes: ``host_bytes`` of training state, ``save_bytes`` of one save of it."""

    config: RunConfig
    folder: Path
    tokenizer: Any
    data: Dataset
    batches: Batches
    schedule: Schedule
    total_steps: int
    parameters: int
    host_bytes: int
    host_free: int
    save_bytes: int

    @property
    def name(self) -> str:
        """The model's name without its owner or path."""
        return Path(self.config.model.name_or_path).resolve().name if self.folder.samefile(
            self.config.model.name_or_path
        ) else self.config.model.name_or_path.rpartition("/")[2]
