"""Steps as lanes over time, simulated and measured alike: one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import floor, log10

from megatrain.engine.simulate import Timed, Timeline
from megatrain.engine.stalls import DONE, HOST, LaneShare, breakdown, stalls
from megatrain.loggers._screens import short_time

LANES = {
    "h2d": "host to device",
    "compute": "arithmetic",
    "d2h": "device to host",
    "optimizer": "CPU optimizer",
}
_GREY = "#9c9c9c"
KINDS = {
    "FORWARD": ("#4e79a7", "forward"),
    "RECOMPUTE": ("#86bcb6", "forward once more, within a block of layers"),
    "LOSS": ("#b07aa1", "loss, both ways"),
    "BACKWARD": ("#f28e2b", "backward, with recompute where activations are not kept"),
    "UPDATE": ("#59a14f", "optimizer update"),
    "APPLY": ("#59a14f", "optimizer update"),
    "SPECULATE": ("#59a14f", "optimizer update"),
    "RESOLVE": ("#2f6b2a", "update corrected or completed once the norm is known"),
    "FETCH": ("#76b7b2", "weights to the device"),
    "DRAIN": ("#e15759", "gradient to the host"),
    "OFFLOAD": ("#ff9da7", "layer input to the host"),
    "RELOAD": ("#d4a6c8", "layer input back to the device"),
    "INPUT": (_GREY, "token ids to the device"),
    "NORM": (_GREY, "gradient norm"),
    "PUBLISH": (_GREY, "results to the host"),
}
_WIDTH, _ROW, _BAR, _LEFT, _TOP = 1500, 56, 40, 130, 30
_LETTER = 7  # pixels
_HATCHES = """\
<svg xmlns="http://www.w3.org/2000/svg" width="0" height="0" style="position: absolute"><defs>
<pattern id="wait" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<rect width="5" height="5" fill="#fbe3e4"/><rect width="1" height="5" fill="#d62728"/></pattern>
</defs></svg>"""
_SMALLEST_WAIT = 2  # pixels


def page(title: str, lines: Sequence[str], pictures: Sequence[tuple[str, Timeline]]) -> str:
    """The page: ``lines``, then each step under its heading, all on one time axis.

    A row is a lane, a bar an operation (point at it for its name and time), a hatched bar a time in which the
    arithmetic waits (for what, tells pointing at it).
    """
    longest = max(timeline.seconds for _, timeline in pictures)
    steps = "\n".join(_step(heading, timeline, longest) for heading, timeline in pictures)
    present = {timed.op.kind for _, timeline in pictures for timed in timeline.ops}
    legend: dict[str, dict[str, None]] = {}
    for colour, meaning in (KINDS[kind] for kind in KINDS if kind in present):
        legend.setdefault(colour, {})[meaning] = None
    keys = "".join(
        f'<span><b style="background:{colour}"></b>{escape(", ".join(m))}</span>' for colour, m in legend.items()
    )
    keys += '<span><b class="wait"></b>arithmetic waits</span>'
    text = "".join(f"<p>{escape(line)}</p>\n" for line in lines)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<title>{escape(title)}</title>
<style>
body {{ font: 14px sans-serif; margin: 24px; color: #222; background: #fff; }}
h1 {{ font-size: 22px; }}
h2 {{ font-size: 16px; margin: 28px 0 4px; }}
div {{ overflow-x: auto; }}
svg text {{ font-size: 12px; }}
span {{ margin-right: 20px; white-space: nowrap; line-height: 1.7; display: inline-block; }}
b {{ display: inline-block; width: 12px; height: 12px; margin-right: 6px; }}
b.wait {{ background: repeating-linear-gradient(45deg, #fbe3e4 0 3px, #d62728 3px 4px); }}
td, th {{ padding: 2px 24px 2px 0; text-align: left; font-weight: normal; }}
th {{ color: #777; }}
</style>
</head>
<body>
<h1>{escape(title)}</h1>
{text}<p>{keys}</p>
<p>Time runs from left to right. Point at a bar for its name and time.</p>
{_HATCHES}
{steps}
</body>
</html>
"""


def told(why: str) -> str:
    """A `Stall.why` in words."""
    if why in (HOST, DONE):
        return {HOST: "operations being submitted and started", DONE: "nothing more before the step ends"}[why]
    return KINDS[why.split()[1]][1].partition(",")[0]


def _step(heading: str, timeline: Timeline, longest: float) -> str:
    height = _TOP + _ROW * len(LANES) + 30
    shares = breakdown(timeline)
    rows = "".join(
        f"<tr><td>{name}</td><td>{shares[lane].busy / timeline.seconds:.1%}</td>"
        f"<td>{_waits(shares[lane], timeline.seconds)}</td></tr>\n"
        for lane, name in LANES.items()
    )
    return f"""<h2>{escape(heading)}: {short_time(timeline.seconds)}</h2>
<div>
<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 60}" height="{height}">
{"".join(_picture(timeline, _WIDTH / longest, longest))}</svg>
</div>
<table>
<tr><th>lane</th><th>works</th><th>waits for</th></tr>
{rows}</table>"""


def _waits(share: LaneShare, seconds: float) -> str:
    parts = [f"{told(why)} {waited / seconds:.1%}" for why, waited in share.waiting.items() if waited >= seconds / 1000]
    return escape(" · ".join(parts) or "nothing")


def _picture(timeline: Timeline, scale: float, longest: float) -> Iterator[str]:
    bottom = _TOP + _ROW * len(LANES)
    for seconds in _ticks(longest):
        x = _LEFT + seconds * scale
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}" stroke="#ddd"/>\n'
        yield f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{_tick(seconds, longest)}</text>\n'
    end = _LEFT + timeline.seconds * scale
    yield f'<line x1="{end:.1f}" x2="{end:.1f}" y1="{_TOP - 8}" y2="{bottom}" stroke="#222"/>\n'
    yield f'<text x="{end:.1f}" y="{_TOP - 12}" text-anchor="middle">end of step</text>\n'
    for row, (lane, name) in enumerate(LANES.items()):
        y = _TOP + row * _ROW + (_ROW - _BAR) // 2
        yield f'<text x="0" y="{y + _BAR // 2 - 2}">{name}</text>\n'
        share = timeline.busy(lane) / timeline.seconds
        yield f'<text x="0" y="{y + _BAR // 2 + 14}" fill="#777">works {share:.0%}</text>\n'
        for timed in timeline.ops:
            if timed.op.lane == lane:
                yield _bar(timed, y, scale)
    y = _TOP + list(LANES).index("compute") * _ROW + (_ROW - _BAR) // 2
    for stall in stalls(timeline, "compute"):
        if (stall.end - stall.start) * scale >= _SMALLEST_WAIT:
            unit = f" ({stall.cause.op.unit})" if stall.cause and stall.cause.op.unit else ""
            meaning = f"waits for: {told(stall.why)}{unit}, {_span(stall.start, stall.end)}"
            yield _rect(stall.start, stall.end, y, scale, "url(#wait)", meaning)


def _ticks(longest: float) -> Iterator[float]:
    """Round times up to ``longest``, 5 to 12 of them."""
    power = 10 ** floor(log10(longest))
    every = next(step for step in (power / 10, power / 5, power / 2, power) if longest / step <= 12)
    yield from (every * i for i in range(int(longest / every) + 1))


def _tick(seconds: float, longest: float) -> str:
    return f"{seconds:g} s" if longest >= 1 else f"{seconds * 1000:g} ms"


def _bar(timed: Timed, y: int, scale: float) -> str:
    op = timed.op
    colour, meaning = KINDS[op.kind]
    x, width = _LEFT + timed.start * scale, (timed.end - timed.start) * scale
    label = ""
    for text in (op.unit, op.unit.removeprefix("layers.")):
        if text and len(text) * _LETTER + 4 <= width:
            middle = x + width / 2
            label = f'<text x="{middle:.1f}" y="{y + 24}" text-anchor="middle" fill="#fff">{escape(text)}</text>'
            break
    micro = f"micro-batch {op.micro}" if op.micro >= 0 else ""
    name = " ".join(part for part in (op.unit, micro) if part) or op.kind.lower()
    return _rect(timed.start, timed.end, y, scale, colour, f"{name}: {meaning}, {_span(timed.start, timed.end)}", label)


def _rect(start: float, end: float, y: int, scale: float, fill: str, told: str, label: str = "") -> str:
    x, width = _LEFT + start * scale, max(0.5, (end - start) * scale)
    return (
        f'<g><rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_BAR}" fill="{fill}" stroke="#fff"'
        f' stroke-width="{0.5 if width > 2 else 0}"/>{label}<title>{escape(told)}</title></g>\n'
    )


def _span(start: float, end: float) -> str:
    return f"{short_time(end - start)} from {short_time(start)}"
