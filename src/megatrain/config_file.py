"""From a YAML file and ``section.key=value`` words to a checked :class:`RunConfig`. Only the command line imports this.

The pydantic models are made from the dataclasses of :mod:`megatrain.config`; there is no second list of options.
"""

from __future__ import annotations

import os
import re
from dataclasses import MISSING, asdict, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WrapValidator,
    create_model,
)

from megatrain.config import Auto, RunConfig, options, parse_bytes
from megatrain.errors import UserError

# What people who come from LLaMA-Factory, Hugging Face, TRL, Axolotl or litgpt write, and our name for it.
OTHER_TRAINERS = {
    "model_name_or_path": "model.name_or_path",
    "base_model": "model.name_or_path",
    "checkpoint_dir": "model.name_or_path",
    "model_revision": "model.revision",
    "attn_impl": "model.attn_implementation",
    "flash_attn": "model.attn_implementation",
    "dataset": "data.train",
    "datasets": "data.train",
    "train_file": "data.train",
    "dataset_name": "data.train",
    "template": "data.chat_template",
    "chat_template_path": "data.chat_template",
    "cutoff_len": "data.max_seq_len",
    "max_length": "data.max_seq_len",
    "max_seq_length": "data.max_seq_len",
    "sequence_len": "data.max_seq_len",
    "block_size": "data.max_seq_len",
    "num_train_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "total_steps": "train.max_steps",
    "num_steps": "train.max_steps",
    "per_device_train_batch_size": "train.micro_batch_size",
    "global_batch_size": "train.batch_size",
    "train_batch_size": "train.batch_size",
    "gradient_accumulation_steps": "train.batch_size",
    "accumulation": "train.batch_size",
    "learning_rate": "optim.lr",
    "adam_beta1": "optim.beta1",
    "adam_beta2": "optim.beta2",
    "betas": "optim.beta1",
    "adam_epsilon": "optim.eps",
    "max_norm": "optim.max_grad_norm",
    "gradient_clipping": "optim.max_grad_norm",
    "clip_grad_norm": "optim.max_grad_norm",
    "lr_scheduler_type": "schedule.type",
    "lr_scheduler": "schedule.type",
    "warmup_steps": "schedule.warmup",
    "warmup_ratio": "schedule.warmup",
    "lr_warmup_steps": "schedule.warmup",
    "min_lr": "schedule.min_lr_ratio",
    "bf16": "compute.dtype",
    "fp16": "compute.dtype",
    "precision": "compute.dtype",
    "torch_dtype": "compute.dtype",
    "gradient_checkpointing": "compute.activations",
    "activation_checkpointing": "compute.activations",
    "save_steps": "checkpoint.every",
    "save_interval": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "resume_from_checkpoint": "checkpoint.resume",
    "auto_resume_from_checkpoints": "checkpoint.resume",
    "logging_steps": "logging.every",
    "log_interval": "logging.every",
    "out_dir": "output_dir",
}


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars: ``1e-5`` is a number, ``no`` and ``on`` are texts; a key that stands twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = next((k for i, k in enumerate(keys) if k in keys[:i]), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _decimal(loader: _Loader, node: yaml.ScalarNode) -> int:
    """``010`` is ten: what YAML 1.2 says, and what people mean."""
    return int(str(loader.construct_scalar(node)).replace("_", ""))


class _Dumper(yaml.SafeDumper):
    """Quotes the texts that :class:`_Loader`, or a reader of YAML 1.1, would take for something else."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9][0-9_]*", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
     "-+.0123456789"),
):  # fmt: skip
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))


_Loader.add_constructor("tag:yaml.org,2002:int", _decimal)


def _number(kind: type) -> BeforeValidator:
    """Texts that spell a number (``'1e-5'``) become one; a whole float becomes an int where an int is wanted."""

    def convert(value: Any) -> Any:
        if isinstance(value, str):
            try:
                value = float(value.strip().replace("_", ""))
            except ValueError:
                return value
        if kind is float and type(value) is int:
            return float(value)
        if kind is int and isinstance(value, float) and value.is_integer():
            return int(value)
        return value

    return BeforeValidator(convert)


def _validated(cls: type) -> type[BaseModel]:
    """The strict pydantic model of one dataclass."""
    hints, members = get_type_hints(cls), {}
    for f in fields(cls):
        if "section" in f.metadata:
            kind: Any = _validated(f.metadata["section"])
        else:
            kind = hints[f.name]
            plain: Any = next((t for t in (kind, *get_args(kind)) if t in (int, float)), None)
            if f.metadata["path"]:
                # The one place where `~` is read, so that every path that is shown or kept is the same.
                text = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]
                kind = text | None if type(None) in get_args(kind) else text
            elif f.metadata["size"]:
                name = f.name
                kind = Annotated[kind, AfterValidator(lambda v, n=name: (parse_bytes(n, v), v)[1])]
            elif plain:
                limits = (
                    Field(allow_inf_nan=False, **f.metadata["limits"])
                    if plain is float
                    else Field(**f.metadata["limits"])
                )
                optional = type(None) in get_args(kind)
                number: Any = Annotated[plain, limits, _number(plain)]
                if Auto in get_args(kind):
                    number = Annotated[number, WrapValidator(lambda v, check: v if v == "auto" else check(v))]
                kind = number | None if optional else number
        default: dict[str, Any] = {"default": f.default, "default_factory": f.default_factory}
        if "section" in f.metadata and f.default_factory is not MISSING:
            default["default_factory"] = kind
        members[f.name] = (kind, Field(**{k: v for k, v in default.items() if v is not MISSING}))
    return create_model(cls.__name__, __config__=ConfigDict(extra="forbid", strict=True), **members)  # type: ignore[call-overload,no-any-return]


_FILE_MODEL = _validated(RunConfig)


def expected(name: str) -> str:
    """What the option ``name`` accepts, in words: ``a number above 0 and at most 1``, ``one of drop, truncate``."""
    f, kind = options()[name]
    union = get_origin(kind) not in (None, Literal, dict)
    parts = [t for t in (get_args(kind) if union else (kind,)) if t is not type(None)]
    choices = [str(choice) for t in parts if get_origin(t) is Literal for choice in get_args(t)]
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    limits = " and ".join(f"{words[k]} {v:g}" for k, v in f.metadata["limits"].items())
    numbers = int in parts or float in parts
    if choices and not numbers:
        text = "one of " + ", ".join(choices)
    elif f.metadata["size"]:
        text = "a size such as 400MiB or 24GiB"
    elif bool in parts:
        text = "true or false"
    elif numbers:
        text = " ".join(filter(None, ["a whole number" if int in parts else "a number", limits]))
        text = " or ".join([text, *choices])
    else:
        text = "a text" if parts == [str] else "a mapping of texts"
    return text + (" or null" if type(None) in get_args(kind) else "")


def _required(f: Any) -> bool:
    return f.default is MISSING and f.default_factory is MISSING


def _known_as(name: str) -> str:
    """The way out for a key that does not exist: another trainer's name, or the nearest of ours."""
    last, known = name.rpartition(".")[2].lstrip("-"), options()
    near_other = get_close_matches(last, OTHER_TRAINERS, 1, 0.9)
    if near_other:
        ours = OTHER_TRAINERS[near_other[0]]
        return f"MegaTrain's name for it is {ours}: {known[ours][0].metadata['doc']}"
    leaves = {k.rpartition(".")[2]: k for k in reversed(known)}
    near = get_close_matches(name, known, 1, 0.75) or [leaves[k] for k in get_close_matches(last, leaves, 1, 0.6)]
    return f"did you mean {near[0]}?" if near else "docs/config.md lists all options"


def _read(path: str) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        near = get_close_matches(path, [p.name for p in Path().glob("*.y*ml")], 1)
        hint = f"did you mean {near[0]}?" if near else "check the path, or give options as section.key=value"
        raise UserError(f"{path}: no such file\n  fix:   {hint}") from None
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{path}: cannot be read: {e}\n  fix:   give a readable YAML file in UTF-8") from None
    try:
        tree = yaml.load(text, _Loader)
    except yaml.YAMLError as e:
        raise UserError(f"{path}: not YAML: {' '.join(str(e).split())}\n  fix:   correct the file") from None
    if tree is not None and not isinstance(tree, dict):
        raise UserError(
            f"{path}: holds a {type(tree).__name__}, not options\n"
            "  fix:   write lines such as data: {train: chats.jsonl}"
        )
    return tree or {}


def _override(tree: dict[str, Any], word: str) -> None:
    """Set ``section.key=value`` in ``tree``; the value is read as YAML."""
    name, equals, text = word.partition("=")
    if name.startswith("-") or not equals:
        raise UserError(
            f"{word}: not an option of this command\n  fix:   write options as section.key=value; {_known_as(name)}"
        )
    *sections, key = name.split(".")
    for part in sections:
        if not isinstance(tree.get(part), dict):
            tree[part] = {}
        tree = tree[part]
    try:
        tree[key] = yaml.load(text, _Loader)
    except yaml.YAMLError:
        tree[key] = text


def _message(error: Any, source: str) -> str:
    name = ".".join(str(part) for part in error["loc"])
    known = next((k for k in options() if name == k or name.startswith(k + ".")), None)
    value = error["input"]
    if error["type"] == "missing":
        inner = [k for k in options() if k == name or k.startswith(name + ".")]
        name = next(k for k in inner if _required(options()[k][0]))
        doc = options()[name][0].metadata["doc"]
        return f"{name}: missing\n  needed: {doc}\n  fix:   add it to the file, or write {name}=VALUE"
    if error["type"] == "extra_forbidden":
        return f"{name}: unknown option in {source}\n  fix:   {_known_as(name)}"
    if known is None:
        return f"{name}: {value!r} is not a section\n  fix:   write {name}: {{key: value}}"
    if value in (None, "") and options()[known][0].metadata["path"]:
        return f"{known}: empty\n  needed: {options()[known][0].metadata['doc']}\n  fix:   write {known}=VALUE"
    near = get_close_matches(str(value), expected(known).removeprefix("one of ").split(", "), 1)
    return f"{known}: {value!r} is not {expected(known)}" + (f"\n  fix:   did you mean {near[0]}?" if near else "")


def load_config(path: str | None, overrides: list[str]) -> RunConfig:
    """The checked configuration of ``path`` (may be absent) with ``section.key=value`` words laid over it.

    Raises :class:`UserError` naming every option that is unknown, missing or out of range.
    """
    tree = _read(path) if path else {}
    for word in overrides:
        _override(tree, word)
    tree = {k: {} if v is None and any(o.startswith(f"{k}.") for o in options()) else v for k, v in tree.items()}
    try:
        checked = _FILE_MODEL.model_validate(tree)
    except ValidationError as e:
        lines = [_message(error, path or "the command line") for error in e.errors()]
        raise UserError("\n".join(dict.fromkeys(lines))) from None
    config: RunConfig = _frozen(RunConfig, checked.model_dump(warnings=False))  # of `auto` in the place of a number
    return config


def _frozen(cls: Any, tree: dict[str, Any]) -> Any:
    nested = {f.name: f.metadata["section"] for f in fields(cls) if "section" in f.metadata}
    return cls(**{k: _frozen(nested[k], v) if k in nested else v for k, v in tree.items()})


def dump_config(config: RunConfig) -> str:
    """The configuration as YAML with every default written out; reading it back gives an equal one."""
    return str(yaml.dump(asdict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True))
