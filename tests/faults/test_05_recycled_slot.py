"""Backward never reads a slot that holds another unit by then, even where an operation hides its weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _engine import engine, joined, rows, tolerance
from _fixtures import tiny_config
from _oracle import Oracle, relative
from transformers.models.llama import modeling_llama

from megatrain import UserError

pytestmark = pytest.mark.usefixtures("one_thread")


class Hiding(torch.autograd.Function):
    """A linear map that keeps its weight on the context, unseen by saved-tensor hooks."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.hidden, ctx.weight = hidden, weight
        return hidden @ weight.T

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (output,) = outputs
        hidden = ctx.hidden.flatten(0, -2)
        return output @ ctx.weight, output.flatten(0, -2).T @ hidden


class HidingMLP(modeling_llama.LlamaMLP):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate = self.act_fn(Hiding.apply(hidden, self.gate_proj.weight))
        result: torch.Tensor = Hiding.apply(gate * self.up_proj(hidden), self.down_proj.weight)
        return result


def three_steps(device: str, **options: Any) -> None:
    config = tiny_config(num_hidden_layers=12)
    step = [joined(rows(2))]
    with engine(config, device, **options) as model:
        oracle = Oracle(config, model.state_dict(), own_loss=True, device=device)
        for _ in range(3):
            expected = oracle.step(step)
            result = model.step(step, keep_gradients=True)
            assert result.loss == pytest.approx(oracle.losses[-1], rel=1e-5)
            for name, gradient in model.gradients().items():
                assert relative(gradient, expected[name]) <= 20 * tolerance(device), name


@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize("slots", [1, 2, 14])
def test_gradients_of_every_layer(slots: int, activations: str, device: str) -> None:
    three_steps(device, slots=slots, activations=activations)


def test_an_operation_that_hides_its_weight(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(modeling_llama, "LlamaMLP", HidingMLP)
    three_steps(device, slots=2)
    with pytest.raises(UserError, match=r"activations: keep: the backward of layers\.\d \(llama\).*use recompute"):
        engine(tiny_config(), device, activations="keep")
