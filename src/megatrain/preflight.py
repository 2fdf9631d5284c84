"""Everything before the first weight is read: model files, tokenizer, rows, order, rate, memory and disk.

What a user may have got wrong is found here, in seconds and before anything is written.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatrain import machine
from megatrain._durable import space_for
from megatrain.config import RunConfig, parse_bytes
from megatrain.datasets._batches import Batches
from megatrain.datasets._load import Dataset, Progress, load_dataset
from megatrain.errors import UserError
from megatrain.hub import find_model
from megatrain.layout import Layout, build_layout
from megatrain.loggers._screens import disk_size, size
from megatrain.model_files import ModelFiles
from megatrain.schedule import Schedule
from megatrain.store import Store

STATE_BYTES = 12  # of host memory and of a save, per parameter: FP32 master and two FP32 moments
_TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_EXPORT_BYTES = {"F32": 4, "float32": 4}  # all other formats take 2
_PROCESS_BYTES = 600 << 20  # interpreter, torch, tokenizer and rows


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a run is made of. ``device`` is ``cuda`` or ``cpu``, ``dtype`` the compute dtype.

    Bytes: ``host_bytes`` of training state in host memory, ``host_limit`` of what may be used, ``save_bytes`` of one
    save, ``disk_free`` where the run is written.
    """

    config: RunConfig
    folder: Path
    tokenizer: Any
    data: Dataset
    batches: Batches
    schedule: Schedule
    total_steps: int
    parameters: int
    device: str
    dtype: str
    host_bytes: int
    host_limit: int
    save_bytes: int
    disk_free: int

    @property
    def name(self) -> str:
        """The model's name without its owner or path."""
        return Path(self.config.model.name_or_path.rstrip("/")).name


def prepare(config: RunConfig, progress: Progress) -> Prepared:
    """Find, read and check everything that ``config`` names. Raises :class:`UserError`; writes nothing."""
    m = config.model
    folder = find_model(m.name_or_path, m.revision, m.trust_remote_code, progress)
    model_config = read_model_config(folder, m.trust_remote_code)
    files = ModelFiles(folder)
    layouts = _layouts(files, model_config)
    parameters = sum(layout.num_parameters for layout in layouts)
    device, dtype = _device_and_dtype(config)
    gradient = config.compute.gradient_dtype or dtype
    host_bytes = Store.bytes_needed(layouts, _TORCH[dtype], _TORCH[gradient])
    limit = _host_limit(config)
    if config.placement.states is None:  # else the engine says what is left for the host
        _check_host(config, host_bytes, limit)
    tokenizer = read_tokenizer(folder, m.trust_remote_code)
    text = model_config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    data = load_dataset(config.data, tokenizer, vocab_size=text.vocab_size, positions=positions, progress=progress)
    batches = _batches(config, tokenizer, data)
    boundaries = _boundary_bytes(config, batches, text, dtype)
    if boundaries:
        host_bytes = Store.bytes_needed(layouts, _TORCH[dtype], _TORCH[gradient], boundaries)
        if config.placement.states is None:
            _check_host(config, host_bytes, limit)
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
        config=config,
        folder=folder,
        tokenizer=tokenizer,
        data=data,
        batches=batches,
        schedule=schedule,
        total_steps=total,
        parameters=parameters,
        device=device,
        dtype=dtype,
        host_bytes=host_bytes,
        host_limit=limit,
        save_bytes=parameters * STATE_BYTES,
        disk_free=disk_free,
    )


def read_model_config(folder: Path, trust_remote_code: bool) -> Any:
    """The transformers config of ``folder``. Raises :class:`UserError` naming ``config.json`` and the field."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except (ValueError, KeyError, OSError, TypeError, AttributeError, StrictDataclassError) as e:
        raise UserError(
            f"model.name_or_path: {folder / 'config.json'}: {' '.join(str(e).split())[:200]}\n"
            "  fix:   give a model that this version of transformers knows, or correct config.json"
        ) from None


def _layouts(files: ModelFiles, model_config: Any) -> list[Layout]:
    """The parts that stream, by the headers of the weight files; a tied head is counted once."""
    tied = model_config.get_text_config().tie_word_embeddings
    units: dict[str, dict[str, tuple[int, ...]]] = {}
    for name in files.names:
        layer = re.search(r"layers\.\d+\.", name)
        part = layer[0] if layer else "embedding" if "embed" in name else "head"
        if not (tied and name == "lm_head.weight"):
            units.setdefault(part, {})[name] = files.shape(name)
    return [build_layout(shapes) for shapes in units.values()]


def _device_and_dtype(config: RunConfig) -> tuple[str, str]:
    device = config.placement.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return device, config.compute.dtype or ("bfloat16" if device == "cuda" else "float32")


def _host_limit(config: RunConfig) -> int:
    asked = parse_bytes("placement.host_memory", config.placement.host_memory)
    return machine.probe().memory_free if asked is None else asked


def _check_host(config: RunConfig, need: int, limit: int) -> None:
    if need + _PROCESS_BYTES > limit:
        way_out = "a machine or container with more memory, or a smaller model"
        if config.placement.host_memory is not None and need + _PROCESS_BYTES <= machine.probe().memory_free:
            mebibytes = -(-(need + _PROCESS_BYTES) >> 20)
            way_out = f"raise placement.host_memory to {mebibytes}MiB or more, or leave it out"
        raise UserError(
            f"placement.host_memory: the training state needs {size(need)} and the process {size(_PROCESS_BYTES)}\n"
            f"  found: {size(limit)}, {size(need + _PROCESS_BYTES - limit)} too little\n"
            f"  fix:   {way_out}"
        )


def _boundary_bytes(config: RunConfig, batches: Batches, text: Any, dtype: str) -> int:
    """Host memory for the inputs of layers in the largest step; the few that never leave the device are counted too."""
    if config.compute.boundaries == "device":
        return 0
    rows, tokens, micro_batches = batches.largest
    kept = -(-text.num_hidden_layers // config.compute.boundary_every)
    together = 1 if config.compute.order == "micro_batch" else micro_batches
    return int(kept * together * rows * tokens * text.hidden_size * _TORCH[dtype].itemsize)


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
        micro_batch_size=config.train.micro_batch_size,
        seed=config.train.seed,
        shuffle=config.data.shuffle,
        pad_id=pad,
        fingerprint=data.fingerprint,
    )
