"""What the planner needs to know of a model, from its config alone: parameters by unit, sizes, FLOPs.

The units and their layouts are those of training: the decoder is built without weights once, and the result is cached
by config and library version. A known model, or one seen before, needs no torch and takes milliseconds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from megatrain._durable import cache_folder, keep
from megatrain.errors import UserError
from megatrain.layout import Layout, Parameter, build_layout

FOLDER = Path(__file__).parent / "known_models"
_OWNERS = ("qwen", "meta-llama", "mistralai", "huggingfacetb")  # of the known models on the hub
_FORM = 2  # of a cached file
_SIZES = {
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "vocabulary": "vocab_size",
}
_DERIVED = ("intermediate", "key_value_heads", "head_dim", "tied", "experts", "experts_per_token", "fused_attention")

_AFTER_LAST_PRODUCT = ("post_feedforward", "post_mlp")  # in the names of norms


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitShape:
    """One unit: its name and layout, whether it reads the embedding's weights (a tied head), what template it has."""

    name: str
    layout: Layout
    structure: int
    uses: tuple[str, ...]
    lookup: bool


class _Product(NamedTuple):
    """A matrix of a unit: elements that one token meets, all of them, and terms of an output's sum."""

    active: int
    elements: int
    inner: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A uniform decoder without its weights. Sizes in elements, FLOPs of multiply and add."""

    name: str
    units: tuple[UnitShape, ...]
    width: int
    intermediate: int
    """Of the gated product that a token passes through; of a mixture, all experts that a token sees together."""
    heads: int
    key_value_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    experts: int
    """In a layer that has any; 0 in a dense model."""
    experts_per_token: int
    fused_attention: bool
    """Whether there is a kernel for its attention; else the weights of every pair of tokens are held."""

    @property
    def parameters(self) -> int:
        """All parameters; a tied matrix counts once."""
        return sum(unit.layout.num_parameters for unit in self.units)

    @property
    def active_parameters(self) -> int:
        """Those that one token meets: of a mixture, its own experts' and all that are no experts'."""
        return sum(self._active(p) for unit in self.units for p in unit.layout.parameters)

    def _active(self, parameter: Parameter) -> int:
        return parameter.numel * self.experts_per_token // self.experts if _of_experts(parameter) else parameter.numel

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return len(self.units) - 2

    def matrix_flops(self, unit: UnitShape) -> float:
        """Forward FLOPs per token of a unit's matrix products."""
        return 2.0 * sum(product.active for product in self._products(unit))

    def matrix_elements(self, unit: UnitShape) -> int:
        """Of all matrices that a unit multiplies by."""
        return sum(product.elements for product in self._products(unit))

    def inner_elements(self, unit: UnitShape) -> int:
        """Terms of an output's sum, over all products of a unit; those of all experts are one product."""
        return sum(product.inner for product in self._products(unit))

    def _products(self, unit: UnitShape) -> list[_Product]:
        """A unit's matrices; the head's is the embedding's when tied, which itself multiplies nothing."""
        if unit is self.units[0]:
            return []
        if unit is self.units[-1]:
            return [_Product(self.width * self.vocabulary, self.width * self.vocabulary, self.width)]
        matrices = filter(_multiplies, unit.layout.parameters)
        return [_Product(self._active(p), p.numel, self._inner(p)) for p in matrices]

    def _inner(self, parameter: Parameter) -> int:
        if not _of_experts(parameter):
            return parameter.shape[-1]
        down = "down" in parameter.local  # of the others either matrix axis may be the model's width
        return parameter.shape[-1] * parameter.shape[-2] // self.width if down else self.width

    def attention_flops(self, seq_len: float) -> float:
        """Forward FLOPs per token of one layer's attention products in a sequence of ``seq_len``, causal."""
        return 2.0 * (seq_len + 1) * self.heads * self.head_dim

    def routed_elements(self, unit: UnitShape) -> int:
        """Per token, the elements of all rows that a layer's experts get, each of the model's width; 0 without any."""
        routes = any(_of_experts(p) for p in unit.layout.parameters)
        return self.experts_per_token * self.width if routes else 0

    def passed_elements(self, unit: UnitShape) -> int:
        """Per token, the elements that a compiled layer's forward reads and writes between its products.

        Norms and residual sums, rotation of queries and keys (with their own norms, where they have any), the gated
        product; rows of experts as they are gathered (read, written, read), their outputs as they are weighted (2) and
        summed. A layer that is not compiled has more passes.
        """
        norms = sum(p.shape == (self.width,) and "norm" in p.local for p in unit.layout.parameters)
        between = 5 * self.width + 2 * norms * self.width  # with the usual two norms nine widths
        return between + 2 * self.rotated_elements + 3 * self.intermediate + 6 * self.routed_elements(unit)

    @property
    def last_product_flops(self) -> float:
        """Forward FLOPs per token of a layer's last product; 0 where a gradient needs its result: with experts the
        router's, and that of a norm behind it."""
        behind = any(place in p.local for p in self.units[1].layout.parameters for place in _AFTER_LAST_PRODUCT)
        return 0.0 if self.experts or behind else 2.0 * self.intermediate * self.width

    def flops_per_token(self, seq_len: int) -> float:
        """FLOPs of forward and backward, without recompute."""
        matrices = sum(self.matrix_flops(unit) for unit in self.units)
        return 3 * (matrices + self.layers * self.attention_flops(seq_len))

    def selective_bytes(self, item: int) -> int:
        """Per token, what the output of one layer's attention takes: ``item`` bytes an element, and an FP32 logarithm
        of its sum of exponentials for each head."""
        return self.heads * (self.head_dim * item + 4)

    @property
    def kept_elements(self) -> int:
        """Per token, what a compiled layer keeps for its backward besides its input, in elements of the compute dtype.

        Gate, up and their product; rotated queries and keys, values, the attention's output; both norms' outputs; the
        hidden state between the halves; with experts, each one's input and output; queries and keys before their own
        norm, where they have one.
        """
        routed = 2 * self.experts_per_token * self.width
        normed = self.rotated_elements if self.has_query_norm else 0
        return 3 * self.intermediate + 2 * self.rotated_elements + 3 * self.width + routed + normed

    @property
    def rotated_elements(self) -> int:
        """Per token, queries and keys of a layer."""
        return (self.heads + self.key_value_heads) * self.head_dim

    @property
    def has_query_norm(self) -> bool:
        """Whether queries and keys pass through a norm of their own before rotation."""
        return any("q_norm" in p.local for p in self.units[1].layout.parameters)


def _of_experts(parameter: Parameter) -> bool:
    return ".experts." in f".{parameter.local}"


def _multiplies(parameter: Parameter) -> bool:
    return len(parameter.shape) >= 2 and not parameter.local.endswith("bias")


def known_models() -> list[str]:
    """Names of the models whose specs ship with MegaTrain."""
    return sorted(file.stem for file in FOLDER.glob("*.json"))


def load_model_spec(model: str, notice: Callable[[str], None] = lambda line: None) -> ModelSpec:
    """The spec of a known name (``qwen3-4b`` or ``Qwen/Qwen3-4B``), a ``config.json``, or a folder that holds one.

    ``notice`` gets one line when the model must be built without weights, which takes seconds. Raises `UserError` for
    an unknown name, a config that cannot be read, and a model that cannot be streamed.
    """
    known = {name.lower(): name for name in known_models()}
    owner, _, short = model.lower().rpartition("/")
    if short in known and (not owner or owner in _OWNERS):
        name = known[short]
        return spec_from_data(name, json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))["spec"])
    path = Path(model).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        near = get_close_matches(model.lower().rpartition("/")[2], known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(
            f"model: {model!r} is neither a known model nor a config.json, nor a folder with one\n"
            f"  fix:   {hint}known models are {', '.join(sorted(known))}"
        )
    return _of_config(_read(file), path.name if path.is_dir() else file.parent.resolve().name, file, notice)


def spec_data(config: dict[str, Any]) -> dict[str, Any]:
    """A model's spec as JSON data, by building it without weights. Imports torch and transformers; takes seconds."""
    import torch
    from transformers import AutoConfig

    from megatrain.models._skeleton import supports_sdpa
    from megatrain.models.decoder import Decoder

    kind = config.get("model_type")
    try:
        built = AutoConfig.for_model(**config)
    except Exception as error:  # of many kinds, and whatever they are, the config is to blame
        raise UserError(f"model: config.json: model_type {kind!r}: {' '.join(str(error).split())[:200]}") from None
    fused = supports_sdpa(built)
    attention = "sdpa" if fused else "eager"
    decoder = Decoder(built, dtype=torch.bfloat16, device=torch.device("cpu"), attn_implementation=attention)
    text = decoder.config.get_text_config()
    structures: dict[str, dict[str, list[int]]] = {}
    for unit in decoder.units:
        structures.setdefault(str(unit.structure), {p.local: list(p.shape) for p in unit.layout.parameters})
    experts = {p.shape[0] for unit in decoder.units for p in unit.layout.parameters if _of_experts(p)}
    if len(experts) > 1:
        raise UserError(
            f"model: type {kind!r}: layers have {sorted(experts)} experts, of which no plan can be made yet"
        )
    each = int(text.num_experts_per_tok) if experts else 0
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return {
        "structures": structures,
        "experts": max(experts, default=0),
        "experts_per_token": each,
        "fused_attention": fused,
        "intermediate": max(
            _gated_width(unit.layout, text.hidden_size, max(experts, default=0), each) for unit in decoder.units[1:-1]
        ),
        "units": [[u.name, u.structure, _prefix(u.layout), list(u.uses), u.cheap_graph] for u in decoder.units],
        "key_value_heads": getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        "head_dim": head_dim,
        "tied": bool(decoder.units[-1].uses),
        **{ours: int(getattr(text, theirs)) for ours, theirs in _SIZES.items()},
    }


def spec_from_data(name: str, data: dict[str, Any]) -> ModelSpec:
    """The spec that `spec_data` describes."""
    shapes = {
        int(structure): {local: tuple(shape) for local, shape in parameters.items()}
        for structure, parameters in data["structures"].items()
    }
    units = tuple(
        UnitShape(
            name=unit,
            layout=build_layout(shapes[structure], prefix),
            structure=structure,
            uses=tuple(uses),
            lookup=lookup,
        )
        for unit, structure, prefix, uses, lookup in data["units"]
    )
    sizes = {key: data[key] for key in (*_SIZES, *_DERIVED)}
    return ModelSpec(name=name, units=units, **sizes)


def _gated_width(layout: Layout, width: int, experts: int, each: int) -> int:
    """Of the gated products that a token passes through in a layer: from its matrices but those of attention and of the
    router, three of ``width`` to a product."""
    met = 0
    for p in layout.parameters:
        if _multiplies(p) and "attn" not in p.local and p.shape != (experts, width):
            met += p.numel * each // experts if _of_experts(p) else p.numel
    return met // (3 * width)


def _prefix(layout: Layout) -> str:
    first = next(iter(layout.parameters), None)
    return "" if first is None else first.name.removesuffix(first.local)


def _read(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"model: {file}: cannot be read as JSON ({error})\n  fix:   correct or fetch it again"
        ) from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise UserError(f"model: {file}: has no model_type\n  fix:   give the config.json of a transformers model")
    return config


def _of_config(config: dict[str, Any], name: str, file: Path, notice: Callable[[str], None]) -> ModelSpec:
    version = metadata.version("transformers")
    key = hashlib.sha256(json.dumps([_FORM, version, config], sort_keys=True).encode()).hexdigest()[:32]
    cached = cache_folder("models") / f"{key}.json"
    try:
        return spec_from_data(name, json.loads(cached.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # not there, or damaged: make it again
        pass
    notice(f"model   building {file} without weights, once (transformers {version})")
    data = spec_data(config)
    keep(cached, json.dumps(data))
    return spec_from_data(name, data)
