"""Where each parameter lies inside a unit: the only place that adds offsets up.

A unit is stored as flat arrays (*sections*) of one length; a parameter occupies the same range of elements in each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

ALIGN = 64
"""Parameters start at a multiple of this many elements: 128 bytes in BF16, 256 in FP32."""

PAD = 4096
"""Units are padded to a multiple of this many elements: whole pages in every section, and even shares for ranks."""


PAGE = 4096
"""Bytes of a page: sections of a slab start at one."""

HUGE_PAGE = 2 << 20
"""Host mappings are whole huge pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter's place in its unit; ``offset`` and ``numel`` count elements."""

    name: str
    """Hugging Face name, unique in the model: ``model.layers.0.mlp.up_proj.weight``."""
    local: str
    """Name within the module that the unit is bound to: ``mlp.up_proj.weight``."""
    shape: tuple[int, ...]
    offset: int
    numel: int

    @property
    def end(self) -> int:
        """First element after the parameter."""
        return self.offset + self.numel


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout(Mapping[str, Parameter]):
    """Parameters of one unit by Hugging Face name, in order of offset; ``numel`` includes padding."""

    parameters: tuple[Parameter, ...]
    numel: int

    def __getitem__(self, name: str) -> Parameter:
        for parameter in self.parameters:
            if parameter.name == name:
                return parameter
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter([parameter.name for parameter in self.parameters])

    def __len__(self) -> int:
        return len(self.parameters)

    @property
    def num_parameters(self) -> int:
        """Elements that belong to parameters, padding left out."""
        return sum(parameter.numel for parameter in self.parameters)


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def build_layout(shapes: Mapping[str, tuple[int, ...]], prefix: str = "") -> Layout:
    """Lay out parameters in the given order.

    ``shapes`` maps local names to shapes; ``prefix`` + local name is the Hugging Face name.
    """
    offset, placed = 0, []
    for local, shape in shapes.items():
        numel = prod(shape)
        placed.append(Parameter(name=prefix + local, local=local, shape=tuple(shape), offset=offset, numel=numel))
        offset += round_up(numel, ALIGN)
    return Layout(parameters=tuple(placed), numel=round_up(max(offset, 1), PAD))


def slab_bytes(numel: int, compute_bytes: int, gradient_bytes: int) -> int:
    """Bytes of a unit's training state of ``numel`` elements: head, tail, two moments and gradient, on whole pages.

    ``compute_bytes`` and ``gradient_bytes`` are those of an element in the compute and the gradient dtype.
    """
    tail = 4 - compute_bytes
    return sum(round_up(numel * size, PAGE) for size in (compute_bytes, tail, 4, 4, gradient_bytes))


def mapping_bytes(nbytes: int) -> int:
    """Bytes that a host mapping of ``nbytes`` takes: whole huge pages."""
    return round_up(max(nbytes, 1), HUGE_PAGE)


def store_bytes(
    numels: Iterable[int],
    compute_bytes: int,
    gradient_bytes: int,
    boundaries: int = 0,
    landings: Iterable[int] | None = None,
) -> int:
    """Host bytes of the training state of units of these sizes, each in a mapping of its own, and of the results.

    ``boundaries``: bytes of boundary activations that wait on the host. ``landings``: elements of each buffer that
    gradients pass through; None where they are kept.
    """
    slabs = [slab_bytes(numel, compute_bytes, gradient_bytes if landings is None else 0) for numel in numels]
    passing = [numel * gradient_bytes for numel in landings or ()]
    return sum(map(mapping_bytes, (*slabs, *passing, PAGE, *([boundaries] if boundaries else []))))


def size_classes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Group units whose sizes lie within a factor of two, so that one ring of buffers serves them.

    ``sizes`` maps unit names to elements; the result maps them to the size of their class, its largest member.
    """
    classes: dict[str, int] = {}
    largest = 0
    for name, numel in sorted(sizes.items(), key=lambda item: -item[1]):
        if largest == 0 or numel * 2 < largest:
            largest = numel
        classes[name] = largest
    return classes


def ranges(total: int, size: int) -> Iterable[tuple[int, int]]:
    """Consecutive ``(start, end)`` pieces of at most ``size`` that cover ``range(total)``."""
    for start in range(0, total, size):
        yield start, min(start + size, total)


def even_ranges(total: int, size: int) -> Iterable[tuple[int, int]]:
    """As `ranges`, with pieces that differ by less than their number: no short last one."""
    pieces = max(1, -(-total // size))
    return ranges(total, max(1, -(-total // pieces)))


def gaps(layout: Layout) -> Iterable[tuple[int, int]]:
    """The ``(start, end)`` ranges of a unit that belong to no parameter."""
    end = 0
    for parameter in layout.parameters:
        if parameter.offset > end:
            yield end, parameter.offset
        end = parameter.end
    if end < layout.numel:
        yield end, layout.numel
