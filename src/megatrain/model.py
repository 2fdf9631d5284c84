"""The public model: training, scoring, saving. The command line uses nothing else."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import isfinite
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Self

import torch
from transformers import PreTrainedConfig

from megatrain.assembly import Settings, assemble
from megatrain.checkpoint import load_state, save_state
from megatrain.checks import number, whole
from megatrain.devices import Device, Ticket, open_device
from megatrain.engine.batches import HostBatch, check_batch, check_batches
from megatrain.engine.clipping import Clipping
from megatrain.engine.operations import Run
from megatrain.engine.placement import Placement
from megatrain.engine.simulate import Timeline
from megatrain.engine.template import unit_seed
from megatrain.engine.trace import Trace
from megatrain.engine.workspace import Shape
from megatrain.errors import LaneError, UserError
from megatrain.export import ExportTensor, check_export, write_model
from megatrain.lifecycle import Lifecycle
from megatrain.model_files import ModelFiles
from megatrain.models._skeleton import read_config, refuse_converted_files
from megatrain.optimizers import Optimizer
from megatrain.optimizers.adamw import AdamW
from megatrain.results import EvalResult, MemoryReport, StepResult
from megatrain.store import Store

_log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
MicroBatch = Mapping[str, torch.Tensor]

MAX_SKIPPED = 3
"""Steps in a row with a non-finite gradient after which training stops."""


class Model:
    """A Hugging Face decoder whose training state lives in host memory; see `from_pretrained` and `from_config`."""

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        optimizer: Optimizer | None = None,
        device: str | Device = "auto",
        compute_dtype: str | None = None,
        max_grad_norm: float | None = 1.0,
        clipping: str = "auto",
        speculated: Placement = 1.0,
        slots: int = 2,
        device_memory: str | int | None = None,
        host_memory: str | int | None = None,
        pinned_memory: str | int | None = None,
        activations: str | Sequence[str] = "recompute",
        boundaries: str = "device",
        boundary_every: int = 1,
        order: str = "layer",
        gradient_dtype: str | None = None,
        host_gradients: str = "kept",
        seed: int = 0,
        attn_implementation: str = "sdpa",
        trust_remote_code: bool = False,
        loss_chunk_tokens: int | None = None,
        compile: bool | None = None,
        weights_on_device: Placement = None,
        states_on_device: Placement = None,
        kernel: str = "auto",
    ) -> None:
        """Allocate a model whose weights are not set yet; use a classmethod instead.

        ``compute_dtype`` is the dtype of weights on the device and of activations, ``"float32"`` or ``"bfloat16"``
        (default: bfloat16 on CUDA, float32 elsewhere); masters and moments are FP32 always. ``clipping`` is
        ``"deferred"`` (updates wait for the gradient norm), ``"speculative"`` (they do not, and are corrected where the
        norm exceeds ``max_grad_norm``; see `Kernel.adamw_resolve` for how closely) or ``"auto"``: speculative while at
        most 2 of the last 16 steps were clipped, or without a limit. ``speculated`` says which units a speculative step
        updates early: bytes or a share from the end of the network, whose gradients come first, or names. Where updates
        take longer than backward, a part is faster: the next forward then starts while the other units, which it needs
        later, are updated. ``slots`` is the number of layers that the device holds at a time. ``device_memory`` and
        ``host_memory`` are limits such as ``"400MiB"``; what does not fit raises `UserError` before anything runs.
        ``pinned_memory`` limits what of the host memory the device copies by itself; the rest is copied through buffers
        of it. ``activations`` is ``"recompute"``, ``"selective"`` (the output of attention is kept), ``"keep"``, a
        share of the layers to keep (``"30%"``, the last ones), ``"keep 20%, selective 50%"``, or their names.
        ``boundaries="host"`` moves the inputs of layers to host memory until backward; ``boundary_every=k`` keeps only
        every k-th, and computes the others again; ``order="micro_batch"`` takes a micro-batch through the whole model
        before the next one, for which all weights must be on the device. ``gradient_dtype`` is what gradients leave the
        device in, by default the compute dtype. ``host_gradients="passing"`` updates each unit as its gradient lands in
        one of a few host buffers, which takes 12 bytes of host memory a parameter instead of 14: without clipping only,
        and when a later unit's gradient is not finite the model is half updated and must be loaded again. ``seed`` is
        the seed of dropout. ``loss_chunk_tokens`` bounds the tokens whose logits exist at once. ``compile`` compiles
        the layers with torch.compile (default: on CUDA); results then differ in rounding. ``weights_on_device`` and
        ``states_on_device`` keep weights, or all training state, of some units on the device: bytes, a share, or names
        of units (``"embedding"``, ``"layers.0"`` ..., ``"head"``); an update on a GPU equals the host's to rounding.
        """
        whole("seed", seed, 0)
        self._optimizer = AdamW() if optimizer is None else optimizer
        if not isinstance(self._optimizer, Optimizer):
            raise UserError(f"optimizer: {optimizer!r} is not an optimizer of MegaTrain's; give AdamW(lr=...)")
        if not isinstance(device, (str, Device)):
            raise UserError(f"placement.device: {device!r} is unknown; choose auto, cuda, cpu or sim")
        self.config, self._seed = config, seed
        self._clipping = Clipping(clipping, max_grad_norm, self._optimizer, passing=host_gradients == "passing")
        self._source: ModelFiles | None = None
        self._gradients_kept = False
        self._step = self._skipped_in_a_row = 0
        self._device = open_device(device) if isinstance(device, str) else device
        self._life = Lifecycle(self._device)
        parts = assemble(
            config,
            self._device,
            self._optimizer,
            Settings(
                compute_dtype=compute_dtype,
                gradient_dtype=gradient_dtype,
                host_gradients=host_gradients,
                slots=slots,
                device_memory=device_memory,
                host_memory=host_memory,
                pinned_memory=pinned_memory,
                activations=activations,
                speculated=speculated,
                boundaries=boundaries,
                boundary_every=boundary_every,
                order=order,
                weights_on_device=weights_on_device,
                states_on_device=states_on_device,
                loss_chunk_tokens=loss_chunk_tokens,
                attn_implementation=attn_implementation,
                trust_remote_code=trust_remote_code,
                compile=compile,
                kernel=kernel,
            ),
        )
        self._decoder, self._store, self._engine = parts.decoder, parts.store, parts.engine

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        progress: Progress | None = None,
        before_loading: Callable[[Self], None] | None = None,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> Self:
        """Load a Hugging Face checkpoint folder (safetensors), each tensor straight into its place.

        ``progress(phase, done, total)`` is called with bytes; ``before_loading`` with the model while it has no weights
        yet, to `reserve` a step before minutes of reading. Other options are those of the constructor. Raises
        `UserError` when files are missing, damaged or do not fit the model.
        """
        folder = _path("model.name_or_path", path)
        if progress is not None and not callable(progress):
            raise UserError(f"progress: {progress!r} cannot be called; give a function of (phase, done, total)")
        files = ModelFiles(folder)
        config = read_config(folder, trust_remote_code)
        refuse_converted_files(config)
        model = cls(config, trust_remote_code=trust_remote_code, **options)
        try:
            if before_loading is not None:
                before_loading(model)
            model._load(files, progress)
        except BaseException:
            model.close()
            raise
        model._source = files
        return model

    @classmethod
    def from_config(cls, config: PreTrainedConfig, *, seed: int = 0, **options: Any) -> Self:
        """A model with fresh random weights, drawn unit by unit as transformers initialises this family."""
        if not isinstance(config, PreTrainedConfig):
            raise UserError(
                f"config: {type(config).__name__}; give a config object of transformers, as of LlamaConfig(...)"
            )
        model = cls(config, seed=seed, **options)
        for index, unit in enumerate(model._decoder.units):
            for local, values in model._decoder.initial_weights(unit, unit_seed(seed, 0, -1, index)).items():
                name = next(p.name for p in unit.layout.parameters if p.local == local)
                model._store.load_master(name, 0, values.flatten())
        return model

    def step(
        self, micro_batches: Sequence[MicroBatch], lr: float | None = None, keep_gradients: bool = False
    ) -> StepResult:
        """One optimizer step over the sum of the micro-batches' losses, divided by their target tokens.

        A micro-batch is a dict of integer tensors ``[batch, tokens]``: ``input_ids``, ``labels`` (unshifted, -100
        ignored), and optionally ``position_ids`` and ``attention_mask``. ``lr`` overrides the optimizer's.
        Returns when the results are known; updates may still run, and everything that needs them waits for them.
        Ctrl-C lets the step finish first; a second one drops it, and the model must be reloaded.
        """
        batches = self._checked(micro_batches)
        rate = self._optimizer.base_lr if lr is None else number("lr", lr, "a finite number >= 0", least=0)
        run = Run(
            batches=batches,
            training=True,
            step=self._step,
            seed=self._seed,
            lr=rate,
            max_grad_norm=self._clipping.max_norm,
            speculative=self._clipping.speculates(rate),
        )
        if keep_gradients and self._clipping.passing:
            raise UserError("keep_gradients: gradients only pass through host memory; use host_gradients='kept'")
        if run.tokens == 0:
            raise UserError("micro_batches: no label is a target (all are -100), so there is nothing to train on")
        self._gradients_kept = False

        def submit() -> Ticket:
            ticket = self._engine.train(run)
            self._step += 1  # whatever happens now, the step is completed or the model is broken
            return ticket

        def finish() -> None:
            self._engine.count(run)
            norm = run.result[-2].item()
            self._clipping.note(norm)
            if self._clipping.passing and not isfinite(norm):
                self._refuse_half_a_step(run)

        self._life.complete(submit, self._engine.wait, finish)
        *losses, norm, factor = run.result.tolist()
        self._gradients_kept = keep_gradients
        skipped = not isfinite(norm)
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if self._skipped_in_a_row >= MAX_SKIPPED:
            raise UserError(
                f"training: {MAX_SKIPPED} steps in a row had a non-finite gradient (loss {sum(losses) / run.tokens});"
                " nothing was updated in them. Lower optim.lr, look at the data of these steps, or load an earlier"
                " checkpoint"
            )
        return StepResult(
            loss=sum(losses) / run.tokens,
            grad_norm=norm,
            tokens=run.tokens,
            skipped=skipped,
            corrected=run.speculative and factor != 1,
        )

    def _refuse_half_a_step(self, run: Run) -> None:
        """Raise when units were updated before a gradient came that is not finite."""
        self._device.drain()
        if run.applied:
            self._life.abandon(f"step {run.step} had a non-finite gradient after {run.applied} units were updated")
            raise UserError(
                f"training: step {run.step} (counted from 0) had a non-finite gradient in a unit whose {run.applied}"
                " followers were updated already, as placement.gradients=passing does. Load the last checkpoint; lower"
                " optim.lr, look at the data of this step, or use placement.gradients=kept"
            )

    def gradients(self) -> dict[str, torch.Tensor]:
        """Gradients of the last step (which had ``keep_gradients=True``) by Hugging Face name.

        FP32 copies, before clipping, divided by the step's target tokens.
        """
        self._life.check()
        if not self._gradients_kept:
            raise UserError("gradients(): the last step was not called with keep_gradients=True")
        return {
            p.name: self._store.gradient(unit)[p.offset : p.end].float().cpu().view(p.shape).clone()
            for unit in self._store.units
            for p in self._store.layout(unit).parameters
        }

    def state_dict(self) -> dict[str, torch.Tensor]:
        """FP32 copies of all masters by Hugging Face name; a tied head is listed once, under the embedding's name."""
        self._life.settle()
        return {name: self._store.master(name) for name in self._store.parameter_names}

    def evaluate(self, batches: Sequence[MicroBatch]) -> EvalResult:
        """Loss over all target tokens of the batches; the same number however the rows are batched."""
        total, tokens = 0.0, 0
        for index, batch in enumerate(batches):
            scores = self._score(batch, f"batches[{index}]")[1]
            total -= scores.double().sum().item()
            tokens += scores.numel()
        if tokens == 0:
            raise UserError("evaluate: no label is a target (all are -100), so there is nothing to evaluate")
        return EvalResult(loss=total / tokens, tokens=tokens)

    def logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """FP32 log-probability of each label given the tokens before it, ``[batch, tokens]``; 0 where ignored."""
        checked, scores = self._score(batch, "batch")
        result = torch.zeros(checked.input_ids.numel())
        result[checked.source] = scores
        return result.view(checked.input_ids.shape)

    def reserve(self, rows: int, tokens: int, micro_batches: int, packed: bool = False) -> None:
        """Raise `UserError` unless a step of ``micro_batches`` times ``[rows, tokens]`` fits; changes nothing else."""
        self._life.check()
        rows, tokens = whole("rows", rows, 1), whole("tokens", tokens, 1)
        micro_batches = whole("micro_batches", micro_batches, 1)
        with self._life.all_or_broken():
            self._engine.admit([Shape(rows, tokens, packed)] * micro_batches, training=True)

    def compute_bound(self, rows: int, tokens: int, micro_batches: int = 1) -> float:
        """Seconds that the arithmetic of such a step takes by itself, measured now; what overlap is judged against."""
        self._life.settle()
        self._gradients_kept = False
        return self._engine.compute_bound(Shape(rows, tokens, packed=False), micro_batches)

    @contextmanager
    def trace(self) -> Iterator[Trace]:
        """Record when each operation of the steps inside starts and ends; read from the trace when the block is over.

        Recording waits for nothing; the end of the block waits for the last updates. At least two steps are needed for
        a steady one.
        """
        self._life.check()
        if self._engine.trace is not None:
            raise UserError("trace(): the steps are being recorded already; end that trace first")
        trace = self._engine.trace = Trace(self._device)
        try:
            yield trace
        finally:
            self._engine.trace = None
        self._life.settle()
        trace.read()

    def predict(self, trace: Trace) -> Timeline:
        """The last step of a trace as a simulation of its own operations and waits gives it.

        Arithmetic takes the time that it takes by itself, measured now; copies and updates take the median time of
        their kind in the trace. Raises `UserError` when the trace holds fewer than two steps.
        """
        if not trace.steps:
            number = len(trace.micro_batches)
            recorded = f"{number} step{'s were' if number != 1 else ' was'} recorded"
            raise UserError(f"predict: {recorded}; a steady one needs at least two")
        self._life.settle()
        self._gradients_kept = False
        return self._engine.predict(trace)

    @property
    def store(self) -> Store:
        """Masters and moments on the host, by parameter name; call nothing on it while a step runs."""
        return self._store

    @property
    def memory(self) -> MemoryReport:
        """What is in use, and the peak that the steps so far have needed."""
        memory = self._engine.memory
        return MemoryReport(
            device_budget=memory.budget,
            device_peak=memory.peak,
            device_measured=self._device.measured_peak,
            host_bytes=self._store.nbytes,
            by_label=dict(memory.fixed),
            host_by_label=self._store.by_label,
        )

    @property
    def max_grad_norm(self) -> float | None:
        """The limit of the global gradient norm; may be changed between steps."""
        return self._clipping.max_norm

    @max_grad_norm.setter
    def max_grad_norm(self, limit: float | None) -> None:
        self._clipping.limit(limit)

    @property
    def num_parameters(self) -> int:
        """Trained parameters; a tied matrix counts once."""
        return sum(unit.layout.num_parameters for unit in self._decoder.units)

    def save_pretrained(self, path: str | Path, dtype: str | None = None, progress: Progress | None = None) -> None:
        """Write a Hugging Face checkpoint: the source's own files and config, the trained weights.

        ``dtype`` is ``"float32"``, ``"bfloat16"``, ``"float16"`` or ``None`` for the source's. The folder appears
        when it is complete.
        """
        self._life.settle()
        refuse_converted_files(self.config)
        places = {name: self._store.place(name)[1] for name in self._store.parameter_names}
        write_model(
            path,
            [ExportTensor(name, at.shape, partial(self._store.master_blocks, name)) for name, at in places.items()],
            dtype=dtype,
            source=self._source,
            config=self.config,
            tied=self._tied,
            progress=progress,
        )

    def check_save(self, path: str | Path, dtype: str | None = None) -> None:
        """A trial of `save_pretrained` without the weights: raises now what would be found after hours of training."""
        self._life.check()
        refuse_converted_files(self.config)
        shapes = {name: self._store.place(name)[1].shape for name in self._store.parameter_names}
        check_export(path, shapes, dtype=dtype, source=self._source, config=self.config, tied=self._tied)

    def save_state(
        self, path: str | Path, extra: dict[str, Any] | None = None, progress: Progress | None = None
    ) -> None:
        """Write everything that training needs to go on bitwise: masters, moments, counters and ``extra`` (JSON)."""
        self._life.settle()
        path = _path("path", path)
        try:
            json.dumps(extra)
        except (TypeError, ValueError) as error:
            raise UserError(f"extra: it holds what JSON cannot: {error}") from error
        meta = {"step": self._step, "seed": self._seed, "norms": self._clipping.history, "extra": extra or {}}
        save_state(path, self._store, meta, progress)

    def load_state(self, path: str | Path, progress: Progress | None = None) -> dict[str, Any]:
        """Restore what `save_state` wrote, in place; returns its ``extra``."""
        self._life.settle()
        meta = load_state(path, self._store, progress)
        self._step, self._seed = int(meta["step"]), int(meta["seed"])
        self._clipping.history = meta["norms"]
        self._skipped_in_a_row, self._gradients_kept = 0, False
        self._engine.forget_weights()
        extra: dict[str, Any] = meta["extra"]
        return extra

    def close(self) -> None:
        """End threads and free pinned memory. Idempotent; a model that is closed refuses everything else."""
        if self._life.closed:
            return
        self._life.closed = True
        try:
            if not self._life.broken:
                self._device.drain()
        except LaneError as error:
            _log.warning("closing after a failure: %s", error)
        finally:
            self._device.close()
            self._engine.close()
            self._store.close()

    def __enter__(self) -> Self:
        self._life.check()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _load(self, files: ModelFiles, progress: Progress | None) -> None:
        expected = {name: self._store.place(name)[1].shape for name in self._store.parameter_names}
        files.check(expected, self._tied, self._decoder.ignored_names)
        done, total = 0, sum(self._store.place(name)[1].numel for name in expected)
        for name in expected:
            for start, block in files.read_blocks(name):
                if not bool(block.isfinite().all()):
                    raise UserError(
                        f"model: {files.folder}: {name} holds NaN or infinite values, so nothing can be trained from"
                        " it; take an earlier checkpoint, or download the files again"
                    )
                self._store.load_master(name, start, block)
                done += block.numel()
                if progress is not None:
                    progress("loading", done * 4, total * 4)

    def _score(self, batch: MicroBatch, name: str) -> tuple[HostBatch, torch.Tensor]:
        self._life.check()
        run = Run(batches=[check_batch(batch, name, self._vocab_size)], training=False)
        self._life.complete(lambda: self._engine.score(run), self._engine.wait)
        return run.batches[0], run.scores[0]

    def _checked(self, micro_batches: Sequence[MicroBatch]) -> list[HostBatch]:
        self._life.check()
        return check_batches(micro_batches, self._vocab_size)

    @property
    def _tied(self) -> dict[str, str]:
        """Alias -> owner of tied parameters."""
        return {alias: owner for unit in self._decoder.units for alias, _, owner in unit.aliases}

    @property
    def _vocab_size(self) -> int:
        return int(self.config.get_text_config().vocab_size)


def _path(field: str, value: str | PathLike[str]) -> Path:
    if not isinstance(value, (str, PathLike)):
        raise UserError(f"{field}: {value!r} is not a path")
    return Path(fspath(value)).expanduser()
