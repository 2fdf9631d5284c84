"""``megatrain train --dry-run``: everything but the steps, as lines to read.

Nothing is written but the caches that any command fills: downloads, measured rates and model specs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING
from itertools import groupby

from megatrain.config import RunConfig, flat_options, options
from megatrain.datasets import Row
from megatrain.datasets._encode import Encoder
from megatrain.loggers._screens import data_line, model_line, size
from megatrain.preflight import Prepared
from megatrain.trainer import data_figures

_ROWS = 2
_LONGEST = 600  # characters of a row that are shown


def describe(prepared: Prepared) -> Iterator[str]:
    """The options that are not the defaults, the first rows, and last the model, data, steps, memory and disk."""
    yield "options (all others have the defaults of docs/config.md):"
    yield from (f"        {line}" for line in _given(prepared.asked))
    for number, row in enumerate(prepared.data.rows[:_ROWS], 1):
        yield f"row {number}   {len(row)} tokens; trained on is what stands in [[ ]]:"
        yield from (f"        {line}" for line in marked_text(prepared.data.encoder, row).splitlines())
    yield from prepared.choice.lines
    yield model_line(prepared.name, prepared.parameters, prepared.dtype)
    yield data_line(data_figures(prepared.data))
    for line, bad in prepared.data.bad[:10]:
        yield f"        line {line} skipped: {bad.reason}"
    rows, tokens, micro_batches = prepared.batches.largest
    schedule, last = prepared.schedule, prepared.total_steps - 1
    yield (
        f"steps   {prepared.total_steps:,} of at most {micro_batches} x {rows} rows x {tokens:,} tokens · "
        f"rate {schedule.rate(0):.2e} .. {schedule.peak:.2e} .. {schedule.rate(last):.2e}"
    )
    device = prepared.asked.placement.device_memory or "all that is free"
    yield f"memory  {prepared.device} {device} · host {size(prepared.host_bytes)} of {size(prepared.host_limit)} free"
    yield f"disk    each save {size(prepared.save_bytes)}, free {size(prepared.disk_free)}"
    yield "dry run: nothing was trained, and nothing written but caches (downloads, measured rates, model specs)"


def _given(config: RunConfig) -> Iterator[str]:
    """``name: value`` of each option whose value is not its default."""
    known = options()
    for name, value in flat_options(config).items():
        f = known[name][0]
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        if value != default:
            yield f"{name}: {value}"


def marked_text(encoder: Encoder, row: Row) -> str:
    """The row decoded, with ``[[ ]]`` around each run of tokens that is trained on."""
    pairs = zip(row.ids.tolist(), row.target.tolist(), strict=True)
    parts = []
    for target, group in groupby(pairs, key=lambda pair: pair[1]):
        text = encoder.decode([token for token, _ in group])
        parts.append(f"[[{text}]]" if target else text)
    joined = "".join(parts)
    return joined if len(joined) <= _LONGEST else joined[:_LONGEST] + " ..."
