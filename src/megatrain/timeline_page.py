"""A step as lanes over time: one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from megatrain.engine.simulate import Timed, Timeline

LANES = {
    "h2d": "host to GPU",
    "compute": "GPU arithmetic",
    "d2h": "GPU to host",
    "optimizer": "CPU optimizer",
}
KINDS = {
    "FORWARD": ("#4e79a7", "forward"),
    "LOSS": ("#b07aa1", "loss, both ways"),
    "BACKWARD": ("#f28e2b", "backward, with recompute where activations are not kept"),
    "UPDATE": ("#59a14f", "optimizer update"),
    "SPECULATE": ("#59a14f", "optimizer update"),
    "FETCH": ("#76b7b2", "weights to the GPU"),
    "DRAIN": ("#e15759", "gradient to the host"),
}
_WIDTH, _ROW, _BAR, _LEFT, _TOP = 1500, 56, 40, 130, 30
_LETTER = 7  # pixels


def page(title: str, lines: Sequence[str], timeline: Timeline) -> str:
    """The page: ``lines`` above the picture, one row a lane, a bar an operation (point at it for its name and time)."""
    height = _TOP + _ROW * len(LANES) + 30
    body = "\n".join(_picture(timeline))
    present = {timed.op.kind for timed in timeline.ops}
    legend = {meaning: colour for kind, (colour, meaning) in KINDS.items() if kind in present}
    keys = "".join(f'<span><b style="background:{colour}"></b>{escape(text)}</span>' for text, colour in legend.items())
    text = "".join(f"<p>{escape(line)}</p>\n" for line in lines)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<title>{escape(title)}</title>
<style>
body {{ font: 14px sans-serif; margin: 24px; color: #222; background: #fff; }}
div {{ overflow-x: auto; }}
svg text {{ font-size: 12px; }}
span {{ margin-right: 20px; white-space: nowrap; }}
b {{ display: inline-block; width: 12px; height: 12px; margin-right: 6px; }}
</style>
</head>
<body>
<h1>{escape(title)}</h1>
{text}<p>{keys}</p>
<div>
<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 60}" height="{height}">
{body}
</svg>
</div>
</body>
</html>
"""


def _picture(timeline: Timeline) -> Iterator[str]:
    scale = _WIDTH / timeline.seconds
    bottom = _TOP + _ROW * len(LANES)
    for tick in range(11):
        x, seconds = _LEFT + _WIDTH * tick / 10, timeline.seconds * tick / 10
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}" stroke="#ddd"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{_time(seconds)}</text>'
    for row, (lane, name) in enumerate(LANES.items()):
        y = _TOP + row * _ROW + (_ROW - _BAR) // 2
        yield f'<text x="0" y="{y + _BAR // 2 - 2}">{name}</text>'
        share = timeline.busy(lane) / timeline.seconds
        yield f'<text x="0" y="{y + _BAR // 2 + 14}" fill="#777">busy {share:.0%}</text>'
        for timed in timeline.ops:
            if timed.op.lane == lane and timed.op.kind in KINDS:
                yield _bar(timed, y, scale)


def _bar(timed: Timed, y: int, scale: float) -> str:
    x, width = _LEFT + timed.start * scale, max(0.5, (timed.end - timed.start) * scale)
    colour, meaning = KINDS[timed.op.kind]
    name = escape(timed.op.unit)
    label = ""
    for text in (name, name.removeprefix("layers.")):
        if len(text) * _LETTER + 4 <= width:
            middle = x + width / 2
            label = f'<text x="{middle:.1f}" y="{y + 24}" text-anchor="middle" fill="#fff">{text}</text>'
            break
    told = f"{name}: {meaning}, {_time(timed.end - timed.start)} from {_time(timed.start)}"
    return (
        f'<g><rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_BAR}" fill="{colour}" stroke="#fff"'
        f' stroke-width="0.5"/>{label}<title>{told}</title></g>'
    )


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
