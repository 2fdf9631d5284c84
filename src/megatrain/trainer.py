"""A training run from its configuration to the exported model: the loop, its saves, and what it says meanwhile."""

from __future__ import annotations

import logging
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import Any

import torch

from megatrain import AdamW, Model, machine
from megatrain._durable import remove_folder
from megatrain.checked import input_bytes, least_process_bytes, mismatches, peaks, planned_memory
from megatrain.checkpoint import DamagedSave, prune, read_meta, set_aside, step_folder
from megatrain.config import RunConfig, flat_options, parse_bytes
from megatrain.datasets._batches import StepBatch
from megatrain.datasets._load import Dataset, Progress
from megatrain.errors import UserError
from megatrain.loggers import Logger, StepRecord, Summary
from megatrain.loggers._screens import DataFigures, MemoryFigures, data_line, memory_line, model_line, size
from megatrain.loggers.jsonl import JsonlLogger
from megatrain.model_spec import load_model_spec
from megatrain.preflight import Prepared
from megatrain.resume import check_resume, find_save
from megatrain.run_folder import RunFolder
from megatrain.tracing import RecordedSteps

_log = logging.getLogger(__name__)
_ENDS = 10  # steps at each end of the run whose mean loss the summary shows
_RECENT = 20  # steps that the time left is told from


@dataclass(frozen=True, slots=True)
class Stopped:
    """The run ended early because it was asked to; its state after ``step`` steps is in ``saved``."""

    signal_number: int
    step: int
    total_steps: int
    saved: Path


@dataclass(slots=True)
class _Totals:
    """Sums over the steps so far; part of a save, so that a resumed run reports on the whole."""

    target_tokens: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0
    seconds: float = 0.0
    step_seconds: float = 0.0
    first_losses: list[float] = field(default_factory=list)
    last_losses: list[float] = field(default_factory=list)

    def add(self, batch: StepBatch, loss: float, seconds: float) -> None:
        self.target_tokens += batch.target_tokens
        self.real_tokens += batch.real_tokens
        self.padded_tokens += batch.padded_tokens
        self.step_seconds += seconds
        if len(self.first_losses) < _ENDS:
            self.first_losses.append(loss)
        self.last_losses = [*self.last_losses, loss][-_ENDS:]


def train(
    prepared: Prepared, run: RunFolder, console: Logger, started: float, begin: Callable[[RunConfig], None]
) -> Summary | Stopped:
    """Run ``prepared`` to its end, or until SIGINT or SIGTERM asks it to stop after the step under way.

    ``run`` has been claimed; ``begin`` is called with its final options once nothing can refuse it any more, and
    creates it. ``started`` is the :func:`time.monotonic` of the command's start. Errors leave through the exception;
    what was saved stays.
    """
    config, damaged = prepared.config, list[Path]()
    save = find_save(config.checkpoint.resume, run.checkpoints, console, damaged)
    if save is not None:
        check_resume(prepared, read_meta(save)["extra"])  # before minutes of loading
    prepared, model = _open_fitting(prepared, console)
    config = prepared.config
    with model:
        loop = _Loop(prepared, run, model, console, started)
        while save is not None:
            try:
                loop.resume(save)
                break
            except DamagedSave as e:
                if config.checkpoint.resume != "auto":
                    raise
                console.note(f"passed over {save}: {str(e).partition('. ')[0]}")
                damaged.append(save)  # the next one replaces all that this one has put into memory
                save = find_save(config.checkpoint.resume, run.checkpoints, console, damaged)
        if not run.final.exists():
            model.check_save(run.final, config.export.dtype)
        begin(config)
        for path in damaged:
            set_aside(path)
        _describe(prepared, model, console)
        loop.process = _check_memory(prepared, model, console)
        if config.trace.path and not loop.recorded.steps:
            console.note("trace   none: too few steps are left for a steady one")
        with loop.logging(), _asked_to_stop() as stop:
            for step in range(loop.step, prepared.total_steps):
                loop.run_step(step)
                if stop:
                    return Stopped(stop[0], step + 1, prepared.total_steps, loop.save())
                if (
                    config.checkpoint.every
                    and (step + 1) % config.checkpoint.every == 0 < prepared.total_steps - step - 1
                ):
                    loop.save()
            return loop.finish()


def _open_fitting(prepared: Prepared, console: Logger) -> tuple[Prepared, Model]:
    """The model, its largest step measured before weights are read; where a choice of ours is refused, the next one."""
    while True:
        attempt = prepared

        def measure(model: Model, attempt: Prepared = attempt) -> None:
            console.progress("measuring memory", 0, 0)
            model.reserve(*attempt.batches.largest)
            peak, limit = model.memory.device_peak, attempt.choice.device_limit
            if limit is not None and peak > limit:
                place = "GPU" if attempt.device == "cuda" else "machine"
                raise UserError(
                    f"placement.device_memory: a step needs {size(peak)}, and {size(limit)} of this {place} are free\n"
                    f"  fix:   lower data.max_seq_len or train.micro_batch_size, or free memory of this {place}"
                )

        try:
            model = open_model(prepared.config, prepared.folder, prepared.dtype, console.progress, measure)
        except UserError as error:
            prepared, refused = prepared.after(error), str(error)
        except torch.OutOfMemoryError as error:  # before a step could be measured: what stays on the device is too much
            refused = (
                f"placement.device_memory: the device has too little for what stays there: {str(error).splitlines()[0]}"
                "\n  fix:   lower placement.states, placement.weights or placement.slots, or free memory of the GPU"
            )
            prepared = prepared.after(UserError(refused))
        else:
            return prepared, model
        _log.info("%s; planning again", refused)


def open_model(
    config: RunConfig,
    folder: Path,
    dtype: str | None,
    progress: Progress,
    before_loading: Callable[[Model], None] | None = None,
) -> Model:
    """The model with everything that the configuration says about how it is trained; no option may be `auto`."""
    o, p = config.optim, config.placement
    return Model.from_pretrained(
        folder,
        optimizer=AdamW(lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.weight_decay),
        device=p.device,
        compute_dtype=dtype,
        max_grad_norm=o.max_grad_norm,
        clipping=o.clipping,
        speculated=o.speculated,
        slots=p.slots,
        weights_on_device=p.weights,
        states_on_device=p.states,
        compile=config.compute.compile,
        device_memory=p.device_memory,
        host_memory=p.host_memory,
        pinned_memory=p.pinned_memory,
        activations=config.compute.activations,
        boundaries=config.compute.boundaries,
        boundary_every=config.compute.boundary_every,
        order=config.compute.order,
        gradient_dtype=config.compute.gradient_dtype,
        host_gradients=config.placement.gradients,
        seed=config.train.seed,
        attn_implementation=config.model.attn_implementation,
        trust_remote_code=config.model.trust_remote_code,
        progress=progress,
        before_loading=before_loading,
    )


class _Loop:
    """The state of a run between its steps."""

    def __init__(self, prepared: Prepared, run: RunFolder, model: Model, console: Logger, started: float) -> None:
        self._prepared, self._run, self._model, self._console = prepared, run, model, console
        self._schedule, self._batches = prepared.schedule, prepared.batches
        self._loggers: list[Logger] = [console]
        self._totals, self._started, self._earlier = _Totals(), started, 0.0
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._steps_here = 0
        self.step = 0
        self.recorded = RecordedSteps(prepared.config.trace, range(prepared.total_steps))
        self.process = 0
        """Host bytes that are planned for the process beside all state."""

    @contextmanager
    def logging(self) -> Iterator[None]:
        """Opens what is written beside the console, and closes it whatever happens."""
        metrics = JsonlLogger(self._run.metrics, self.step)
        self._loggers = [self._console, metrics]
        try:
            yield
        finally:
            metrics.close()

    def resume(self, save: Path) -> None:
        """Continue after the step that ``save`` holds."""
        changed = check_resume(self._prepared, read_meta(save)["extra"])
        extra = self._model.load_state(save, progress=self._console.progress)
        self.step = extra["step"]
        self.recorded = RecordedSteps(self._prepared.config.trace, range(self.step, self._prepared.total_steps))
        self._schedule = self._schedule.resumed(extra["schedule"], self.step)
        self._totals = _Totals(**extra["totals"])
        self._earlier = self._totals.seconds
        self._console.note(f"resume  {save}, after step {self.step} of {self._prepared.total_steps}")
        if changed:
            self._console.note(f"changed {', '.join(changed)}")

    def save(self) -> Path:
        """Write the training state after the last step; then remove older saves beyond the number kept."""
        path = step_folder(self._run.checkpoints, self.step)
        self._console.progress(f"saving {path}", 0, 0)
        self._totals.seconds = self._wall()
        state = {
            "step": self.step,
            "data": self._batches.state(),
            "schedule": self._schedule.state(),
            "totals": asdict(self._totals),
            "options": flat_options(self._prepared.config),
        }
        self._model.save_state(path, extra=state, progress=self._console.progress)
        prune(self._run.checkpoints, self._prepared.config.checkpoint.keep)
        self._console.note(f"saved   {path}")
        return path

    def run_step(self, step: int) -> None:
        """One optimizer step, reported to every logger."""
        total = self._prepared.total_steps
        for logger in self._loggers:
            logger.progress(f"step {step + 1} of {total}", 0, 0)
        self.recorded.before(self._model, step)
        begun, rate = time.monotonic(), self._schedule.rate(step)
        batch = self._batches.next_step()
        result = self._model.step(batch.micro_batches, lr=rate)
        seconds = time.monotonic() - begun
        self._steps_here += 1
        if self._steps_here > 1:  # the first one also measures and warms up
            self._recent.append(seconds)
        self._totals.add(batch, result.loss, seconds)
        self.step = step + 1
        memory = self._model.memory
        record = StepRecord(
            step=self.step,
            total_steps=total,
            epoch=batch.epoch + 1,
            loss=result.loss,
            lr=rate,
            grad_norm=result.grad_norm,
            skipped=result.skipped,
            target_tokens=batch.target_tokens,
            real_tokens=batch.real_tokens,
            padded_tokens=batch.padded_tokens,
            seconds=seconds,
            device_peak=memory.device_peak,
            host_bytes=memory.host_bytes,
            seconds_left=fmean(self._recent) * (total - self.step) if self._recent else None,
        )
        for logger in self._loggers:
            logger.step(record)
        if self.recorded.ends_with(step):
            self._console.progress("comparing with the prediction", 0, 0)
            self.recorded.finish(self._model)
            self._draw()

    def _draw(self) -> None:
        """Write the trace, where one is asked for. A disk that takes no more is no reason to stop training."""
        prepared = self._prepared
        rows, tokens, micro_batches = prepared.batches.largest
        step = f"{prepared.device} · a step is at most {micro_batches} x {rows} rows x {tokens:,} tokens"
        lines = [
            model_line(prepared.name, self._model.num_parameters, prepared.dtype),
            step,
            "predicted: the same operations and waits, arithmetic as long as it takes by itself, the rest as measured",
        ]
        try:
            files = self.recorded.write(f"{prepared.name}: the time of a step", lines)
        except OSError as error:
            self._console.note(f"trace   not written: {error}")
            return
        if files:
            self._console.note(f"trace   {files[0]}, and {files[1]} for ui.perfetto.dev")

    def finish(self) -> Summary:
        """Export the model and report on the whole run."""
        config, final = self._prepared.config, self._run.final
        self._console.progress(f"writing {final}", 0, 0)
        if final.exists():  # the export of an earlier end of this run
            remove_folder(final)
        self._model.save_pretrained(final, dtype=config.export.dtype, progress=self._console.progress)
        if config.data.chat_template not in (None, "none"):
            # The model was trained with this template, so it is the one to be used with it.
            shutil.copyfile(config.data.chat_template, final / "chat_template.jinja")
        t, ends = self._totals, max(1, min(_ENDS, self.step // 2))
        device_peak, host_peak = peaks(self._model.memory, self._prepared.device, self.process)
        summary = Summary(
            steps=self.step,
            target_tokens=t.target_tokens,
            real_tokens=t.real_tokens,
            padded_tokens=t.padded_tokens,
            seconds=self._wall(),
            step_seconds=t.step_seconds,
            first_loss=fmean(t.first_losses[:ends]),
            last_loss=fmean(t.last_losses[-ends:]),
            parameters=self._model.num_parameters,
            exported=final,
            one_step=self.recorded.one_step,
            device_peak=device_peak,
            host_peak=host_peak,
        )
        for logger in self._loggers:
            logger.summary(summary)
        return summary

    def _wall(self) -> float:
        return self._earlier + time.monotonic() - self._started


def data_figures(data: Dataset) -> DataFigures:
    """The counts of a data set as the console shows them."""
    left_out = (
        (data.dropped_long, f"dropped (longer than {data.max_seq_len})"),
        (data.cut, f"cut at {data.max_seq_len} tokens"),
        (data.dropped_empty, "dropped (nothing to train on within the limit)"),
        (len(data.bad), "skipped (bad, see run.log)"),
    )
    return DataFigures(len(data.rows), data.tokens, data.target_tokens, left_out)


def _describe(prepared: Prepared, model: Model, console: Logger) -> None:
    memory, host = model.memory, machine.probe().memory
    gpu = prepared.device == "cuda"
    budget = memory.device_budget or (torch.cuda.mem_get_info()[1] if gpu else host)
    console.note(model_line(prepared.name, model.num_parameters, prepared.dtype))
    console.note(data_line(data_figures(prepared.data)))
    figures = MemoryFigures(
        device="GPU" if gpu else "device (CPU)",
        device_used=memory.device_peak,
        device_total=budget,
        host_used=memory.host_bytes,
        host_total=parse_bytes("placement.host_memory", prepared.config.placement.host_memory) or host,
        save=prepared.save_bytes,
        disk_free=prepared.disk_free,
    )
    console.note(memory_line(figures))
    for text in prepared.choice.lines:
        console.note(text)
    for line, bad in prepared.data.bad:
        _log.warning("%s line %d skipped: %s", prepared.config.data.train, line, bad.reason)


def _check_memory(prepared: Prepared, model: Model, console: Logger) -> int:
    """Say where the planner's bytes are not those that were allocated. Returns what the process is planned to take of
    the host beside them."""
    device = prepared.device
    inputs = input_bytes(device, len(prepared.tokenizer), prepared.data.rows)
    try:
        spec = load_model_spec(str(prepared.folder))
    except UserError as error:  # of a kind that is trained but not planned
        _log.info("memory was not compared with the plan: %s", error)
        return inputs + least_process_bytes(prepared.config, device)
    planned = planned_memory(spec, prepared.config, device, prepared.dtype, prepared.batches, prepared.gpu_memory)
    wrong = list(mismatches(planned, model.memory))
    if wrong:
        line = f"warning memory is not as planned: {'; '.join(wrong)}"
        console.note(line)
        _log.warning(line)
    return inputs + planned.process


@contextmanager
def _asked_to_stop() -> Iterator[list[int]]:
    """A list that receives the first SIGINT or SIGTERM; the step under way completes. A second one interrupts."""
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> Any:
        if received:
            raise KeyboardInterrupt
        received.append(number)
        _log.info("signal %d: stopping after this step", number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(n, handle) for n in numbers]
    try:
        yield received
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
