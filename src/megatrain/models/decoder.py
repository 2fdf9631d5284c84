"""Any uniform Hugging Face decoder, cut into units by capture.

The model's own ``forward`` runs once a micro-batch with its layers replaced by stubs that record their arguments and
return the hidden state. The real layers are then called one at a time with those arguments. Positions, rotary pairs,
masks, embedding scales and logit caps are thus the model's own code, and no family needs code of ours.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from megatrain.errors import UserError
from megatrain.layout import Layout, build_layout
from megatrain.models._compiled import compiled
from megatrain.models._functions import (
    LayerFunction,
    LayerGradients,
    keeping_attention,
    layer_function,
    layer_gradients,
    pulled_back,
)
from megatrain.models._linear import StreamedLinear
from megatrain.models._masks import packing_known
from megatrain.models._skeleton import build_skeleton, has_dropout, move_buffers, structure_key

Arguments = dict[str, Any]
Weights = Mapping[str, torch.Tensor]
"""Local parameter name -> view of the buffer that holds it."""

EMBEDDING, HEAD = "embedding", "head"


@dataclass(frozen=True, slots=True)
class Unit:
    """A part of the model that streams as one."""

    name: str
    layout: Layout
    structure: int
    """Units with the same number are computed by the same template."""
    uses: tuple[str, ...] = ()
    """Units whose weights it reads besides its own."""
    aliases: tuple[tuple[str, str, str], ...] = ()
    """``(local name, unit, Hugging Face name)`` of parameters that live in another unit: a tied head."""
    cheap_graph: bool = False
    """Its backward reads no weights and saves next to nothing, as that of an embedding."""


class _Stub(nn.Module):
    """Stands for a layer: records what it is called with, returns the hidden state unchanged."""

    def __init__(self, layer: nn.Module, calls: list[tuple[torch.Tensor, Arguments]]) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            if not name.startswith("_") and not isinstance(value, torch.Tensor):
                setattr(self, name, value)  # `attention_type` and the like, which the model's forward reads
        self._calls = calls
        self._signature = inspect.signature(type(layer).forward)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        bound = self._signature.bind(self, *args, **kwargs)
        arguments = dict(list(bound.arguments.items())[1:])
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                arguments.update(arguments.pop(name, {}))
        hidden: torch.Tensor = arguments.pop(next(iter(arguments)))
        self._calls.append((hidden, arguments))
        return hidden


class _ChunkBase(nn.Module):
    """Stands for the base model while logits are computed: its output is the normalised chunk."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, inputs_embeds: torch.Tensor, **_: Any) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=self.norm(inputs_embeds))


class _Layer(NamedTuple):
    """What the layers of one structure compute."""

    forward: LayerFunction
    selective: LayerFunction
    gradients: LayerGradients


def _plain_layer(function: LayerFunction) -> _Layer:
    return _Layer(function, keeping_attention(function), layer_gradients(function))


def _compiled_layer(function: LayerFunction, name: str, *, dropout: bool) -> _Layer:
    forward = compiled(function, name, random=dropout)
    gradients = layer_gradients(forward)
    if not dropout:  # one graph might draw other random numbers than the forward's did
        gradients = compiled(pulled_back(function), f"the gradients of {name}", instead=gradients, whole=True)
    return _Layer(forward, compiled(keeping_attention(function), f"{name} with attention kept"), gradients)


class Decoder:
    """The computation of one model, a function of weights handed in; holds no parameters itself."""

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        attn_implementation: str = "sdpa",
        trust_remote_code: bool = False,
        compile: bool = False,
    ) -> None:
        causal = build_skeleton(config, dtype, attn_implementation, trust_remote_code)
        self.config, self._causal = causal.config, causal
        self.dropout = has_dropout(causal)
        prefix = causal.base_model_prefix
        base = self._require(getattr(causal, prefix, None), f"a base model under {prefix!r}")
        layers = self._require(getattr(base, "layers", None), "a list of layers named 'layers'")
        norm = self._require(getattr(base, "norm", None), "a final norm named 'norm'")
        self._base, self._calls = base, list[tuple[torch.Tensor, Arguments]]()
        self.units: list[Unit] = []
        self._templates: dict[int, nn.Module] = {}
        ties = dict(causal.all_tied_weights_keys or {})
        shapes = {name: tuple(p.shape) for name, p in causal.named_parameters(remove_duplicate=False)}
        layer_prefix, norm_prefix = f"{prefix}.layers.", f"{prefix}.norm."
        outer = {k: v for k, v in shapes.items() if not k.startswith(prefix + ".") or k.startswith(norm_prefix)}
        inner = {
            k.removeprefix(prefix + "."): v
            for k, v in shapes.items()
            if k not in outer and not k.startswith(layer_prefix)
        }
        lookup = all(isinstance(base.get_submodule(name.rpartition(".")[0]), nn.Embedding) for name in inner)
        self.units.append(Unit(EMBEDDING, build_layout(inner, prefix + "."), structure=-1, cheap_graph=lookup))
        self._cut_layers(layers, layer_prefix)
        aliases = tuple((alias, EMBEDDING, owner) for alias, owner in ties.items() if alias in outer)
        for alias, owner in ties.items():
            if alias not in outer or owner.removeprefix(prefix + ".") not in inner:
                raise self._unsupported(f"{alias} is tied to {owner}, which is not the head to the embedding")
        own = {k: v for k, v in outer.items() if k not in ties}
        uses = (EMBEDDING,) if aliases else ()
        self.units.append(Unit(HEAD, build_layout(own), structure=-2, uses=uses, aliases=aliases))
        base.layers = nn.ModuleList(_Stub(layer, self._calls) for layer in layers)
        base.norm = nn.Identity()
        self._linear_name = ""
        self._linear = self._stream_output(causal)  # before the base goes: without it there are no output embeddings
        setattr(causal, prefix, _ChunkBase(norm))
        for module in (base, causal, *self._templates.values()):
            move_buffers(module, device)
            module.train(self.dropout)
        self._layers: dict[int, _Layer] = {}
        for structure, template in self._templates.items():
            function, name = layer_function(template), type(template).__name__
            self._layers[structure] = (
                _compiled_layer(function, name, dropout=self.dropout) if compile else _plain_layer(function)
            )

    def prologue(
        self, weights: Weights, input_ids: torch.Tensor, position_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[Arguments]]:
        """Input of the first layer ``[batch, tokens, width]`` and the arguments of every layer, in order."""
        self._calls.clear()
        arguments = {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False}
        with packing_known(position_ids is not None):
            functional_call(self._base, dict(weights), args=(), kwargs=arguments)
        if len(self._calls) != len(self.units) - 2:
            raise self._unsupported(f"its forward calls {len(self._calls)} of its {len(self.units) - 2} layers")
        hidden = self._calls[0][0]
        if any(other is not hidden for other, _ in self._calls):
            raise self._unsupported("its forward changes the hidden state between layers")
        calls = [arguments for _, arguments in self._calls]
        self._calls.clear()
        if hidden.requires_grad and any(t.requires_grad for t in tensors_in(calls)):
            raise self._unsupported("its layers take other arguments that depend on parameters")
        return hidden, calls

    def layer(
        self, unit: Unit, weights: Weights, hidden: torch.Tensor, arguments: Arguments, *, selective: bool = False
    ) -> torch.Tensor:
        """Output of one layer ``[batch, tokens, width]``; ``selective``: a graph of it keeps little but attention's."""
        functions = self._layers[unit.structure]
        return (functions.selective if selective else functions.forward)(dict(weights), hidden, arguments)

    def layer_gradients(
        self, unit: Unit, weights: Weights, hidden: torch.Tensor, arguments: Arguments, upstream: torch.Tensor
    ) -> Sequence[torch.Tensor | None]:
        """Gradients of a layer's input and of its weights, in their order, given its output's; computes it again."""
        return self._layers[unit.structure].gradients(dict(weights), hidden, arguments, upstream)

    def logits(self, weights: Weights, hidden: torch.Tensor, head_gradient: torch.Tensor | None = None) -> torch.Tensor:
        """Logits ``[n, vocab]`` of hidden states ``[n, width]``: final norm, head, and what the model adds.

        With ``head_gradient`` the backward adds the output matrix's gradient to it, and autograd sees none.
        """
        if self._linear is not None:
            self._linear.gradient = head_gradient
        try:
            output = functional_call(self._causal, dict(weights), args=(), kwargs={"inputs_embeds": hidden[None]})
        finally:
            if self._linear is not None:  # it would hold the largest buffer of the model beyond its end
                self._linear.gradient = None
        logits: torch.Tensor = output.logits[0]
        return logits

    @property
    def output_matrix(self) -> str | None:
        """Local name of the output matrix when its gradient can be summed in place."""
        return None if self._linear is None else self._linear_name

    @property
    def ignored_names(self) -> Sequence[str]:
        """Patterns of tensor names in checkpoints that this family ignores."""
        return tuple(self._causal._keys_to_ignore_on_load_unexpected or ())

    def train(self, mode: bool) -> None:
        """Switch dropout on or off, where the model has any."""
        if self.dropout:
            for module in (self._base, self._causal, *self._templates.values()):
                module.train(mode)

    def initial_weights(self, unit: Unit, seed: int) -> dict[str, torch.Tensor]:
        """Fresh FP32 weights of a unit by local name, drawn as the model's own initialisation does."""
        module = {-1: self._base, -2: self._causal}.get(unit.structure) or self._templates[unit.structure]
        shapes = {p.local: p.shape for p in unit.layout.parameters}
        owners = {name: module.get_submodule(name.rpartition(".")[0]) for name in shapes}
        meta = {name: module.get_parameter(name) for name in shapes}
        fresh = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            for name, owner in owners.items():
                owner._parameters[name.rpartition(".")[2]] = fresh[name]
            for part in dict.fromkeys(owners.values()):
                self._causal._init_weights(part)
            for name, owner in owners.items():
                owner._parameters[name.rpartition(".")[2]] = meta[name]
        return {name: parameter.detach() for name, parameter in fresh.items()}

    def _cut_layers(self, layers: nn.ModuleList, prefix: str) -> None:
        keys: dict[tuple[Any, ...], int] = {}
        for index, layer in enumerate(layers):
            structure = keys.setdefault(structure_key(layer), len(keys))
            self._templates.setdefault(structure, layer)
            shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
            layout = build_layout(shapes, f"{prefix}{index}.")
            self.units.append(Unit(f"layers.{index}", layout, structure=structure))

    def _stream_output(self, causal: PreTrainedModel) -> StreamedLinear | None:
        output = causal.get_output_embeddings()
        if type(output) is not nn.Linear or output.bias is not None:
            return None
        streamed = StreamedLinear(output.weight)
        causal.set_output_embeddings(streamed)
        self._linear_name = next(name + ".weight" for name, module in causal.named_modules() if module is streamed)
        return streamed

    def _require(self, part: Any, what: str) -> Any:
        if part is None:
            raise self._unsupported(f"it lacks {what}")
        return part

    def _unsupported(self, reason: str) -> UserError:
        return UserError(
            f"model: type {self.config.model_type!r} cannot be streamed: {reason}."
            " Decoders of the embed_tokens / layers / norm scheme are supported; see docs/models.md"
        )


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor inside nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []
