"""Writing a model as a Hugging Face checkpoint, streamed: one block of memory whatever its size.

An export is the source's folder with new weights. Names, order and shapes of the tensors, tokenizer, chat
template, generation settings and custom code are the source's own, because whatever read the source must read
the export.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatrain._durable import durable_folder, require_empty, require_space, scratch_folder
from megatrain._safetensors import OutTensor, Progress, as_dtype, byte_counter, write_file
from megatrain._side_files import write_side_files
from megatrain.errors import UserError
from megatrain.model_files import INDEX, SINGLE, ModelFiles

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""What can be exported, as configs spell it and as safetensors does."""

MAX_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True, slots=True)
class ExportTensor:
    """A parameter to export; ``blocks()`` yields its FP32 values in order, in pieces of any size."""

    name: str
    shape: tuple[int, ...]
    blocks: Callable[[], Iterable[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class _Plan:
    shards: dict[str, list[OutTensor]]  # by file name
    nbytes: int  # of all tensors
    dtype: str  # what config.json should say
    source: Path | None


def write_model(
    folder: str | Path,
    tensors: Iterable[ExportTensor],
    *,
    dtype: str | None,
    source: ModelFiles | str | Path | None,
    config: Any,
    tied: Mapping[str, str] | None = None,
    tokenizer: Any = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    metadata: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write ``tensors`` as a Hugging Face checkpoint; the folder appears when it is complete, or not at all.

    ``dtype``: ``"float32"``, ``"bfloat16"``, ``"float16"``, rounded to the nearest, ties to even, as
    ``Tensor.to`` does; None: each tensor as in the source, and without a source as ``config.dtype`` (float32
    where that is unset). ``source``: the checkpoint that was loaded. Its tensors that are not among
    ``tensors`` (buffers) are copied as they are, and its side files byte for byte; in ``config.json`` only a
    changed dtype or vocabulary size is edited. ``config``: the model's transformers config (or its dict).
    Without a source ``config.json`` is made from it and the files of ``tokenizer`` are written, in a form
    that transformers 4 reads too. ``tied``: alias -> owner. An alias is written only if the source had it,
    with the owner's values. ``max_shard_bytes``: a tensor that is larger gets a file of its own.

    Raises UserError when the target is not empty, the disk is too small or fails, or a value is not finite or
    beyond ``dtype``; nothing is left then. A side file that cannot be copied is reported by a UserError as
    well, but after the weights are in place.
    """
    folder = _target(folder)
    plan = _plan(tensors, dtype, source, config, tied or {}, max_shard_bytes)
    _require(folder, plan)
    advance = byte_counter("export", plan.nbytes, progress)
    with durable_folder(folder) as temporary:
        for file, shard in plan.shards.items():
            write_file(temporary / file, shard, metadata or {"format": "pt"}, advance)
        if SINGLE not in plan.shards:
            weight_map = {tensor.name: file for file, shard in plan.shards.items() for tensor in shard}
            index = {"metadata": {"total_size": plan.nbytes}, "weight_map": weight_map}
            (temporary / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        try:
            problems = write_side_files(temporary, plan.source, config, plan.dtype, tokenizer)
        except Exception as error:  # whatever is wrong with them, the weights are worth more
            problems = [f"its other files are incomplete: {error!r}"]
    if problems:
        raise UserError(f"the weights are saved in {folder}, but {'; '.join(problems)}")


def check_export(
    folder: str | Path,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    dtype: str | None,
    source: ModelFiles | str | Path | None,
    config: Any,
    tied: Mapping[str, str] | None = None,
    tokenizer: Any = None,
) -> None:
    """A trial of ``write_model`` without the weights, for the start of a run: what would fail then fails now.

    Checks target and disk space and writes the side files beside the target, to remove them again.
    """
    folder = _target(folder)
    empty = [ExportTensor(name, shape, tuple) for name, shape in shapes.items()]
    plan = _plan(empty, dtype, source, config, tied or {}, MAX_SHARD_BYTES)
    _require(folder, plan)
    with scratch_folder(folder) as temporary:
        problems = write_side_files(temporary, plan.source, config, plan.dtype, tokenizer)
    if problems:
        raise UserError(f"a trial save to {folder} found that {'; '.join(problems)}")


def _target(folder: str | Path) -> Path:
    return Path(folder).expanduser().resolve()


def _require(folder: Path, plan: _Plan) -> None:
    require_empty(folder)
    require_space(folder, plan.nbytes)


def _plan(
    tensors: Iterable[ExportTensor],
    dtype: str | None,
    source: ModelFiles | str | Path | None,
    config: Any,
    tied: Mapping[str, str],
    max_shard_bytes: int,
) -> _Plan:
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"export dtype {dtype!r} is unknown; use one of {', '.join(DTYPES)}, or none for the source's")
    files = ModelFiles(source) if isinstance(source, (str, Path)) else source
    common = DTYPES[dtype] if dtype else files.dtype_name if files else _config_dtype(config)
    out = list(_out_tensors({tensor.name: tensor for tensor in tensors}, files, dtype, common, tied))
    return _Plan(
        shards=_shards(out, max_shard_bytes),
        nbytes=sum(tensor.nbytes for tensor in out),
        dtype=next(name for name, code in DTYPES.items() if code == common),
        source=files.folder if files else None,
    )


def _config_dtype(config: Any) -> str:
    values = config if isinstance(config, Mapping) else config.to_dict()
    return DTYPES.get(str(values.get("dtype")).removeprefix("torch."), "F32")


def _out_tensors(
    tensors: dict[str, ExportTensor],
    files: ModelFiles | None,
    dtype: str | None,
    common: str,
    tied: Mapping[str, str],
) -> Iterator[OutTensor]:
    """The tensors of the export in the source's order; those that the source lacks come last."""
    if files is not None:
        for alias, owner in tied.items():
            if alias in files and owner in tensors:
                tensors[alias] = replace(tensors[owner], name=alias)
                if owner not in files:  # the source keeps the pair under its alias alone
                    del tensors[owner]
    if files is not None:
        for name in files.names:
            if name in tensors:
                yield _out(tensors.pop(name), DTYPES[dtype] if dtype else files.dtype(name))
            else:
                yield OutTensor(name, files.dtype(name), files.shape(name), partial(files.raw_blocks, name))
    yield from (_out(tensor, common) for tensor in tensors.values())


def _out(tensor: ExportTensor, code: str) -> OutTensor:
    return OutTensor(tensor.name, code, tuple(tensor.shape), partial(_rounded, tensor, code))


def _rounded(tensor: ExportTensor, code: str) -> Iterator[torch.Tensor]:
    return as_dtype(tensor.name, tensor.blocks(), code)


def _shards(tensors: Iterable[OutTensor], max_bytes: int) -> dict[str, list[OutTensor]]:
    groups: list[list[OutTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.nbytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, 1)}
