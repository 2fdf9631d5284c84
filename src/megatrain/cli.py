"""The command line. Nothing heavy is imported before the first line has been printed."""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from megatrain import __version__
from megatrain.errors import LaneError, UserError

if TYPE_CHECKING:
    from megatrain.config import RunConfig
    from megatrain.loggers.console import ConsoleLogger
    from megatrain.run_folder import RunFolder

HELP = """\
Full-precision training of models larger than your GPU.
Start here:  megatrain doctor                what this machine can train
             megatrain plan run.yaml         what fits, how fast, and what to set
             megatrain train run.yaml --dry-run
             megatrain train run.yaml [key=value ...]
"""


class _Group(TyperGroup):
    """Shows the first screen before the list of commands."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(HELP)
        self.format_options(ctx, formatter)


_MOST_TOKENS = 10**15  # of a planned step

app = typer.Typer(
    cls=_Group,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        print(f"megatrain {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    pass


@app.command(context_settings={"ignore_unknown_options": True})
def train(
    words: Annotated[list[str] | None, typer.Argument(metavar="[FILE] [key=value ...]", show_default=False)] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything; train nothing, and write nothing but caches.")
    ] = False,
) -> None:
    """Train a model as FILE and the key=value words say."""
    started = time.monotonic()
    print(f"megatrain {__version__}", flush=True)
    with _reported() as report:
        from megatrain.config_file import load_config

        file, overrides = _file_and_overrides(words or [])
        _train(load_config(file, overrides), started, dry_run, report)


def _train(config: RunConfig, started: float, dry_run: bool, report: _Report) -> None:
    from megatrain.config_file import dump_config
    from megatrain.run_folder import RunFolder, quiet_libraries

    run = report.run = RunFolder(Path(config.output_dir))
    run.check(config.checkpoint.resume)
    with _console(config.logging.every) as console:
        console.progress("starting", 0, 0)
        early = quiet_libraries()
        from megatrain.preflight import prepare

        prepared = prepare(config, console.progress)
        if dry_run:
            from megatrain.dry_run import describe

            for line in describe(prepared):
                console.note(line)
            return
        run.claim(config.checkpoint.resume)
        from megatrain import trainer

        def begin(final: RunConfig) -> None:
            run.create(dump_config(final), early)
            console.note(f"run     {run.path}, all options in {run.resolved}")

        outcome = trainer.train(prepared, run, console, started, begin)
    if isinstance(outcome, trainer.Stopped):
        print(f"stopped after step {outcome.step} of {outcome.total_steps}, state saved in {outcome.saved}")
        print(f"resume  {run.resume_command}")
        raise typer.Exit(128 + outcome.signal_number)


@app.command()
def generate(
    folder: Annotated[Path, typer.Argument(help="An exported model, such as runs/first/final.")],
    prompt: Annotated[str, typer.Argument(help="The question.")] = "What can you help me with?",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length limit of the answer.")] = 256,
) -> None:
    """Ask an exported model one question."""
    with _reported():
        from megatrain.generate import answer

        print(answer(folder.expanduser(), prompt, max_new_tokens))


@app.command()
def export(
    source: Annotated[Path, typer.Argument(help="A run's folder (its newest save), or one of its saves.")],
    target: Annotated[Path, typer.Argument(help="New folder for the Hugging Face checkpoint.")],
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32; default: the source's.")] = None,
) -> None:
    """Write a save of a run as a Hugging Face checkpoint."""
    print(f"megatrain {__version__}", flush=True)
    with _reported(), _console() as console:
        from megatrain.export_save import export_save
        from megatrain.run_folder import quiet_libraries

        quiet_libraries()
        source, target = source.expanduser(), target.expanduser()
        export_save(source, target, dtype, console.progress)
        console.note(f"model   {target}")


@app.command()
def doctor() -> None:
    """Say what this machine can train, and what to correct. Needs neither a GPU nor torch."""
    print(f"megatrain {__version__}", flush=True)
    with _reported():
        from megatrain.doctor import examine, measured_rates, verdict
        from megatrain.machine import probe

        machine = probe()
        findings = examine(machine, Path.cwd())
        blocked = any(finding.blocks for finding in findings)
        with _console() as console:
            progress = partial(console.progress, done=0, total=0)
            for finding in chain(findings, [] if blocked else measured_rates(machine, Path.cwd(), progress)):
                console.note(f"{finding.subject:7} {finding.text}")
                if finding.fix:
                    console.note(f"  fix:   {finding.fix}")
        print(f"verdict {verdict(machine, findings)}")
        if blocked:
            raise typer.Exit(1)


@app.command(context_settings={"ignore_unknown_options": True})
def plan(
    words: Annotated[list[str] | None, typer.Argument(metavar="[FILE] [key=value ...]", show_default=False)] = None,
    model: Annotated[str | None, typer.Option(help="A config.json, a model's folder, or a known name.")] = None,
    machine: Annotated[str | None, typer.Option(help="A known machine, or a file. Default: this one.")] = None,
    tokens_per_step: Annotated[
        int | None, typer.Option(min=1, max=_MOST_TOKENS, help="Default: train.batch_size sequences.")
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(min=1, max=_MOST_TOKENS, help="Default: data.max_seq_len, or 4096.")
    ] = None,
    gradients: Annotated[
        str, typer.Option(help="kept, or passing: 12 bytes a parameter instead of 14, no clipping.")
    ] = "kept",
    tokens: Annotated[int, typer.Option(min=1, help="Length of the run whose time is told.")] = 1_000_000_000,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object in place of the tables.")] = False,
    timeline: Annotated[
        Path | None, typer.Option(help="Draw the step over time: an HTML page, or .json for Perfetto.")
    ] = None,
) -> None:
    """Say what fits on a machine, how fast it is, and what to set. Needs no GPU."""
    with _reported():
        import json

        from megatrain.machine import probe
        from megatrain.machines import load_machine, this_machine
        from megatrain.model_spec import load_model_spec
        from megatrain.plan_report import as_data, make_request, report, write_timeline
        from megatrain.planner import AskedBy
        from megatrain.planner import plan as make_plan

        config = None
        if words:
            from megatrain.config_file import load_config

            config = load_config(*_file_and_overrides(words))
        name = model or (config.model.name_or_path if config else "")
        if not name:
            raise UserError("--model: missing\n  fix:   give a config.json, a folder or a known name, or a run.yaml")
        device = config.placement.device if config else "auto"
        where = load_machine(machine) if machine else this_machine(probe(), device)
        request = make_request(config, where, tokens_per_step, seq_len, gradients)
        notice = partial(print, file=sys.stderr, flush=True)
        asked_by: AskedBy = "plan options"
        if config:
            asked_by = "plan file" if tokens_per_step is None and seq_len is None else "plan file and step"
        found = make_plan(load_model_spec(name, notice), where, request, asked_by=asked_by)
        lines = list(report(found, tokens))
        if timeline:
            write_timeline(found, [line for line in lines if line.startswith(("plan", "predicted"))], timeline)
        if as_json:
            print(json.dumps(as_data(found)))
            return
        print("\n".join([f"megatrain {__version__}", *lines]))


def _file_and_overrides(words: list[str]) -> tuple[str | None, list[str]]:
    files = [w for w in words if Path(w).is_file() or ("=" not in w and not w.startswith("-"))]
    if len(files) > 1:
        raise UserError(f"{files[1]}: a second file\n  fix:   give one file; write options as section.key=value")
    return (files[0] if files else None), [w for w in words if w not in files]


@contextmanager
def _console(every: int = 1) -> Iterator[ConsoleLogger]:
    from rich.console import Console

    from megatrain.loggers.console import ConsoleLogger

    class Output(Console):
        """Tells the caller that the reader has gone, where rich would end the thread that happens to print."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError(errno.EPIPE, "the reader of the output has gone")

    console = ConsoleLogger(Output(highlight=False), every)
    try:
        yield console
    finally:
        console.close()


class _Report:
    """What an error message needs to know of the run."""

    run: RunFolder | None = None


@contextmanager
def _reported() -> Iterator[_Report]:
    """Turns errors into what the user reads, and into the exit code: 2 for a user's mistake, 1 for ours."""
    report = _Report()
    try:
        _check_working_folder()
        yield report
    except UserError as error:
        _print_mistake(error, report.run)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        print(f"interrupted (exit 130, {_left(report.run)})", file=sys.stderr)
        raise typer.Exit(130) from None
    except (typer.Exit, BrokenPipeError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:  # wherever a user's name is looked up
            name = str(error.filename)
            mistake = f"{name[:40]}...: a name of {len(name)} characters, too long for a file\n  fix:   a shorter name"
            _print_mistake(UserError(mistake), report.run)
            raise typer.Exit(2) from None
        _print_failure(error, report.run)
        raise typer.Exit(1) from None
    finally:
        if report.run:
            report.run.close()


def _check_working_folder() -> None:
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UserError("the folder that you are in no longer exists\n  fix:   cd to one that does") from None


def _left(run: RunFolder | None) -> str:
    """What a run that ended early leaves; before its first step that is nothing."""
    if run and run.created and run.metrics.exists():
        return f"log: {run.log}, to go on: {run.resume_command}"
    if run:
        run.abandon()
    return "nothing was written"


def _print_mistake(error: UserError, run: RunFolder | None) -> None:
    print(f"error: {error}", file=sys.stderr)
    print(f"(exit 2, {_left(run)})", file=sys.stderr)


def _print_failure(error: Exception, run: RunFolder | None) -> None:
    """An error that is not the user's: where it happened, where the log is, how to go on."""
    where = str(error) if isinstance(error, LaneError) else f"{type(error).__name__}: {error}\n  lane:  main, no unit"
    print(f"failed: {where}", file=sys.stderr)
    if run and run.created:
        logging.getLogger("megatrain").error("the run failed", exc_info=error)
        print(f"  log:   {run.log}\n  resume {run.resume_command}", file=sys.stderr)
    else:
        traceback.print_exception(error, file=sys.stderr)
        if run:
            run.abandon()


def main() -> None:
    """Entry point of the ``megatrain`` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows ? in its place
    try:
        app(prog_name="megatrain")
    finally:
        try:
            sys.stdout.flush()
        except BrokenPipeError:  # who reads has gone (`| head`): nobody is left to be told
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
