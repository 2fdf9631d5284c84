"""What the functions of a layer compute, keep and leave out, counted in operations and bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _engine import engine
from _fixtures import FAMILIES, tiny_config
from _oracle import relative
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain import UserError
from megatrain.devices import _measure
from megatrain.engine.placement import Mode
from megatrain.engine.workspace import Shape
from megatrain.model_spec import spec_data, spec_from_data
from megatrain.models._functions import keeping_attention, layer_function, layer_gradients, pulled_back
from megatrain.models.decoder import Decoder

ROWS, TOKENS, WIDTH = 2, 24, 64
ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"
PRODUCTS = ("aten.mm.default", "aten.addmm.default")


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def layer_of(model_type: str = "tiny") -> tuple[Any, dict[str, torch.Tensor], torch.Tensor, dict[str, Any]]:
    """The function of a layer, its weights, an input and arguments."""
    decoder = Decoder(tiny_config(model_type), dtype=torch.float32, device=torch.device("cpu"))
    embedding, unit = decoder.units[:2]
    generator = torch.Generator().manual_seed(0)
    weights, lookup = (
        {p.local: torch.randn(p.shape, generator=generator) * 0.2 for p in u.layout.parameters}
        for u in (unit, embedding)
    )
    ids = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS) % 300
    hidden, context = decoder.prologue(lookup, ids, None)
    return layer_function(decoder._templates[unit.structure]), weights, hidden, context[0]


def counted(run: Callable[[], Any]) -> tuple[Any, Counter[str]]:
    with Counted() as counter:
        result = run()
    return result, counter.calls


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_pulled_back_are_those_of_autograd(family: str) -> None:
    function, *call = layer_of(family)
    upstream = torch.randn(ROWS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    expected = layer_gradients(function)(*call, upstream)
    found = pulled_back(function)(*call, upstream)
    assert len(found) == len(expected) == 1 + len(call[0])
    for mine, theirs in zip(found, expected, strict=True):
        assert mine is not None
        assert theirs is not None
        assert relative(mine, theirs) < 1e-5


def test_attention_that_is_kept_runs_once() -> None:
    function, weights, hidden, arguments = layer_of()
    upstream = torch.randn(ROWS, TOKENS, WIDTH)
    bound = {name: value.requires_grad_() for name, value in weights.items()}
    source = hidden.detach().requires_grad_()
    output, forward = counted(lambda: keeping_attention(function)(bound, source, arguments))
    grads, backward = counted(lambda: torch.autograd.grad(output, [source, *bound.values()], upstream))
    assert (forward[ATTENTION], backward[ATTENTION]) == (1, 0)
    assert sum(backward[name] for name in PRODUCTS) > 2 * sum(forward[name] for name in PRODUCTS), "computed again"
    plain = layer_gradients(function)
    expected, both = counted(lambda: plain(weights, hidden, arguments, upstream))
    assert both[ATTENTION] == 1
    for mine, theirs in zip(grads, expected, strict=True):
        assert theirs is not None
        assert torch.equal(mine, theirs)


def test_a_selective_graph_holds_attention_and_nothing_else() -> None:
    held = {}
    for mode in ("selective", "keep"):
        with engine(tiny_config(), "cpu", activations=mode) as model:
            model.reserve(ROWS, TOKENS, 1)
            need = model._engine._workspaces.need(Shape(ROWS, TOKENS, packed=False), mode)  # type: ignore[arg-type]
            held[mode] = need.held["graph", 0]
    config = tiny_config()
    attention = 4 * ROWS * TOKENS * config.hidden_size  # heads x head size
    sums = 4 * ROWS * TOKENS * config.num_attention_heads
    assert attention + sums <= held["selective"] <= attention + sums + 4096
    planned = spec_from_data("tiny", spec_data(config.to_dict())).selective_bytes(4)
    assert planned * ROWS * TOKENS == attention + sums
    assert held["keep"] > 5 * held["selective"]


@pytest.mark.parametrize("mode", ["selective", "keep"])
def test_a_graph_that_is_dropped_holds_nothing(mode: Mode) -> None:
    """Measuring drops them before the first step; an operation that saves its own output must not hold itself."""
    with engine(tiny_config(), "cpu", activations=mode) as model:
        model.reserve(ROWS, TOKENS, 1)
        spaces = model._engine._workspaces
        shape = Shape(ROWS, TOKENS, packed=False)
        counter = _measure._LiveBytes()
        with counter:
            spaces.measure(shape, mode)
        assert counter.peak > 0
        assert counter.live == 0


def test_what_a_selective_forward_leaves_is_what_it_says() -> None:
    function, weights, hidden, arguments = layer_of()
    bound = {name: value.requires_grad_() for name, value in weights.items()}
    counter = _measure._LiveBytes()
    with counter:
        output = keeping_attention(function)(bound, hidden.requires_grad_(), arguments)
    attention = 4 * ROWS * TOKENS * (WIDTH + 4)
    assert counter.live == attention + output.untyped_storage().nbytes()


def test_selective_is_refused_where_there_is_nothing_to_keep() -> None:
    """Attention in separate operations: it would be a recompute under another name."""
    options = {"activations": "selective", "attn_implementation": "eager"}
    with (
        pytest.raises(UserError, match=r"selective: layers\.\d \(llama\) uses no fused attention"),
        engine(tiny_config(), "cpu", **options),
    ):
        pass


@pytest.mark.parametrize(
    "activations",
    ["some", "keep 20", "selective 120%", "", "keep 10%,", "keep 80%, selective 50%", "selective, keep", 3],
)
def test_activations_that_mean_nothing_are_refused(activations: Any) -> None:
    with pytest.raises(UserError, match=r"compute\.activations"), engine(tiny_config(), "cpu", activations=activations):
        pass
