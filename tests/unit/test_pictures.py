"""The page and the trace events of steps: complete, on one time axis, and readable by what opens them."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest

from megatrain.engine.program import Builder, Policy, UnitSpec
from megatrain.engine.simulate import Timeline, derive, simulate
from megatrain.timeline_page import KINDS, page, told
from megatrain.trace_events import trace_events

SVG = "{http://www.w3.org/2000/svg}"
UNITS = [UnitSpec("embedding", 8, lookup=True, keeps=True), *[UnitSpec(f"layers.{i}", 8) for i in range(4)]]
UNITS.append(UnitSpec("head", 8))
# Between them these policies have every kind of operation of a training step.
POLICIES = [
    (Policy(), False),
    (Policy(boundaries_on_host=True, boundary_every=2), True),
    (Policy(passing_gradients=True), False),
]


def timeline(factor: float = 1.0, policy: Policy = POLICIES[0][0], *, speculative: bool = False) -> Timeline:
    builder = Builder(UNITS, 2, policy)
    program = derive(builder.training_step(4, speculative=speculative) for _ in range(2))
    seconds = {"FORWARD": 0.2, "BACKWARD": 0.4, "LOSS": 0.2, "FETCH": 0.1, "DRAIN": 0.1, "UPDATE": 0.3}
    return simulate(program, lambda op: factor * seconds.get(op.kind, 0.01))


def parsed(*pictures: tuple[str, Timeline], lines: tuple[str, ...] = ()) -> Any:
    return ElementTree.fromstring(page("a & b", lines, pictures).removeprefix("<!DOCTYPE html>"))


def bars(svg: Any) -> list[tuple[str, float, float, float]]:
    """``(title, y, x, width)`` of each."""
    found = []
    for g in svg.iter(f"{SVG}g"):
        rect = g.find(f"{SVG}rect").attrib
        found.append((g.findtext(f"{SVG}title"), *(float(rect[key]) for key in ("y", "x", "width"))))
    return found


@pytest.mark.parametrize(("policy", "speculative"), POLICIES)
def test_the_page_has_a_bar_for_every_operation(policy: Policy, speculative: bool) -> None:
    step = timeline(policy=policy, speculative=speculative)
    (svg,) = [svg for svg in parsed(("predicted", step)).iter(f"{SVG}svg") if svg.attrib["width"] != "0"]
    found = bars(svg)
    waits = [bar for bar in found if bar[0].startswith("waits for: ")]
    assert len(found) - len(waits) == len(step.ops)
    assert waits
    rows: dict[float, list[tuple[float, float]]] = {}
    for _, y, x, width in found:
        rows.setdefault(y, []).append((x, width))
    assert len(rows) == 4, "a row a lane"
    for row in rows.values():
        for (x, width), (following, _) in pairwise(sorted(row)):
            assert x + width <= following + 0.6, "bars of a lane do not overlap"


def test_every_kind_has_a_colour_and_words() -> None:
    kinds = {timed.op.kind for policy, early in POLICIES for timed in timeline(policy=policy, speculative=early).ops}
    assert kinds == set(KINDS)
    assert told("h2d FETCH") == "weights to the device"


def test_steps_share_one_time_axis() -> None:
    root = parsed(("predicted", timeline()), ("measured", timeline(2.0)))
    short, long = (svg for svg in root.iter(f"{SVG}svg") if svg.attrib["width"] != "0")
    ends = [max(x + width for _, _, x, width in bars(svg)) for svg in (short, long)]
    start = min(x for _, _, x, _ in bars(long))
    assert (ends[0] - start) * 2 == pytest.approx(ends[1] - start, abs=1.0)
    ticks = [
        [t.text for t in svg.iter(f"{SVG}text") if t.attrib.get("text-anchor") == "middle"] for svg in (short, long)
    ]
    axis = [[text for text in texts if re.fullmatch(r"[\d.]+ s", text)] for texts in ticks]
    assert axis[0] == axis[1]
    assert 5 <= len(axis[0]) <= 13
    headings = [h.text for h in root.iter("h2")]
    assert headings == [f"predicted: {timeline().seconds:.2f} s", f"measured: {timeline(2.0).seconds:.2f} s"]


def test_the_page_needs_nothing_else_and_escapes_what_it_is_given() -> None:
    text = page("a & b", ["<i>"], [("x < y", timeline())])
    assert not re.search(r"(src|href)=|@import|<script", text)
    assert "a &amp; b" in text
    assert "<i>" not in text
    assert "x &lt; y" in text


def test_the_table_says_what_lanes_wait_for() -> None:
    cells = [cell.text for cell in parsed(("predicted", timeline(1.0))).iter("td")]
    rows = {cells[i]: (cells[i + 1], cells[i + 2]) for i in range(0, len(cells), 3)}
    assert list(rows) == ["host to device", "arithmetic", "device to host", "CPU optimizer"]
    works, waits = rows["arithmetic"]
    step = timeline(1.0)
    assert works == f"{step.busy('compute') / step.seconds:.1%}"
    assert re.match(r"optimizer update [\d.]+%", waits)


@pytest.mark.parametrize(("policy", "speculative"), POLICIES)
def test_trace_events(policy: Policy, speculative: bool) -> None:
    step = timeline(policy=policy, speculative=speculative)
    data = json.loads(json.dumps(trace_events([("predicted", step.ops), ("measured", step.ops)]), allow_nan=False))
    events = data["traceEvents"]
    names = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"}
    assert names == {(1, "predicted"), (2, "measured")}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len(threads) == 8
    slices = [e for e in events if e["ph"] == "X"]
    for process in (1, 2):
        mine = [e for e in slices if e["pid"] == process]
        assert [
            (e["args"]["lane"], e["args"]["kind"], e["args"]["unit"], e["args"].get("micro_batch", -1)) for e in mine
        ] == [(t.op.lane, t.op.kind, t.op.unit, t.op.micro) for t in step.ops]
        assert [e["ts"] / 1e6 for e in mine] == pytest.approx([t.start for t in step.ops], abs=1e-9)
        assert [e["dur"] / 1e6 for e in mine] == pytest.approx([t.end - t.start for t in step.ops], abs=1e-9)
    for thread in threads:
        row = sorted((e["ts"], e["dur"]) for e in slices if (e["pid"], e["tid"]) == thread)
        for (begin, length), (following, _) in pairwise(row):
            assert begin + length <= following + 0.01


def test_arrows_go_from_what_was_waited_for() -> None:
    step = timeline()
    events = trace_events([("predicted", step.ops)])["traceEvents"]
    known = {t.waiting.ticket: str(t.op) for t in step.ops}
    expected = [(known[w], str(t.op)) for t in step.ops for w in t.waiting.waits if w in known]
    slices = [e for e in events if e["ph"] == "X"]

    def at(event: dict[str, Any]) -> list[str]:
        here = [s for s in slices if s["tid"] == event["tid"] and s["ts"] <= event["ts"] <= s["ts"] + s["dur"]]
        return [s["name"] for s in here]

    starts, ends = ({e["id"]: e for e in events if e["ph"] == phase} for phase in ("s", "f"))
    assert set(starts) == set(ends)
    for (source, target), arrow in zip(expected, starts, strict=True):
        assert source in at(starts[arrow])
        assert target in at(ends[arrow])
        assert ends[arrow]["ts"] >= starts[arrow]["ts"]
