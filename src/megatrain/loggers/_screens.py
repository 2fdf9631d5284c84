"""The lines that people read, as text. Figures carry their units; golden tests keep the wording."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from shlex import quote

from megatrain.loggers import Checked, StepRecord, Summary


def count(number: float) -> str:
    """``950``, ``4,812``, ``3.1M``, ``4.02B``."""
    if number >= 1e9:
        return f"{number / 1e9:.2f}B"
    if number >= 1e6:
        return f"{number / 1e6:.1f}M"
    return f"{number:,.0f}"


def rate(number: float) -> str:
    """``1,163``, ``12``, ``4.2``, ``0.031``."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def duration(seconds: float) -> str:
    """``12 s``, ``4 min``, ``3 h 12 min``, ``2 d 5 h``."""
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    minutes = round(whole / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


def size(number: float) -> str:
    """Memory, in binary units: ``312 MiB``, ``19.2 GiB``."""
    return f"{number / 1024**3:.1f} GiB" if number >= 1024**3 else f"{number / 1024**2:.0f} MiB"


def disk_size(number: float) -> str:
    """Files, in decimal units as disks are sold: ``269 MB``, ``48 GB``."""
    return (
        f"{number / 1e9:,.0f} GB"
        if number >= 1e10
        else f"{number / 1e9:.1f} GB"
        if number >= 1e9
        else f"{number / 1e6:.0f} MB"
    )


def model_line(name: str, parameters: int, compute_dtype: str) -> str:
    compute = {"bfloat16": "bf16", "float32": "fp32"}[compute_dtype]
    return f"model   {name} · {count(parameters)} parameters, all trained · FP32 masters, {compute} compute"


@dataclass(frozen=True, slots=True)
class DataFigures:
    """The counts of a data set for :func:`data_line`; ``left_out`` pairs a number of rows with the reason."""

    rows: int
    tokens: int
    target_tokens: int
    left_out: tuple[tuple[int, str], ...]


def data_line(data: DataFigures) -> str:
    share = 100 * data.target_tokens / data.tokens
    dropped = "".join(f" · {n:,} rows {reason}" for n, reason in data.left_out if n)
    return f"data    {data.rows:,} rows · {count(data.tokens)} tokens, {share:.0f} % trained on{dropped}"


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Bytes for :func:`memory_line`; ``device`` is ``GPU`` or ``CPU``."""

    device: str
    device_used: int
    device_total: int
    host_used: int
    host_total: int
    save: int
    disk_free: int


def memory_line(m: MemoryFigures) -> str:
    return (
        f"memory  {m.device} {_of(m.device_used, m.device_total)} · host {_of(m.host_used, m.host_total)} · "
        f"each save {size(m.save)}, disk free {size(m.disk_free)}"
    )


def _of(used: int, total: int) -> str:
    """``19.2 of 24.0 GiB``: both in the unit of the larger."""
    number, unit = size(total).split()
    scale = 1024**3 if unit == "GiB" else 1024**2
    return f"{used / scale:.{1 if unit == 'GiB' else 0}f} of {number} {unit}"


def step_line(r: StepRecord) -> str:
    left = "" if r.seconds_left is None else f" · {duration(r.seconds_left)} left"
    skipped = " · SKIPPED (gradient not finite)" if r.skipped else ""
    width = len(str(r.total_steps))
    return (
        f"step {r.step:{width}}/{r.total_steps} · loss {r.loss:.4f} · rate {r.lr:.2e} · grad {r.grad_norm:.2f} · "
        f"{r.real_tokens / r.seconds:,.0f} tokens/s · {size(r.device_peak)} device{left}{skipped}"
    )


def checked_line(s: Summary) -> str:
    """Measured against predicted; the sign says which was larger: ``+3 %`` is a prediction above what was measured."""
    parts = [
        *([f"step {_checked(s.one_step, short_time)}"] if s.one_step else []),
        *([f"device {_checked(s.device_peak, size)}"] if s.device_peak else []),
        f"host {_checked(s.host_peak, size)}",
    ]
    return f"checked {' · '.join(parts)}"


def _checked(figure: Checked, shown: Callable[[float], str]) -> str:
    off = 100 * (figure.predicted / figure.measured - 1)
    return f"{shown(figure.measured)}, predicted {shown(figure.predicted)} ({off:+.0f} %)"


def short_time(seconds: float) -> str:
    """``5.63 s``, ``431.0 ms``."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def summary_lines(s: Summary) -> list[str]:
    speed = s.real_tokens / s.step_seconds
    teraflops = 6 * s.parameters * speed / 1e12
    model = quote(str(s.exported))
    return [
        f"done    {s.steps:,} steps · {count(s.target_tokens)} target tokens · {duration(s.seconds)} · "
        f"loss {s.first_loss:.2f} -> {s.last_loss:.2f}",
        f"speed   {speed:,.0f} tokens/s · {teraflops:.{0 if teraflops >= 10 else 2}f} TFLOP/s",
        checked_line(s),
        f"model   {s.exported}",
        f"next    megatrain generate {model}     vllm serve {model}",
    ]
