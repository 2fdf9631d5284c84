"""The configuration of a run: frozen dataclasses, the one place where an option, its default and its range stand.

The YAML reader (:mod:`megatrain.config_file`) and ``docs/config.md`` are generated from these classes, so an
option that is added here is validated, documented and accepted on the command line without another list.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from typing import Any, Literal, get_type_hints

from megatrain.errors import UserError

Auto = Literal["auto"]
"""Value of an option that is chosen for the machine at hand when a run starts (`megatrain.auto`)."""

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)} | {f"{p}ib": 1024**i for i, p in enumerate("kmgt", 1)}


def parse_bytes(field_name: str, value: str | int | None) -> int | None:
    """Bytes of ``value``: a whole number, or a text such as ``400MiB`` or ``24 GB``; None stays None.

    Raises :class:`UserError` naming ``field_name`` for anything else, and for sizes below one byte.
    """
    if value is None:
        return None
    match = re.fullmatch(r"\s*(\d*\.?\d+)\s*([A-Za-z]*)\s*", str(value))
    scale = _UNITS.get(match[2].lower()) if match else None
    size = int(float(match[1]) * scale) if match and scale else 0
    if size < 1:
        raise UserError(
            f"{field_name}: {value!r} is not a size\n  fix:   write it as 400MiB, 24GiB or a number of bytes"
        )
    return size


def option(
    doc: str,
    default: Any = MISSING,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    size: bool = False,
    path: bool = False,
) -> Any:
    """A field with its documentation, its allowed range and the rules that it is read as bytes (``size``), or that a
    ``~`` at its start is the home folder and that it is not empty (``path``)."""
    limits = {k: v for k, v in (("ge", ge), ("gt", gt), ("le", le), ("lt", lt)) if v is not None}
    metadata = {"doc": doc, "limits": limits, "size": size, "path": path}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(cls: type, doc: str) -> Any:
    """A nested section; its default is the section with all of its own defaults, where it has them."""
    required = any(f.default is MISSING and f.default_factory is MISSING for f in fields(cls))
    metadata = {"doc": doc, "section": cls}
    return field(metadata=metadata) if required else field(default_factory=cls, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model is trained."""

    name_or_path: str = option("Folder of the model, or its name on the Hugging Face hub.", path=True)
    revision: str | None = option("Branch, tag or commit of a hub name. Default: the hub's main branch.", None)
    trust_remote_code: bool = option("Run Python code that the model's own folder brings.", False)
    attn_implementation: Literal["sdpa", "eager"] = option("Attention kernel of the model.", "sdpa")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """What it is trained on."""

    train: str = option("JSONL file with one training row per line.", path=True)
    format: str = option(
        "Form of the rows: `messages`, `prompt_completion` or `text`; `auto` decides by the first row's columns.",
        "auto",
    )
    columns: dict[str, str] = option(
        "Names of the columns where the file has others than ours, as `{messages: conversations, role: from}`.",
        {},
    )
    chat_template: str | None = option(
        "Jinja file that replaces the model's chat template, or `none` to train prompt_completion rows as plain text. "
        "Default: the model's own template.",
        None,
        path=True,
    )
    max_seq_len: int | None = option(
        "Longest row, in tokens. Default: what the model has positions for, at most 4096.", None, ge=2
    )
    too_long: Literal["auto", "drop", "truncate", "split"] = option(
        "Rows longer than max_seq_len: left out, cut at the end, or (text only) split into several rows. "
        "`auto` splits text and drops dialogues.",
        "auto",
    )
    bad_rows: Literal["stop", "skip"] = option(
        "A row that cannot be read or trained on: stop before the run, or leave it out and count it.", "stop"
    )
    max_bad_share: float = option(
        "With bad_rows=skip, the share of bad rows that stops the run after all.", 0.1, ge=0, le=1
    )
    shuffle: bool = option("Visit the rows in a new random order in each epoch.", True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How long, and in steps of what size."""

    epochs: int = option("Passes over the data.", 1, ge=1)
    max_steps: int | None = option("Length of the run in optimizer steps, in place of epochs.", None, ge=1)
    batch_size: int = option("Rows per optimizer step.", 16, ge=1)
    micro_batch_size: int | Auto = option(
        "Rows that pass through the model at a time. Changes memory and speed, not the result.", "auto", ge=1
    )
    seed: int = option("Seed of the row order and of dropout.", 0, ge=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """AdamW, in full precision; norm weights, biases and vectors are not decayed."""

    lr: float = option("Highest learning rate.", 1e-5, gt=0, le=1)
    beta1: float = option("Decay of the gradient's running mean.", 0.9, ge=0, lt=1)
    beta2: float = option("Decay of the squared gradient's running mean.", 0.999, ge=0, lt=1)
    eps: float = option("Added to the square root of the second moment.", 1e-8, gt=0, le=1)
    weight_decay: float = option("Decoupled weight decay.", 0.01, ge=0, le=1)
    max_grad_norm: float | None = option("Clip the gradient's global norm to this; null: no clipping.", 1.0, gt=0)
    clipping: Literal["auto", "deferred", "speculative"] = option(
        "Update when the norm is known, or as gradients arrive with a correction (to rounding) of clipped steps; "
        "`auto` does the latter while steps are rarely clipped.",
        "auto",
    )
    speculated: str = option(
        "Share of the model that a speculative step updates early, from its end: less than all is faster where updates "
        "take longer than backward.",
        "100%",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """The learning rate as a function of the optimizer step."""

    type: Literal["constant", "linear", "cosine"] = option("Shape after the warm-up.", "cosine")
    warmup: float = option("Steps of linear warm-up; below 1: that share of all steps.", 0.03, ge=0)
    min_lr_ratio: float = option("Rate of the last step, as a share of optim.lr (not for constant).", 0.1, ge=0, le=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementConfig:
    """Where it runs and how much memory it may take. What is `auto` is chosen for the machine when the run starts."""

    device: Literal["auto", "cuda", "cpu"] = option("Compute device; `auto` takes a CUDA GPU, else the CPU.", "auto")
    device_memory: str | int | None = option(
        "Most device memory the run may take, as `24GiB`. Default: what is free.", None, size=True
    )
    host_memory: str | int | None = option(
        "Most host memory the run may take, as `110GiB`. Default: what is free, container limits counted.",
        None,
        size=True,
    )
    pinned_memory: str | int | None = option(
        "Most host memory that is pinned, as `8GiB`; the rest is copied through buffers of it, which is slower. "
        "Default: what the driver allows.",
        None,
        size=True,
    )
    slots: int | Auto = option("Device buffers that layers stream through.", "auto", ge=1)
    weights: str | None = option(
        "Weights that stay on the device instead of streaming, as `8GiB` or `30%` of them; null: none.", "auto"
    )
    states: str | None = option(
        "Training state (weights, master, moments) that stays on the device, as `8GiB` or `30%`; null: none.", "auto"
    )
    gradients: Literal["kept", "passing"] = option(
        "Gradients in host memory: `kept` until the norm of all is known, or `passing` through a few buffers, each "
        "unit updated as its own lands: 12 bytes a parameter instead of 14, without clipping, and a gradient that is "
        "not finite may end the run.",
        "kept",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeConfig:
    """Precision and recompute. Masters and moments are always FP32. What is `auto` is chosen with the placement."""

    dtype: Literal["bfloat16", "float32"] | None = option(
        "Number format of forward and backward. Default: bfloat16 on a GPU, float32 on the CPU.", None
    )
    activations: str = option(
        "`recompute` each layer in backward but for what it is given, or `selective`: attention's output is kept too, "
        "or `keep` what it saved; by shares, as `30%` (to keep) or `keep 20%, selective 50%`.",
        "auto",
    )
    boundaries: Literal["auto", "device", "host"] = option(
        "Where the inputs of layers wait for backward; `host` takes them out of device memory.", "auto"
    )
    boundary_every: int | Auto = option(
        "Keep the input of every so many layers only, and compute those between again: less memory, more arithmetic.",
        "auto",
        ge=1,
    )
    order: Literal["auto", "layer", "micro_batch"] = option(
        "All micro-batches through a layer before the next layer, or all layers for a micro-batch before the next one: "
        "activations of one micro-batch at a time, for models whose weights all stay on the device.",
        "auto",
    )
    gradient_dtype: Literal["bfloat16", "float32"] | None = option(
        "Number format of gradients in host memory. Default: that of compute.dtype.", None
    )
    compile: bool | None = option("Compile the layers with torch.compile. Default: on a GPU.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Training state that a run can be resumed from."""

    every: int = option("Steps between saves; 0 saves only when the run is interrupted.", 500, ge=0)
    keep: int = option("Newest saves that are kept.", 2, ge=1)
    resume: str = option(
        "`no`, `auto` (the newest complete save in output_dir) or the folder of a save.", "no", path=True
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportConfig:
    """The trained model, written at the end as a Hugging Face checkpoint to output_dir/final."""

    dtype: Literal["bfloat16", "float16", "float32"] | None = option(
        "Number format of the exported weights. Default: that of the source.", None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggingConfig:
    """What is shown. Every step is always written to output_dir/metrics.jsonl."""

    every: int = option("Steps between console lines.", 1, ge=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    """A picture of a few measured steps, taken once the run is warm: what each lane did and what it waited for."""

    path: str | None = option(
        "HTML page (`step.html`) of the steps, predicted above measured; beside it `step.json` for Perfetto or Chrome. "
        "Default: none.",
        None,
        path=True,
    )
    steps: int = option("Measured steps that it shows.", 2, ge=1, le=20)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One training run."""

    model: ModelConfig = section(ModelConfig, "which model")
    data: DataConfig = section(DataConfig, "training data")
    train: TrainConfig = section(TrainConfig, "length and step size")
    optim: OptimConfig = section(OptimConfig, "optimizer")
    schedule: ScheduleConfig = section(ScheduleConfig, "learning rate over time")
    placement: PlacementConfig = section(PlacementConfig, "device and memory")
    compute: ComputeConfig = section(ComputeConfig, "precision and recompute")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "save and resume")
    export: ExportConfig = section(ExportConfig, "the exported model")
    logging: LoggingConfig = section(LoggingConfig, "what is shown")
    trace: TraceConfig = section(TraceConfig, "a picture of measured steps")
    output_dir: str = option(
        "Folder of the run: log, metrics, saves and the trained model. Must be new or empty.", path=True
    )


def options(cls: type = RunConfig, prefix: str = "") -> dict[str, tuple[Field[Any], Any]]:
    """Every option by its dotted name: ``{"optim.lr": (dataclass field, type)}``, in the order of the classes."""
    hints = get_type_hints(cls)
    found: dict[str, tuple[Field[Any], Any]] = {}
    for f in fields(cls):
        if "section" in f.metadata:
            found |= options(f.metadata["section"], f"{prefix}{f.name}.")
        else:
            found[prefix + f.name] = (f, hints[f.name])
    return found


def flat_options(config: RunConfig) -> dict[str, Any]:
    """Every option's value by its dotted name, as JSON; part of a save."""
    return {
        name if part is None else f"{name}.{part}": value
        for name, section in asdict(config).items()
        for part, value in (section.items() if isinstance(section, dict) else ((None, section),))
    }
