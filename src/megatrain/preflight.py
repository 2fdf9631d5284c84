"""Everything before the first weight is read: model files, tokenizer, rows, order, rate, memory and disk.

What a user may have got wrong is found here, in seconds and before anything but caches is written.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatrain import auto, machine
from megatrain._durable import space_for
from megatrain.checked import input_bytes, least_process_bytes, planned_memory
from megatrain.checkpoint import latest_complete, read_meta
from megatrain.choices import Request, micro_batch_counts
from megatrain.config import RunConfig, parse_bytes
from megatrain.costs import device_room
from megatrain.datasets._batches import Batches, mean_padded_tokens, steps_differ
from megatrain.datasets._load import Dataset, Progress, load_dataset
from megatrain.devices import device_name
from megatrain.devices._host import TOTAL_MEMORY
from megatrain.engine._rings import blocks_of, landing_sizes
from megatrain.engine.placement import activation_modes, check_passing, resident_units
from megatrain.engine.program import UnitSpec
from megatrain.errors import UserError
from megatrain.hub import find_model
from megatrain.layout import Layout, build_layout, slab_bytes, store_bytes
from megatrain.loggers._screens import disk_size, size
from megatrain.machines import MachineSpec, this_machine
from megatrain.model_files import ModelFiles
from megatrain.model_spec import load_model_spec
from megatrain.models._skeleton import check_config, read_config, refuse_converted_files
from megatrain.rates import measure_and_keep
from megatrain.schedule import Schedule

STATE_BYTES = 12  # of host memory and of a save, per parameter: FP32 master and two FP32 moments
_ITEM_BYTES = {"float32": 4, "bfloat16": 2}
_EXPORT_BYTES = {"F32": 4, "float32": 4}  # all other formats take 2


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a run is made of. ``device`` is ``cuda`` or ``cpu``, ``dtype`` the compute dtype.

    ``asked`` is the configuration as it was given; ``choice`` has it without any `auto`, as ``chooser`` found it (None:
    nothing was left to choose). Bytes: ``gpu_memory`` that is free of a GPU, ``host_bytes`` of training state in host
    memory, ``host_limit`` of what may be used, ``save_bytes`` of one save, ``disk_free`` where the run is written.
    """

    asked: RunConfig
    chooser: auto.Chooser | None
    choice: auto.Choice
    folder: Path
    tokenizer: Any
    data: Dataset
    batches: Batches
    schedule: Schedule
    total_steps: int
    parameters: int
    device: str
    dtype: str
    gpu_memory: int | None
    host_bytes: int
    host_limit: int
    save_bytes: int
    disk_free: int

    @property
    def config(self) -> RunConfig:
        """The run's options, none of them `auto`."""
        return self.choice.config

    @property
    def name(self) -> str:
        """The model's name without its owner or path."""
        return Path(self.asked.model.name_or_path.rstrip("/")).name

    def after(self, error: UserError) -> Prepared:
        """The run with the next choice after one that the engine refused; raises ``error`` where there is none."""
        chooser = self.chooser
        while chooser := chooser and chooser.after(error):
            try:
                choice = chooser.choose()
            except UserError:
                if chooser.share < 1:  # its ways out would be for the whole device, where something is predicted to fit
                    raise error from None
                raise
            if choice.config != self.config:
                batches = _batches(choice.config, self.tokenizer, self.data)
                return replace(self, chooser=chooser, choice=choice, batches=batches)
        raise error


def prepare(config: RunConfig, progress: Progress) -> Prepared:
    """Find, read and check everything that ``config`` names. Raises :class:`UserError`; writes caches alone."""
    if config.placement.gradients == "passing":
        check_passing(config.optim.max_grad_norm, config.optim.clipping)
    asked, config = config, auto.with_options(config, _saved_choice(config))  # empty, or every choice of that run
    m = config.model
    folder = find_model(m.name_or_path, m.revision, m.trust_remote_code, progress)
    model_config = read_config(folder, m.trust_remote_code)
    check_config(model_config, m.attn_implementation)
    refuse_converted_files(model_config)
    files = ModelFiles(folder)
    layouts = _layouts(files, model_config)
    parameters = sum(layout.num_parameters for layout in layouts.values())
    device, dtype = _device_and_dtype(config)
    limit = _host_limit(config)
    on_host = _host_bytes(config, layouts, dtype)
    if config.placement.states is None or device == "cpu":
        _check_host(config, least_process_bytes(config, device), on_host, limit)
    tokenizer = read_tokenizer(folder, m.trust_remote_code)
    text = model_config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    data = load_dataset(config.data, tokenizer, vocab_size=text.vocab_size, positions=positions, progress=progress)
    progress("planning", 0, 0)
    left = limit - least_process_bytes(config, device) - input_bytes(device, len(tokenizer), data.rows) - on_host
    chooser, choice = _choose(asked, config, folder, data, device, dtype, left, progress)
    config = choice.config
    batches = _batches(config, tokenizer, data)
    boundaries = _boundary_bytes(config, batches, text, dtype)
    host_bytes = _host_bytes(config, layouts, dtype, boundaries)
    gpus = machine.probe().gpus if device == "cuda" else ()
    gpu_memory = gpus[0].memory_free if gpus else None
    _check_host(config, _process_bytes(config, folder, batches, device, dtype, gpu_memory), host_bytes, limit)
    total = config.train.max_steps or config.train.epochs * batches.steps_per_epoch
    _check_trace(config, total)
    schedule = Schedule.from_config(config.schedule, config.optim.lr, total)
    saves = config.checkpoint.keep + 1 if 0 < config.checkpoint.every < total else 1
    saves = max(1, saves - _complete_saves(config))
    export = sum(math.prod(files.shape(n)) for n in files.names)
    export *= _EXPORT_BYTES.get(config.export.dtype or files.dtype_name, 2)
    disk_free = machine.disk_free(config.output_dir)
    needed = saves * space_for(parameters * STATE_BYTES) + space_for(export)
    _check_disk(config, needed, saves, disk_free)
    return Prepared(
        asked=asked,
        chooser=chooser,
        choice=choice,
        folder=folder,
        tokenizer=tokenizer,
        data=data,
        batches=batches,
        schedule=schedule,
        total_steps=total,
        parameters=parameters,
        device=device,
        dtype=dtype,
        gpu_memory=gpu_memory,
        host_bytes=host_bytes,
        host_limit=limit,
        save_bytes=parameters * STATE_BYTES,
        disk_free=disk_free,
    )


def _saved_choice(config: RunConfig) -> dict[str, Any]:
    """What was chosen for the run that this one goes on with; empty for a new run."""
    saves = Path(config.output_dir, "checkpoints")
    resume = config.checkpoint.resume
    save = None if resume == "no" else latest_complete(saves)[0] if resume == "auto" else Path(resume)
    options = {} if save is None else read_meta(save)["extra"].get("options", {})
    return {name: value for name, value in options.items() if name in auto.OPTIONS}


def _choose(
    asked: RunConfig,
    config: RunConfig,
    folder: Path,
    data: Dataset,
    device: str,
    dtype: str,
    host_left: int,
    progress: Progress,
) -> tuple[auto.Chooser | None, auto.Choice]:
    """The options without `auto`, and who chose them. ``config`` is ``asked`` with what a save has of the choice;
    ``host_left``: bytes beside all state on the host."""
    if not auto.is_open(asked):
        return None, auto.Choice(config=asked)
    saved = None
    if not auto.is_open(config):
        saved, config = config, asked
    probed, known = machine.probe(), "this model"
    try:
        spec = load_model_spec(str(folder))
        known = "this machine"
        where = _rated(probed, device, progress)
    except UserError as error:  # trainable, but not known to the planner
        instead = "the same as everywhere" if saved is None else "as it was saved"
        why = f"plan    not for {known}, so {instead}: {str(error).splitlines()[0]}"
        return None, auto.Choice(config=saved or auto.with_options(config, auto.OPTIONS), lines=(why,))
    if where.unified:
        where = replace(where, gpu_memory=device_room(host_left))
    request = _request(config, data, device, dtype, probed)
    chooser = auto.Chooser(config=config, model=spec, machine=where, request=request, saved=saved)
    return chooser, chooser.choose()


def _rated(probed: machine.Machine, device: str, progress: Progress) -> MachineSpec:
    """This machine with its rates; those of a GPU that nobody has measured are measured now, once."""
    if device == "cuda" and not probed.gpus:
        raise UserError(f"rates not measured: {probed.gpu_problem}")
    try:
        return this_machine(probed, device)
    except UserError:
        measure_and_keep(probed, device, None, lambda what: progress(f"{what}, once", 0, 0))
        return this_machine(probed, device)


def _request(config: RunConfig, data: Dataset, device: str, dtype: str, probed: machine.Machine) -> Request:
    """The largest and the usual step of a run, and its limits."""
    lengths = [len(row) for row in data.rows]
    rows = min(config.train.batch_size, len(lengths))
    sizes = {-(-rows // count) for count in micro_batch_counts(rows)}
    sizes.add(min(rows, auto.fixed_options(config).get("train.micro_batch_size", rows)))
    budget = parse_bytes("placement.device_memory", config.placement.device_memory)
    return auto.request_of(
        config,
        rows=rows,
        seq_len=max(lengths),
        clipping=_clipping(config),
        compute_dtype=dtype,
        compiled=auto.compiles(config, device),
        steps_differ=steps_differ(data.rows, rows),
        loss_memory=budget or (probed.gpus[0].memory if device == "cuda" and probed.gpus else TOTAL_MEMORY),
        mean_tokens={size: mean_padded_tokens(lengths, rows, size) for size in sizes},
    )


def _clipping(config: RunConfig) -> str:
    """The mode to plan for: with ``auto`` and a limit, figures that hold whether steps are clipped or not."""
    if config.optim.clipping != "auto":
        return config.optim.clipping
    return "deferred" if config.optim.max_grad_norm else "speculative"


def _layouts(files: ModelFiles, model_config: Any) -> dict[str, Layout]:
    """The parts that stream, in network order, by the headers of the weight files; a tied head is counted once."""
    tied = model_config.get_text_config().tie_word_embeddings
    units: dict[str, dict[str, tuple[int, ...]]] = {}
    for name in files.names:
        layer = re.search(r"layers\.(\d+)\.", name)
        part = f"layers.{layer[1]}" if layer else "embedding" if "embed" in name else "head"
        if not (tied and name == "lm_head.weight"):
            units.setdefault(part, {})[name] = files.shape(name)
    place = {"embedding": -1, "head": len(units)}
    names = sorted(units, key=lambda part: place.get(part) or int(part.rpartition(".")[2]))
    return {name: build_layout(units[name]) for name in names}


def _host_bytes(config: RunConfig, layouts: dict[str, Layout], dtype: str, boundaries: int = 0) -> int:
    """Host memory of the training state that is not on the device, and of ``boundaries``."""
    compute, gradient = _ITEM_BYTES[dtype], _ITEM_BYTES[config.compute.gradient_dtype or dtype]
    sizes = {name: slab_bytes(layout.numel, compute, gradient) for name, layout in layouts.items()}
    states = None if config.placement.states == "auto" else config.placement.states
    away = resident_units("placement.states", states, sizes)
    landings = None
    if config.placement.gradients == "passing":
        landings = landing_sizes([UnitSpec(n, at.numel, state_resident=n in away) for n, at in layouts.items()])
    on_host = (layouts[n].numel for n in sizes if n not in away)
    return store_bytes(on_host, compute, gradient, boundaries, landings)


def _device_and_dtype(config: RunConfig) -> tuple[str, str]:
    device = device_name(config.placement.device)
    return device, config.compute.dtype or ("bfloat16" if device == "cuda" else "float32")


def _host_limit(config: RunConfig) -> int:
    asked = parse_bytes("placement.host_memory", config.placement.host_memory)
    return machine.probe().memory_free if asked is None else asked


def _process_bytes(
    config: RunConfig, folder: Path, batches: Batches, device: str, dtype: str, gpu_memory: int | None
) -> int:
    """Host bytes of the process beside training state, with those of the compiler where the planner knows the model."""
    try:
        return planned_memory(load_model_spec(str(folder)), config, device, dtype, batches, gpu_memory).process
    except UserError:
        return least_process_bytes(config, device)


def _check_host(config: RunConfig, process: int, need: int, limit: int) -> None:
    if need + process > limit:
        way_out = "a machine or container with more memory, or a smaller model"
        if config.placement.host_memory is not None and need + process <= machine.probe().memory_free:
            mebibytes = -(-(need + process) >> 20)
            way_out = f"raise placement.host_memory to {mebibytes}MiB or more, or leave it out"
        raise UserError(
            f"placement.host_memory: the training state needs {size(need)} and the process {size(process)}\n"
            f"  found: {size(limit)}, {size(need + process - limit)} too little\n"
            f"  fix:   {way_out}"
        )


def _boundary_bytes(config: RunConfig, batches: Batches, text: Any, dtype: str) -> int:
    """Host memory for the inputs of layers in the largest step. A layer that keeps activations has its own on the
    device; the few others that never leave it are counted too."""
    if config.compute.boundaries == "device":
        return 0
    rows, tokens, micro_batches = batches.largest
    names = [f"layers.{index}" for index in range(text.num_hidden_layers)]
    modes = activation_modes(config.compute.activations, names)
    layers = [UnitSpec(name, 0, keeps=name in modes) for name in names]
    blocks = blocks_of(layers, int(config.compute.boundary_every))
    away = sum(not block[0].keeps for block in blocks)
    together = 1 if config.compute.order == "micro_batch" else micro_batches
    return int(away * together * rows * tokens * text.hidden_size * _ITEM_BYTES[dtype])


def _complete_saves(config: RunConfig) -> int:
    """Saves that a resumed run finds; they have their room already."""
    if config.checkpoint.resume == "no":
        return 0
    return len(list(Path(config.output_dir, "checkpoints").glob("step-*/state.json")))


def _check_disk(config: RunConfig, needed: int, saves: int, free: int) -> None:
    if needed > free:
        raise UserError(
            f"output_dir: {config.output_dir}: the disk is too full\n"
            f"  needed: {disk_size(needed)} ({saves} saves of the training state and the exported model)\n"
            f"  found:  {disk_size(free)} free\n"
            "  fix:    free space, name a folder on another disk, or lower checkpoint.keep"
        )


def _check_trace(config: RunConfig, total_steps: int) -> None:
    """Raise `UserError` when the trace could not be written, or there will be too few steps for it."""
    if config.trace.path is None:
        return
    file = Path(config.trace.path)
    folder = file.parent.absolute()
    if file.suffix != ".html":
        raise UserError(
            f"trace.path: {file}: not the name of an HTML page\n"
            f"  fix:   trace.path={file.with_suffix('.html')}; the trace for Perfetto is written beside it, as .json"
        )
    if folder != Path(config.output_dir).absolute() and not folder.is_dir():
        raise UserError(f"trace.path: {file}: there is no folder {folder}\n  fix:   make it, or name one that exists")
    for written in (file, file.with_suffix(".json")):
        if written.is_dir() or (folder.is_dir() and not os.access(written if written.exists() else folder, os.W_OK)):
            raise UserError(f"trace.path: {written} cannot be written\n  fix:   name another file or folder")
    if total_steps <= config.trace.steps:
        raise UserError(
            f"trace.steps: {config.trace.steps}, but a run of {total_steps} steps has {total_steps - 1} steady ones:"
            " all but the first\n  fix:   lower it, train for more steps, or leave trace.path out"
        )


def read_tokenizer(folder: Path, trust_remote_code: bool) -> Any:
    """The tokenizer of ``folder``. Raises :class:`UserError` naming its files."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as e:  # the tokenizers library raises nothing narrower
        raise UserError(
            f"model.name_or_path: {folder}: the tokenizer cannot be read: {' '.join(str(e).split())[:200]}\n"
            "  fix:   fetch the model's tokenizer files again (tokenizer.json, tokenizer_config.json,\n"
            "         special_tokens_map.json)"
        ) from None


def _batches(config: RunConfig, tokenizer: Any, data: Dataset) -> Batches:
    pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    return Batches(
        data.rows,
        batch_size=config.train.batch_size,
        micro_batch_size=int(config.train.micro_batch_size),
        seed=config.train.seed,
        shuffle=config.data.shuffle,
        pad_id=pad,
        fingerprint=data.fingerprint,
    )
