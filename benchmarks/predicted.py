"""Every measured row beside what the planner predicts of it now, as a Markdown table.

    python benchmarks/predicted.py                     # rows of benchmarks/results of 2026-11-30
    python benchmarks/predicted.py rows.jsonl --machine doctor.json

Rates are those of ``--machine``, whatever the row was planned with; nothing is measured. Process peaks are the kernel's
high water mark, compared where the row was its process's first, and where kernels were tuned on the device: rows have
``pinned_gib`` since then.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _planned import machine_spec, model_spec, planned

from megatrain.costs import LIBRARIES
from megatrain.machines import MachineSpec

Row = dict[str, Any]
_CONTEXT = LIBRARIES / 2**30  # GiB that a prediction counts for the driver's context and libraries, and a row does not


@dataclass(frozen=True)
class Compared:
    """A row, and what is predicted of it: seconds, GiB of the device without its libraries, GiB of the process."""

    row: Row
    micro_batches: int
    seconds: float
    device: float
    process: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--machine", default="h200-128gb", help="a known machine or a file")
    args = parser.parse_args()
    where = machine_spec(argparse.Namespace(machine=args.machine, host_memory=None))
    print("| shape | states on device | activations | clipping | tokens, micro-batches ", end="")
    print("| s measured | predicted | | device GiB | predicted | | process GiB | predicted | |")
    print("| --- " * 14 + "|")
    for found in compared(measured(args.files or results()), where):
        print(line(found))


def results() -> list[Path]:
    """The rows of the engine as it is."""
    return sorted((Path(__file__).parent / "results").glob("*-2026-11-30.jsonl"))


def measured(files: list[Path]) -> list[Row]:
    """MegaTrain's rows of steady training steps with an optimizer, in whose program nothing was changed."""
    rows = [json.loads(text) for file in files for text in file.read_text().splitlines()]
    rows = [
        row
        for row in rows
        if row.get("system", "MegaTrain") == "MegaTrain"
        and "seconds" in row
        and not row.get("clip_every")
        and not row.get("serial_optimizer")
        and "steps.py" in row["command"]
    ]
    return sorted(rows, key=lambda row: (row.get("all_parameters", row["parameters"]), row["tokens"]))


def compared(rows: list[Row], where: MachineSpec) -> Iterator[Compared]:
    """Each row with its prediction on the machine, whether it fits there or not."""
    for row in rows:
        micro_batches = row.get("micro_batches") or int(_argument(row, "--micro-batches", "1"))
        args = argparse.Namespace(
            shape=row["shape"], layers=row["layers"], seq_len=1024, auto=False, micro_batches=micro_batches
        )
        with contextlib.redirect_stdout(io.StringIO()):
            figures = planned(args, model_spec(args), where, row["tokens"], row["options"]).figures
        yield Compared(
            row,
            micro_batches,
            figures["predicted_seconds"],
            figures["predicted_device_gib"] - _CONTEXT,
            figures["predicted_process_gib"],
        )


def line(found: Compared) -> str:
    """A row of the table."""
    row, options = found.row, found.row["options"]
    states = _gib(options.get("states_on_device")) + (", all weights" if options.get("weights_on_device") else "")
    activations = [_keeping(options.get("activations") or "recompute")]
    activations += ["inputs on the host"] if options.get("boundaries") == "host" else []
    activations += [f"blocks of {options['boundary_every']}"] if "boundary_every" in options else []
    activations += ["micro-batch-major"] if "order" in options else []
    clipping = options.get("clipping", "deferred") + (f" on {options['speculated']}" if "speculated" in options else "")
    clipping += f", {options['slots']} slots" if "slots" in options else ""
    process = process_peak(row)
    cells = [
        f"{row['shape']}, {row['layers']} layers",
        states,
        ", ".join(activations),
        clipping,
        f"{row['tokens'] // 1024}k, {found.micro_batches}",
        *_three(row["seconds"], found.seconds, 2),
        *_three(row["device_peak_gib"], found.device, 1),
        *(_three(process, found.process, 1) if process else ("", "", "")),
    ]
    return f"| {' | '.join(cells)} |"


def process_peak(row: Row) -> float | None:
    """GiB that the row's process held at most, where that may be compared."""
    first = int(_argument(row, "--tokens", "16384")) == row["tokens"]
    return row.get("process_gib") if first and "pinned_gib" in row else None


def _three(was: float, predicted: float, digits: int) -> tuple[str, str, str]:
    return f"{was:.{digits}f}", f"{predicted:.{digits}f}", f"{predicted / was - 1:+.1%}"


def _argument(row: Row, name: str, default: str) -> str:
    words = row["command"].split()
    return words[words.index(name) + 1] if name in words else default


def _gib(value: str | None) -> str:
    if value is None:
        return "none"
    return f"{int(value[:-3]) / 2**20:.0f} GiB" if value.endswith("KiB") else value.replace("GiB", " GiB")


def _keeping(value: str) -> str:
    """Shares of layers without decimals."""
    text = re.sub(r"([\d.]+)%", lambda share: f"{float(share[1]):.0f} %", value)
    return f"{text} keep" if text != value else value


if __name__ == "__main__":
    main()
