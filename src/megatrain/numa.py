"""Which cores are near which memory and which GPU: NUMA nodes, from what Linux shows under /sys.

On a host of one node, and for a process that may use the cores of one node only, there are no nodes to choose from:
nothing is bound then, and nothing fails.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

SYS = Path("/sys")


@dataclass(frozen=True, slots=True)
class Node:
    """One NUMA node and those of its cores that this process may use."""

    number: int
    cores: frozenset[int]


def nodes(root: Path = SYS, allowed: Collection[int] | None = None) -> tuple[Node, ...]:
    """Nodes with cores among ``allowed`` (by default the calling thread's), by number; none where all are on one."""
    if allowed is None:
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    found = []
    with suppress(OSError, ValueError):
        for folder in (root / "devices/system/node").iterdir():
            number = folder.name.removeprefix("node")
            if number.isdigit():
                cores = _cores((folder / "cpulist").read_text()).intersection(allowed)
                found += [Node(int(number), cores)] * bool(cores)
    return tuple(sorted(found, key=lambda node: node.number)) if len(found) > 1 else ()


def pci_address(domain: int, bus: int, device: int) -> str:
    """How /sys names a GPU: ``0000:c1:00.0``."""
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def nearest(address: str, among: Sequence[Node], root: Path = SYS) -> Node | None:
    """The node that the PCI device is attached to; None where that is unknown or not ``among`` the nodes."""
    with suppress(OSError, ValueError):
        number = int((root / "bus/pci/devices" / address / "numa_node").read_text())
        return next((node for node in among if node.number == number), None)
    return None


def deal(among: Sequence[Node]) -> list[Node]:
    """A node for every core, dealt round: the first few are spread over the nodes, all of them use every core."""
    rounds = zip_longest(*([node] * len(node.cores) for node in among))
    return [node for turn in rounds for node in turn if node is not None]


def bind(cores: Collection[int]) -> None:
    """Keep the calling thread, and threads that it starts, on ``cores``; where that is refused it stays as it is."""
    with suppress(OSError):
        os.sched_setaffinity(0, cores)


def _cores(text: str) -> frozenset[int]:
    """The cores of a list such as ``0-3,8,10-11``; a node without cores has an empty one."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)
