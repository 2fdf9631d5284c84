"""Parts of a step that are quick to add up: what the search passes over candidates by. No torch."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import accumulate
from typing import NamedTuple

from megatrain.costs import Costs
from megatrain.engine.placement import Mode
from megatrain.engine.program import Op
from megatrain.model_spec import UnitShape


class Arithmetic(NamedTuple):
    """Seconds of a step's arithmetic."""

    step: float
    """All of it, with full recompute, without updates."""
    saved: list[float]
    """What keeping the last n layers saves of it."""
    attention: float
    """What keeping attention's output saves of a layer."""
    shortest: float
    """The shortest layer's forward."""
    forward: list[float]
    """Forward without the first n units and without the head."""
    loss: float

    @staticmethod
    def of(costs: Costs, units: Sequence[UnitShape]) -> Arithmetic:
        """Of all micro-batches of the costs."""
        first, *layers, last = units

        def seconds(kind: str, unit: str, mode: Mode = "recompute") -> float:
            return costs.seconds(Op(kind=kind, lane="compute", unit=unit), mode)

        full = [seconds("BACKWARD", unit.name) for unit in layers]
        kept = [seconds("BACKWARD", unit.name, "keep") for unit in layers]
        forward = [seconds("FORWARD", unit.name) for unit in (first, *layers)]
        loss = seconds("LOSS", last.name)
        edges = seconds("BACKWARD", first.name, "keep" if first.lookup else "recompute") + loss
        return Arithmetic(
            step=sum(full) + edges + sum(forward),
            saved=list(accumulate((a - b for a, b in zip(reversed(full), reversed(kept), strict=True)), initial=0.0)),
            attention=full[0] - seconds("BACKWARD", layers[0].name, "selective"),
            shortest=min(forward[1:]),
            forward=[*_left(forward), 0.0],
            loss=loss,
        )


class Updates(NamedTuple):
    """Seconds of updates and copies when the first n units live on the device."""

    resident: list[float]
    """Of updates there."""
    host: list[float]
    """Of all others."""
    early: list[float]
    """Of those that do not wait for the norm."""
    fetch: list[float]
    """Of the copies of all weights to the device, once."""
    link: list[float]
    """Of the busier direction of the link, with each weight fetched once."""

    @staticmethod
    def of(costs: Costs, units: Sequence[UnitShape], speculated: Container[str] | None) -> Updates:
        """``speculated``: the units that speculate, or None where none does."""

        def each(kind: str, lane: str) -> list[float]:
            return [costs.seconds(Op(kind=kind, lane=lane, unit=unit.name), "recompute") for unit in units]

        host = each("UPDATE", "optimizer")
        early = [speculated is None or unit.name in speculated for unit in units]
        if speculated is not None:
            soon = each("SPECULATE", "optimizer")
            host = [soon[i] if early[i] else host[i] for i in range(len(units))]
        fetch = _left(each("FETCH", "h2d"))
        return Updates(
            resident=list(accumulate(each("UPDATE", "compute"), initial=0.0)),
            host=_left(host),
            early=_left([seconds if first else 0.0 for seconds, first in zip(host, early, strict=True)]),
            fetch=fetch,
            link=[max(pair) for pair in zip(fetch, _left(each("DRAIN", "d2h")), strict=True)],
        )


def _left(seconds: Sequence[float]) -> list[float]:
    """Of what is left without the first n."""
    return list(accumulate(reversed(seconds), initial=0.0))[::-1]
