"""Picture and table of the measured rows: tokens a step against 6N TFLOP/s, one line a system.

    cd benchmarks/results
    python ../plot.py h200-7b-2026-11-30.jsonl h200-256gb-7b-2026-11-30.jsonl --svg ../../docs/pictures/speed-7b.svg

The table goes to standard output, as Markdown. Of a configuration measured twice the later row counts, files in the
order they are given in; of a system with several settings the fastest at each number of tokens; what the planner chose
is a best placement. Rows with fewer layers than the shape has are left out.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Lines = dict[str, list[Row]]
"""Rows of each line of the picture, by tokens."""

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 1010, 420, 60, 440, 52, 48
OURS = ["#0969da", "#1a7f37", "#8250df", "#0a7b83"], ["#58a6ff", "#3fb950", "#bc8cff", "#39c5cf"]
OTHERS = ["#bc4c00", "#cf222e", "#9a6700", "#6e7781"], ["#f0883e", "#ff7b72", "#d29922", "#8b949e"]
PLACED = {"states_on_device", "weights_on_device", "activations", "offload_optimizer.ratio"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*", help="default: every file of benchmarks/results")
    parser.add_argument("--shape", default="7b")
    parser.add_argument("--svg", type=Path, help="where to write the picture")
    args = parser.parse_args()
    files = args.files or sorted((Path(__file__).parent / "results").glob("*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    lines = lines_of([row for row in rows if row["shape"] == args.shape])
    if not lines:
        parser.error(f"no row of shape {args.shape} in {', '.join(map(str, files)) or 'benchmarks/results'}")
    print(table(lines))
    if args.svg:
        args.svg.parent.mkdir(parents=True, exist_ok=True)
        args.svg.write_text(picture(lines, f"Qwen2.5-{args.shape.upper()} shape"))


def lines_of(rows: Sequence[Row]) -> Lines:
    """Rows to show, by line and tokens; errors stay where nothing was measured."""
    deepest = [row for row in rows if row["layers"] == max(other["layers"] for other in rows)]
    several = len({row.get("cores") for row in deepest}) > 1
    latest: dict[tuple[str, int, str], Row] = {}
    for row in deepest:
        name = line_name(row)
        if name is not None:
            parts = [row["options"], row.get("micro_batches", 1), row["max_grad_norm"], row.get("clip_every")]
            if row.get("system", "MegaTrain") != "MegaTrain":
                parts.append(row.get("seconds"))  # of a rival's rows the fastest counts
            settings = json.dumps(parts, sort_keys=True)
            latest[name + (f", {row['cores']} cores" if several else ""), row["tokens"], settings] = row
    best: dict[tuple[str, int], Row] = {}
    for (name, tokens, _), row in latest.items():
        if row.get("tflops_6n", 0) >= best.get((name, tokens), {}).get("tflops_6n", 0):
            best[name, tokens] = row
    lines: Lines = {}
    for name, tokens in sorted(best):
        lines.setdefault(name, []).append(best[name, tokens])
    return dict(sorted(lines.items(), key=lambda line: -max(row.get("tflops_6n", 0) for row in line[1])))


def line_name(row: Row) -> str | None:
    """The line that a row belongs to; ``None`` for settings of ours that no line compares."""
    system, options = row.get("system", "MegaTrain"), row["options"]
    changed = {name for name, value in options.items() if value is not None} - {"clipping", "speculated", "compiled"}
    if row.get("serial_optimizer") or "device_memory" in changed:
        return None
    if options.get("activations") == "recompute":
        changed -= {"activations"}
    on_host = system == "MegaTrain" and changed <= {"activations"}
    if on_host and (not row.get("auto") or "states_on_device" in options):
        clipping = f", {options['clipping']}" if "clipping" in options else ""
        return "MegaTrain, all on the host" + clipping + (", activations kept" if changed else "")
    if row.get("auto") or (changed and changed <= PLACED):
        return f"{system}, best placement"
    if system != "MegaTrain":
        return system + "".join(f", {name}={options[name]}" for name in sorted(changed))
    return None


def table(lines: Lines) -> str:
    """Markdown, one line a row."""
    text = ["| system | tokens | s/step | tokens/s | 6N TFLOP/s | device GiB | host GiB | settings |"]
    text.append("| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |")
    for name, rows in lines.items():
        for row in rows:
            settings = ", ".join(f"{key}={value}" for key, value in row["options"].items())
            if "error" in row:
                text.append(f"| {name} | {row['tokens']} | {row['error']} | | | | | {settings} |")
                continue
            memory = " | ".join(f"{row[key]:.1f}" if key in row else "" for key in ("device_peak_gib", "host_gib"))
            speeds = f"{row['seconds']:.2f} | {row['tokens_per_second']:.0f} | {row['tflops_6n']:.0f}"
            text.append(f"| {name} | {row['tokens']} | {speeds} | {memory} | {settings} |")
    return "\n".join(text)


def picture(lines: Lines, title: str) -> str:
    """An SVG that follows the reader's light or dark theme."""
    measured = {name: [row for row in rows if "error" not in row] for name, rows in lines.items()}
    measured = {name: rows for name, rows in measured.items() if rows}
    rows = [row for line in measured.values() for row in line]
    ticks = sorted({row["tokens"] for row in rows})
    top = 100 * math.ceil(max(row["tflops_6n"] for row in rows) / 100)
    span = math.log2(ticks[-1] / ticks[0]) or 1

    def x(tokens: int) -> float:
        return LEFT + 20 + (WIDTH - LEFT - RIGHT - 40) * math.log2(tokens / ticks[0]) / span

    def y(tflops: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * tflops / top

    body = [
        _text(LEFT, 22, f"{title}: TFLOP/s (6N) by tokens a step", "title"),
        _text(LEFT, 40, _machine(rows), "small"),
    ]
    for value in range(0, top + 1, 100):
        body.append(f'<path class="grid" d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}"/>')
        body.append(_text(LEFT - 8, y(value) + 4, str(value), "small", "end"))
    for tokens in ticks:
        body.append(_text(x(tokens), HEIGHT - BOTTOM + 20, f"{tokens / 1024:g}k", "small", "middle"))
    themes: tuple[list[str], list[str]] = ([], [])
    for index, (name, line) in enumerate(measured.items()):
        ours = name.startswith("MegaTrain")
        rank = sum(other.startswith("MegaTrain") == ours for other in list(measured)[:index])
        for theme, colours in zip(themes, OURS if ours else OTHERS, strict=True):
            theme.append(f".s{index}{{color:{colours[rank % len(colours)]}}}")
        points = [(x(row["tokens"]), y(row["tflops_6n"])) for row in line]
        body.append(f'<g class="s{index}">' + _line(points, ours))
        legend = TOP + 8 + 24 * index
        body.append(_line([(WIDTH - RIGHT + 16, legend), (WIDTH - RIGHT + 44, legend)], ours))
        body.append(_text(WIDTH - RIGHT + 52, legend + 4, name, "small") + "</g>")
    style = "text{font:13px system-ui,sans-serif;fill:#1f2328}.title{font-size:15px;font-weight:600}"
    light = ".grid{stroke:#d0d7de}" + "".join(themes[0])
    dark = "text{fill:#e6edf3}.grid{stroke:#30363d}" + "".join(themes[1])
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
            f"<style>{style}{light}@media(prefers-color-scheme:dark){{{dark}}}</style>",
            *body,
            "</svg>\n",
        ]
    )


def _machine(rows: Iterable[Row]) -> str:
    """What the rows ran on: every value that occurs."""
    parts = (("gpu", "{}"), ("cores", "{} cores"), ("torch", "torch {}"))
    values = ({form.format(row[key]) for row in rows if row.get(key)} for key, form in parts)
    return ", ".join(" / ".join(sorted(value)) for value in values if value)


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(points: Sequence[tuple[float, float]], solid: bool) -> str:
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    dash = "" if solid else ' stroke-dasharray="5 4"'
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="currentColor"/>' for x, y in points)
    return f'<path d="{path}" fill="none" stroke="currentColor" stroke-width="2"{dash}/>{dots}'


if __name__ == "__main__":
    main()
