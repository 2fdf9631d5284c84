"""A step reads like a table: the program of two layers and two micro-batches, as it is in ``tests/golden``.

After a change of the program that is meant: ``python tests/unit/test_step_program.py > tests/golden/step_program.txt``
"""

from __future__ import annotations

from pathlib import Path

from megatrain.engine.program import Buffer, Builder, Policy, UnitSpec
from megatrain.engine.schedule import WaitTracker

GOLDEN = Path(__file__).parents[1] / "golden" / "step_program.txt"


def name(buffer: Buffer) -> str:
    kind, *rest = buffer
    return f"{kind}[{','.join(map(str, rest))}]" if rest else str(kind)


def printed() -> str:
    """First step of two layers and two micro-batches, two slots, tied head, gradients in bfloat16."""
    units = [
        UnitSpec("embedding", 200, keeps=True, lookup=True),
        UnitSpec("layer.0", 100),
        UnitSpec("layer.1", 100),
        UnitSpec("head", 1, uses=("embedding",)),
    ]
    builder, tracker = Builder(units, 2, Policy(sum_dtype_differs=True)), WaitTracker()
    rows = [("", "lane", "operation", "waits for", "reads", "writes", "releases")]
    ops = [(op, *tracker.add(op)) for op in builder.training_step(2)]
    numbers = {ticket: str(i) for i, (_, ticket, _) in enumerate(ops)}
    for op, ticket, waits in ops:
        buffers = [" ".join(map(name, found)) for found in (op.reads, op.writes, op.releases)]
        rows.append((numbers[ticket], op.lane, str(op), " ".join(numbers[wait] for wait in waits), *buffers))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() + "\n" for row in rows)


def test_the_program_is_the_one_in_the_book() -> None:
    assert printed() == GOLDEN.read_text()


if __name__ == "__main__":
    print(printed(), end="")
