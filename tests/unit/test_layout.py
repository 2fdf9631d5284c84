"""Offsets: no overlap, aligned, padded, and what is no parameter is a gap."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.layout import ALIGN, PAD, build_layout, gaps, ranges, round_up, size_classes

SHAPES = st.dictionaries(
    st.text("abc.", min_size=1, max_size=5),
    st.lists(st.integers(0, 300), max_size=3).map(tuple),
    max_size=12,
)


@given(SHAPES)
def test_parameters_and_gaps_tile_the_unit(shapes: dict[str, tuple[int, ...]]) -> None:
    layout = build_layout(shapes, "model.x.")
    assert list(layout) == ["model.x." + local for local in shapes]
    assert layout.numel % PAD == 0
    assert layout.numel >= max(1, sum(map(prod, shapes.values())))
    assert layout.numel - layout.num_parameters < PAD + ALIGN * (len(shapes) + 1)
    pieces = sorted([(p.offset, p.end) for p in layout.parameters if p.numel] + list(gaps(layout)))
    assert pieces[0][0] == 0
    assert pieces[-1][1] == layout.numel
    assert all(end == start for (_, end), (start, _) in pairwise(pieces))
    assert all(start < end for start, end in pieces)
    for parameter in layout.parameters:
        assert parameter.offset % ALIGN == 0
        assert parameter.numel == prod(shapes[parameter.local])
        assert layout[parameter.name] is parameter


def test_an_unknown_name_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="nothing"):
        build_layout({"a": (2,)})["nothing"]


@given(st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.integers(1, 10**10), max_size=20))
def test_size_classes_stay_within_a_factor_of_two(sizes: dict[str, int]) -> None:
    classes = size_classes(sizes)
    assert classes.keys() == sizes.keys()
    for name, numel in sizes.items():
        assert numel <= classes[name] <= 2 * numel
        assert classes[name] in sizes.values()
    # As few classes as such a rule allows: their sizes are more than a factor of two apart.
    largest = sorted(set(classes.values()))
    assert all(small * 2 < big for small, big in pairwise(largest))


@given(st.integers(0, 2000), st.integers(1, 3000))
def test_ranges_cover(total: int, size: int) -> None:
    pieces = list(ranges(total, size))
    assert sum(end - start for start, end in pieces) == total
    assert all(0 < end - start <= size for start, end in pieces)
    assert [start for start, _ in pieces] == [0, *[end for _, end in pieces]][: len(pieces)]


@given(st.integers(0, 10**12), st.integers(1, 10**6))
def test_round_up(value: int, multiple: int) -> None:
    result = round_up(value, multiple)
    assert result % multiple == 0
    assert value <= result < value + multiple
