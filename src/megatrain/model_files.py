"""Reading a Hugging Face checkpoint folder: checked first, then tensor by tensor in blocks.

Nothing is mapped or held: reading a tensor into its place needs one block of memory beside it, so that the
peak of loading a model is the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from megatrain._safetensors import FLOAT_DTYPES, BlockReader, Entry, byte_view, read_header
from megatrain.errors import UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
IGNORED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Buffers that old checkpoints hold and transformers computes itself; it ignores them as well."""

_SHOWN = 5


class ModelFiles:
    """The tensors of a Hugging Face checkpoint folder (``model.safetensors``, or an index and its shards).

    Construction reads headers only and checks them against the index and the disk: a missing, truncated or
    foreign shard, a tensor that the index or a shard lacks, and one that is in two shards are each a
    UserError that names files and tensors. ``names`` keeps the order of the files. Safe to read from several
    threads.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        self._entries = _read_entries(self.folder)
        self._stands_for: dict[str, str] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor name in the files, in file order."""
        return tuple(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(entry.end - entry.start for entry in self._entries.values())

    @property
    def dtype_name(self) -> str:
        """The dtype of most stored values that can be trained: ``"F32"``, ``"BF16"`` or ``"F16"``."""
        totals = dict.fromkeys(FLOAT_DTYPES, 0)
        for entry in self._entries.values():
            if entry.dtype in totals:
                totals[entry.dtype] += entry.numel
        return max(totals, key=lambda dtype: totals[dtype])

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        """The stored shape of a tensor."""
        return self._entry(name).shape

    def dtype(self, name: str) -> str:
        """The stored dtype as safetensors spells it: ``"F32"``, ``"BF16"``, ``"F16"``, ``"I64"`` ..."""
        return self._entry(name).dtype

    def check(
        self,
        expected: Mapping[str, tuple[int, ...]],
        tied: Mapping[str, str] | None = None,
        ignore: Iterable[str] = (),
    ) -> None:
        """Refuse files that do not hold exactly the model's tensors; call it before anything is allocated.

        ``expected``: parameter name -> shape, without the aliases of tied weights. ``tied``: alias -> owner,
        as in ``{"lm_head.weight": "model.embed_tokens.weight"}``. ``ignore``: patterns searched in names
        (transformers' ``_keys_to_ignore_on_load_unexpected``) that may be present, beside ``IGNORED``.

        As in transformers an alias may be absent, equal to its owner, or present instead of the owner, which
        is then read from it. Where both are present and differ transformers warns and leaves them untied,
        against the config; that is refused here.

        Raises one UserError that lists what is missing, unexpected, of another shape or of a dtype that
        cannot be trained.
        """
        tied = tied or {}
        pattern = re.compile("|".join(f"(?:{p})" for p in (*IGNORED, *ignore)))
        for alias, owner in tied.items():
            if owner in expected and owner not in self and alias in self:
                self._stands_for[owner] = alias
        here = [name for name in expected if name in self or name in self._stands_for]
        problems = {
            "missing (the config asks for them)": [name for name in expected if name not in set(here)],
            "unexpected (the config knows no such parameter)": [
                name for name in self._entries if name not in expected and name not in tied and not pattern.search(name)
            ],
            "of another shape": [
                f"{name} {list(self.shape(name))} instead of {list(expected[name])}"
                for name in here
                if self.shape(name) != tuple(expected[name])
            ],
            "not in BF16, F16 or F32 (quantised?)": [
                f"{name} {self.dtype(name)}" for name in here if self.dtype(name) not in FLOAT_DTYPES
            ],
        }
        found = [f"{len(names)} {what}: {_some(names)}" for what, names in problems.items() if names]
        if found:
            raise UserError(
                f"the weights in {self.folder} do not fit its config.json: {'; '.join(found)}."
                " Download the folder again, or correct config.json"
            )
        for alias, owner in tied.items():
            if alias in self and owner in self and not self._equal(alias, owner):
                raise UserError(
                    f"{self.folder}: config.json ties {alias} to {owner}, but the files hold different"
                    " values for"
                    ' them; set "tie_word_embeddings": false in config.json to train both'
                )

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Fill ``out`` (FP32, CPU, contiguous, as many elements as ``name``) with the stored values,
        exactly."""
        entry = self._entry(name)
        if out.dtype != torch.float32 or out.numel() != entry.numel or out.device.type != "cpu":
            raise ValueError(
                f"{name}: out must be {entry.numel} float32 values on the CPU, not {out.numel()} {out.dtype}"
            )
        with BlockReader(entry.path) as reader:
            reader.fill(entry, 0, out.detach().view(-1))

    def read_blocks(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first element, FP32 block) in order; a block is valid until the next one is taken."""
        entry = self._entry(name)
        with BlockReader(entry.path) as reader:
            yield from reader.blocks(entry)

    def raw_blocks(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the stored bytes (uint8 blocks) of a tensor of any dtype, to copy it as it is."""
        entry = self._entry(name)
        step = 1 << 24
        with BlockReader(entry.path) as reader:
            for start in range(entry.start, entry.end, step):
                block = torch.empty(min(step, entry.end - start), dtype=torch.uint8)
                reader.read(byte_view(block), start)
                yield block

    def _entry(self, name: str) -> Entry:
        return self._entries[self._stands_for.get(name, name)]

    def _equal(self, one: str, other: str) -> bool:
        if self.shape(one) != self.shape(other):
            return False
        pairs = zip(self.read_blocks(one), self.read_blocks(other), strict=True)
        return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for (_, a), (_, b) in pairs)


def _read_entries(folder: Path) -> dict[str, Entry]:
    if not folder.is_dir():
        raise UserError(
            f"{folder} is not a folder with a model; give the folder that holds config.json and"
            f" {SINGLE} (from the Hub: 'hf download <name> --local-dir {folder}')"
        )
    single, index = folder / SINGLE, folder / INDEX
    if single.exists() and index.exists():
        raise UserError(
            f"{folder} has both {SINGLE} and {INDEX}: two sets of weights, and loaders differ in which they"
            " take; remove the one that is not meant"
        )
    if single.exists():
        return read_header(single)
    if index.exists():
        return _read_shards(index)
    raise _no_weights(folder)


def _read_shards(index: Path) -> dict[str, Entry]:
    folder, weight_map = index.parent, _weight_map(index)
    files = sorted(set(weight_map.values()))
    absent = [file for file in files if not (folder / file).exists()]
    if absent:
        count = sum(file in absent for file in weight_map.values())
        raise UserError(
            f"{folder}: {len(absent)} of {len(files)} shards that {INDEX} names are missing"
            f" ({_some(absent)}), and with them {count} tensors; download those files"
        )
    entries: dict[str, Entry] = {}
    twice, unlisted = [], []
    for file in files:
        for name, entry in read_header(folder / file).items():
            if name in entries:
                twice.append(f"{name} in {entries[name].path.name} and {file}")
            elif weight_map.get(name) != file:
                unlisted.append(f"{name} in {file}")
            entries[name] = entry
    lacking = [f"{name} in {file}" for name, file in weight_map.items() if name not in entries]
    problems = {
        "tensors are in two shards": twice,
        f"tensors of the index are not in their shard ({INDEX} names them)": lacking,
        f"tensors of a shard are not listed for it in {INDEX}": unlisted,
    }
    found = [f"{len(names)} {what}: {_some(names)}" for what, names in problems.items() if names]
    if found:
        raise UserError(f"{folder}: index and shards disagree: {'; '.join(found)}. Download these files again")
    return entries


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        sound = bool(weight_map) and all(file == Path(file).name for file in weight_map.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is not a readable index ({error!r}); download it again") from error
    if not sound:
        raise UserError(f"{index}: its weight_map is empty or names files outside the folder; download it again")
    return dict(weight_map)


def _no_weights(folder: Path) -> UserError:
    """Say what the folder has instead of safetensors weights, and what to do about it."""
    present = {path.name for path in folder.iterdir()}
    shards = sorted(name for name in present if name.endswith(".safetensors"))
    pickles = sorted(name for name in present if name.endswith((".bin", ".pt", ".pth")) and "args" not in name)
    gguf = sorted(name for name in present if name.endswith(".gguf"))
    if "adapter_config.json" in present:
        what = "an adapter (adapter_config.json), not a model; merge it into its base with peft and save that"
    elif shards:
        what = f"{_some(shards)}, but neither {SINGLE} nor {INDEX}; download the missing file"
    elif pickles:
        what = (
            f'{_some(pickles)}, and only safetensors is read; convert it: python -c "from transformers import'
            f" AutoModelForCausalLM as M; M.from_pretrained('{folder}', dtype='auto')"
            f".save_pretrained('{folder}-safetensors')\" and copy the tokenizer files"
        )
    elif gguf:
        what = (
            f"{_some(gguf)}, an inference format; use the original safetensors checkpoint of this model, or"
            f" dequantise it: from_pretrained('{folder}', gguf_file='{gguf[0]}') of transformers, then save"
            " the weights in a model built from its config without quantization_config"
        )
    else:
        what = f"no weights: neither {SINGLE} nor {INDEX}; give the folder of a Hugging Face checkpoint"
    return UserError(f"{folder} holds {what}")


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
