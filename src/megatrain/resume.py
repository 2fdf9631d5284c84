"""Going on with a saved run: which save, and whether the options of this run may continue it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatrain.checkpoint import latest_complete
from megatrain.config import flat_options
from megatrain.errors import UserError
from megatrain.loggers import Logger
from megatrain.preflight import Prepared

# With another value the position in the data that a save holds would mean other rows.
_ORDER = ("train.seed", "train.batch_size", "data.shuffle")
_NOT_SHOWN = ("checkpoint.resume", "output_dir")


def find_save(resume: str, saves: Path, console: Logger, damaged: list[Path]) -> Path | None:
    """The save that ``checkpoint.resume`` means, None for a new start; says which were passed over and why.

    ``damaged`` are saves that could not be loaded. Raises :class:`UserError` if no other is left.
    """
    if resume == "no":
        return None
    if resume != "auto":
        newest = latest_complete(saves)[0]
        if newest is not None and Path(resume).name < newest.name:  # step-... with leading zeros
            raise UserError(
                f"checkpoint.resume: {resume} is older than {newest}, and saves are not overwritten\n"
                "  fix:   name a new output_dir, or move the later saves away"
            )
        return Path(resume)
    save, passed_over = latest_complete(saves, damaged)
    for path, reason in passed_over:
        console.note(f"passed over {path}: {reason}")
    if save is None and damaged:
        raise UserError(
            f"checkpoint.resume: every save in {saves} is damaged\n"
            "  fix:   start anew in another output_dir, or copy a save back"
        )
    if save is None:
        console.note(f"resume  no save in {saves}: starting from the beginning")
    return save


def check_resume(prepared: Prepared, extra: dict[str, Any]) -> list[str]:
    """Put the data at the position of a save and return the options that have changed, as ``optim.lr 1e-5 -> 2e-5``.

    ``extra`` is what the trainer put into the save. Raises :class:`UserError`, naming option, both values and the way
    out, where the run could not go on as the same one.
    """
    if "step" not in extra:
        raise UserError(
            "checkpoint.resume: the save was written by Model.save_state, without the position in the data\n"
            "  fix:   name a save of megatrain train, or go on with Model.load_state"
        )
    # A save from before options were kept has none: then only the rows themselves are compared.
    before, now = extra.get("options", {}), flat_options(prepared.config)
    changed = {name: (before[name], now[name]) for name in now if name in before and before[name] != now[name]}
    for name in _ORDER:
        if name in changed:
            old, new = changed[name]
            raise UserError(
                f"{name}: {_text(new)}, but the saved run has {_text(old)}: the rest of it would see other rows\n"
                f"  fix:   continue with {name}={_text(old)}, or start anew in another output_dir"
            )
    step, total = extra["step"], prepared.total_steps
    if total < step:
        name = "train.max_steps" if prepared.config.train.max_steps else "train.epochs"
        raise UserError(
            f"{name}: this run would have {total} steps, but the save is after step {step}\n"
            f"  fix:   raise {name}, or resume from an earlier save"
        )
    try:
        prepared.batches.restore(extra["data"])
    except UserError as e:
        data = {n: v for n, v in changed.items() if n.startswith(("data.", "model."))}
        lines = [f"\n  changed: {_change(name, *values)}" for name, values in data.items()]
        raise UserError(str(e) + "".join(lines)) from None
    return [_change(name, *values) for name, values in changed.items() if name not in _NOT_SHOWN]


def _change(name: str, old: Any, new: Any) -> str:
    return f"{name} {_text(old)} -> {_text(new)}"


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
