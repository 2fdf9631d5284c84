"""Which units live on the device, by weights or by all their training state, and what layers keep. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal, cast

from megatrain.config import parse_bytes
from megatrain.errors import UserError

Mode = Literal["recompute", "selective", "keep"]
"""What a layer keeps for its backward: its input only, attention's output too, or all that autograd saves."""

Placement = str | int | float | Sequence[str] | None
"""Bytes (``"20GiB"`` or a number), a share of the model (``0.5``, ``"50%"``), or names of units; None: nothing."""


def resident_units(field: str, placement: Placement, sizes: Mapping[str, int]) -> frozenset[str]:
    """Names of the units that a placement means; ``sizes`` are the bytes each would take, in network order.

    Bytes and shares take units from the start of the network: those are the first that the next step needs, and
    they need not wait for an update on the host.
    """
    if placement is None:
        return frozenset()
    if isinstance(placement, Sequence) and not isinstance(placement, str):
        unknown = sorted(set(placement) - set(sizes))
        if unknown:
            raise UserError(f"{field}: no unit is called {unknown[0]!r}; units are {_some(sizes)}")
        return frozenset(placement)
    total = sum(sizes.values())
    percent = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*%\s*", placement) if isinstance(placement, str) else None
    if percent is not None or isinstance(placement, float):
        share = float(percent[1]) / 100 if percent is not None else float(placement)
        if not 0 <= share <= 1:
            raise UserError(f"{field}: {placement} is out of range; a share is between 0 and 1, or 0% and 100%")
        limit = int(share * total)
    else:
        limit = 0 if placement == 0 else parse_bytes(field, placement) or 0
    chosen, used = [], 0
    for name, nbytes in sizes.items():
        if used + nbytes > limit:
            break
        chosen.append(name)
        used += nbytes
    return frozenset(chosen)


def last_units(field: str, placement: Placement, sizes: Mapping[str, int]) -> frozenset[str]:
    """As `resident_units`, but bytes and shares take units from the end of the network, whose backward comes first."""
    return resident_units(field, placement, dict(reversed(list(sizes.items()))))


def activation_modes(activations: str | Sequence[str], layers: Sequence[str]) -> dict[str, Mode]:
    """What each layer keeps, where it is more than its input; ``layers`` are names in network order.

    Shares take the last layers that are left, whose backward comes first: of ``"keep 20%, selective 50%"`` the last
    fifth keep everything, and the half before them the output of attention.
    """
    alike = dict.fromkeys(layers, 1)
    if isinstance(activations, Sequence) and not isinstance(activations, str):
        return dict.fromkeys(last_units("compute.activations", activations, alike), "keep")
    modes: dict[str, Mode] = {}
    for part in str(activations).split(","):
        found = re.fullmatch(r"\s*(recompute|selective|keep|)\s*(\S*%)?\s*", part)
        if found is None or not part.strip():
            raise UserError(
                f"compute.activations: {activations!r} is unknown; choose recompute, selective, keep, a share to keep"
                " such as 30%, shares such as 'keep 20%, selective 50%', or a list of layers to keep"
            )
        mode, share = found[1] or "keep", found[2] or "100%"
        if mode != "recompute":
            chosen = resident_units("compute.activations", share, alike)
            left = [name for name in reversed(layers) if name not in modes]
            if len(chosen) > len(left):
                raise UserError(
                    f"compute.activations: {activations!r} adds up to more than all layers; lower one of the shares"
                )
            modes |= dict.fromkeys(left[: len(chosen)], cast(Mode, mode))
    return modes


def _some(names: Mapping[str, int]) -> str:
    listed = list(names)
    return ", ".join(listed if len(listed) <= 4 else [*listed[:2], "...", *listed[-2:]])


def check_passing(max_norm: float | None, clipping: str) -> None:
    """Raise `UserError` for what needs the gradients of a step together, where they only pass."""
    if max_norm is not None:
        raise UserError(
            f"optim.max_grad_norm: {max_norm} needs the norm of all gradients before the first update, and with"
            " placement.gradients=passing they are not kept; use null, or placement.gradients=kept"
        )
    if clipping == "speculative":
        raise UserError(
            "optim.clipping: speculative takes updates back from gradients that are kept; use auto, or"
            " placement.gradients=kept"
        )


def check_order(order: str, streamed: Sequence[str]) -> None:
    """Raise `UserError` for an order that the ``streamed`` units, whose weights are not on the device, do not allow."""
    if order == "micro_batch" and streamed:
        raise UserError(
            f"compute.order: micro_batch needs all weights on the device, and those of {streamed[0]} stream; set"
            " placement.weights=100% or placement.states=100%, or use order=layer"
        )
