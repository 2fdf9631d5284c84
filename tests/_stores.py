"""A store in plain tensors, for tests of saving and loading."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Placed:
    shape: tuple[int, ...]
    offset: int = 0
    numel: int = 0


class PlainStore:
    """unit -> parameter name -> shape; ``frozen`` parameters have no moments. All values are random."""

    def __init__(
        self, units: dict[str, dict[str, tuple[int, ...]]], seed: int = 0, frozen: tuple[str, ...] = ()
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._units = units
        shapes = {name: shape for unit in units.values() for name, shape in unit.items()}
        self.masters = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        self.moments = {
            (name, kind): torch.randn(shape, generator=generator)
            for name, shape in shapes.items()
            for kind in ("exp_avg", "exp_avg_sq")
            if name not in frozen
        }
        self.steps = dict.fromkeys(units, seed)
        self.touched = False

    @property
    def units(self) -> list[str]:
        return list(self._units)

    def layout(self, unit: str) -> dict[str, Placed]:
        return {name: Placed(shape) for name, shape in self._units[unit].items()}

    def master_blocks(self, parameter: str) -> Iterator[torch.Tensor]:
        yield from self.masters[parameter].view(-1).split(1 << 20)

    def load_master(self, parameter: str, start: int, block: torch.Tensor) -> None:
        self.touched = True
        self.masters[parameter].view(-1)[start : start + block.numel()].copy_(block)

    def moment(self, parameter: str, kind: str) -> torch.Tensor | None:
        return self.moments.get((parameter, kind))

    def step_count(self, unit: str) -> int:
        return self.steps[unit]

    def set_step_count(self, unit: str, count: int) -> None:
        self.touched = True
        self.steps[unit] = count

    def same(self, other: PlainStore) -> bool:
        """Bitwise, by parameter name."""
        mine = {**self.masters, **self.moments}
        theirs = {**other.masters, **other.moments}
        return mine.keys() == theirs.keys() and all(
            torch.equal(value.view(torch.int32), theirs[key].view(torch.int32)) for key, value in mine.items()
        )


UNITS: dict[str, dict[str, tuple[int, ...]]] = {
    "embedding": {"model.embed_tokens.weight": (40, 8)},
    "layers.0": {"model.layers.0.mlp.weight": (8, 16), "model.layers.0.norm.weight": (8,)},
    "layers.1": {"model.layers.1.mlp.weight": (8, 16), "model.layers.1.norm.weight": (8,)},
    "head": {},
}
