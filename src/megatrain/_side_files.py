"""The files of a Hugging Face checkpoint beside its weights: config, tokenizer, chat template, custom
code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from json.decoder import scanstring  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any

_SUFFIXES = {".json", ".jinja", ".model", ".tiktoken", ".txt", ".py", ".bpe", ".vocab", ".codes", ".spm"}
_LICENCES = ("licen", "notice", "copying", "use_policy")  # beginnings of lower-cased names
_NOT_COPIED = ("readme", "config.json", "trainer_state", "adapter_config")
_NOT_OF_THE_MODEL = {
    "_name_or_path", "chunk_size_feed_forward", "id2label", "is_encoder_decoder", "label2id",
    "output_attentions", "output_hidden_states", "problem_type", "return_dict",
}  # fmt: skip  # keys of the config's base class
_SUBFOLDER = "additional_chat_templates"

_DECODER = json.JSONDecoder()


def write_side_files(folder: Path, source: Path | None, config: Any, dtype: str, tokenizer: Any = None) -> list[str]:
    """Write ``config.json`` and all other side files into ``folder``; returns what could not be done.

    With a source they are its own files, ``config.json`` edited where ``dtype`` or the vocabulary size of
    ``config`` differ. Without one they are made from ``config`` and ``tokenizer``. Never raises for a file
    that cannot be read, copied or saved: the weights beside it are worth more.
    """
    values: dict[str, Any] = dict(config) if isinstance(config, Mapping) else json.loads(config.to_json_string(False))
    problems = []
    text = None
    if source is not None:
        try:
            text = edited_config((source / "config.json").read_bytes().decode(), values, dtype)
        except (OSError, ValueError) as error:
            problems.append(f"config.json was made anew, because that of the source cannot be read: {error}")
    if text is None:
        text = json.dumps(new_config(values, dtype), indent=2, sort_keys=True) + "\n"
    try:
        (folder / "config.json").write_bytes(text.encode())
        problems += _copy(source, folder) if source is not None else _save_tokenizer(tokenizer, folder)
    except OSError as error:
        problems.append(f"a side file could not be written: {error}")
    return problems


def _copy(source: Path, folder: Path) -> list[str]:
    problems = []
    for path in side_files(source):
        target = folder / path.relative_to(source)
        try:
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)
        except OSError as error:
            problems.append(f"{path} could not be copied ({error.strerror}); copy it there yourself")
    return problems


def side_files(source: Path) -> Iterator[Path]:
    """The files that an export copies: what a loader reads beside weights and config, and licences."""
    if not source.is_dir():
        return
    for path in sorted([*source.iterdir(), *(source / _SUBFOLDER).glob("*.jinja")]):
        name = path.name.lower()
        if not path.is_file() or name.startswith(_NOT_COPIED) or name.endswith(".index.json"):
            continue
        if path.suffix.lower() in _SUFFIXES or name.startswith(_LICENCES):
            yield path


def edited_config(text: str, config: Mapping[str, Any], dtype: str) -> str:
    """A source's ``config.json`` with the exported dtype and ``config``'s vocabulary size, every other byte
    as it was.

    Only keys that are there are edited, at the top and in nested parts such as ``text_config``.
    """
    source = json.loads(text)
    if not isinstance(source, dict):
        raise ValueError("it is not a JSON object")
    changes: dict[tuple[str, ...], Any] = {}
    for path, part in _parts(source):
        for key in ("dtype", "torch_dtype"):
            if isinstance(part.get(key), str) and part[key].removeprefix("torch.") != dtype:
                changes[*path, key] = dtype
        new_part = config.get(path[0]) if path else config
        size = new_part.get("vocab_size") if isinstance(new_part, Mapping) else None
        if size is not None and part.get("vocab_size", size) != size:
            changes[*path, "vocab_size"] = size
    return _edit(text, changes)


def _parts(config: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    yield (), config
    for key, value in config.items():
        if key.endswith("_config") and key != "quantization_config" and isinstance(value, dict):
            yield (key,), value


def _edit(text: str, changes: Mapping[tuple[str, ...], Any]) -> str:
    """Replace values inside a JSON text by path of keys; whatever is not replaced keeps its spelling."""
    for path, value in changes.items():
        start, end = _span(text, path)
        text = text[:start] + json.dumps(value) + text[end:]
    return text


def _span(text: str, path: tuple[str, ...]) -> tuple[int, int]:
    """Where the value of a path of keys begins and ends in a JSON text; of a repeated key the last, as
    parsers do."""
    start, end = _blank(text, 0), len(text)
    for wanted in path:
        start, end = [span for key, span in _members(text, start) if key == wanted][-1]
    return start, end


def _members(text: str, at: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """(key, (start, end) of its value) for the object whose brace is at ``at``."""
    at = _blank(text, at + 1)
    while text[at] != "}":
        key, at = scanstring(text, at + 1)
        start = _blank(text, _blank(text, at) + 1)  # over the colon
        _, end = _DECODER.raw_decode(text, start)
        yield key, (start, end)
        at = _blank(text, end)
        if text[at] == ",":
            at = _blank(text, at + 1)


def _blank(text: str, at: int) -> int:
    while text[at] in " \t\r\n":
        at += 1
    return at


def new_config(values: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """``config.json`` for a model without a source, understood by transformers 4 and 5.

    Version 5 keeps rotary settings in ``rope_parameters``; version 4 ignores that key and silently takes the
    default base, so they are written in its own keys as well. ``architectures`` is what serving engines
    choose a model by.
    """
    config = {**values, **_legacy_rope(values.get("rope_parameters")), "dtype": dtype, "torch_dtype": dtype}
    for key in _NOT_OF_THE_MODEL & config.keys():
        del config[key]
    if not config.get("architectures"):
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.get("model_type", ""))
        if name is not None:
            config["architectures"] = [name]
    return config


def _legacy_rope(rope: Mapping[str, Any] | None) -> dict[str, Any]:
    if not rope:
        return {}
    if "full_attention" in rope:  # one setting per kind of layer (Gemma 3)
        local = rope.get("sliding_attention", rope["full_attention"])
        return {**_legacy_rope(rope["full_attention"]), "rope_local_base_freq": local["rope_theta"]}
    legacy = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if rope.get(key) is not None}
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
    return {**legacy, "rope_scaling": scaling} if rope.get("rope_type", "default") != "default" else legacy


def _save_tokenizer(tokenizer: Any, folder: Path) -> list[str]:
    """Save a tokenizer under a class that transformers 4 knows; the generic one of version 5 is written
    otherwise."""
    if tokenizer is None:
        return []
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:  # of whatever library it comes from
        return [f"the tokenizer could not be saved: {error}"]
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):  # version 4 has that key for a mapping
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return []
