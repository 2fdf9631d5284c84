"""The AdamW kernel in plain torch: the definition of right, and the fallback without a compiler.

Bitwise ``torch.optim.AdamW(fused=True)`` on the CPU for FP32 masters and unscaled FP32 gradients, but for the
last ``n % 16`` elements of a tensor, which the fused kernel rounds another way. The order of operations, with
every multiply-add that is rounded once, is::

    p  = p * decay                                  decay = 1 - lr * weight_decay
    m  = fma(1 - beta1, g - m, m)                   torch.lerp; fma(-beta1, g - m, g) if beta1 <= 0.5
    v  = fma((1 - beta2) * g, g, v * beta2)         torch.addcmul
    p  = p + (step_size * m) / (sqrt(v) / root_correction + eps)

The correction of a speculative step, with the weights and rescales of ``AdamWCorrection``::

    m" = fma(g, first_weight, m) * first_rescale
    v" = max(fma(second_weight * g, g, v), 0) * second_rescale
    p" = (p + (change(m", v") * change_weight - change(m, v))) * master_rescale
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from megatrain.kernels._adamw import (
    SPECULATION_BLOCK,
    AdamWCorrection,
    AdamWScalars,
    AdamWSettings,
    adamw_correction,
    adamw_scalars,
    check_factor,
    check_speculation,
    check_waiting,
    common_length,
    dtype_name,
    speculation_reach,
)

# Bounds the temporaries: about six FP32 values an element.
BLOCK = 1 << 20


class ReferenceKernel:
    """Plain torch; see ``megatrain.kernels.Kernel``. The threads are torch's, shared with the process."""

    name = "reference"

    def __init__(self, reason: str = "asked for by name") -> None:
        self.reason = reason

    @property
    def threads(self) -> int:
        return torch.get_num_threads()

    def set_threads(self, count: int) -> None:
        torch.set_num_threads(count)

    @torch.no_grad()
    def adamw(
        self,
        head: Tensor,
        tail: Tensor | None,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        grad: Tensor,
        *,
        grad_scale: float = 1.0,
        **settings: Unpack[AdamWSettings],
    ) -> None:
        scalars = adamw_scalars(grad_scale, settings)
        for state in _States(head, tail, exp_avg, exp_avg_sq, grad).parts():
            _step(state, scalars)

    @torch.no_grad()
    def adamw_speculate(
        self,
        head: Tensor,
        tail: Tensor | None,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        grad: Tensor,
        waiting: Tensor,
        **settings: Unpack[AdamWSettings],
    ) -> None:
        scalars, reach = adamw_scalars(1.0, settings), speculation_reach(settings)
        check_speculation(settings)
        whole = _States(head, tail, exp_avg, exp_avg_sq, grad)
        check_waiting(waiting, len(head))
        for index, state in enumerate(whole.parts(SPECULATION_BLOCK)):
            size = state.grad.float().abs()
            fits = (size <= torch.finfo(torch.float32).max) & (size * reach <= _root(state.exp_avg_sq))
            waiting[index] = not fits.all()
            if not waiting[index]:
                _step(state, scalars)

    @torch.no_grad()
    def adamw_resolve(
        self,
        head: Tensor,
        tail: Tensor | None,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        grad: Tensor,
        waiting: Tensor,
        *,
        factor: float,
        **settings: Unpack[AdamWSettings],
    ) -> None:
        check_factor(factor)
        check_speculation(settings)
        scalars, correction = adamw_scalars(factor, settings), adamw_correction(factor, settings)
        whole = _States(head, tail, exp_avg, exp_avg_sq, grad)
        check_waiting(waiting, len(head))
        for state, waits in zip(whole.parts(SPECULATION_BLOCK), waiting.tolist(), strict=True):
            if waits and factor > 0:
                _step(state, scalars)
            elif not waits and factor < 1:
                _correct(state, scalars, correction)

    def split(self, master: Tensor, head: Tensor, tail: Tensor) -> None:
        dtype_name("master", master, "float32")
        dtype_name("head", head, "bfloat16")
        dtype_name("tail", tail, "int16")
        for part in _blocks(common_length(master=master, head=head, tail=tail)):
            _split_into(master[part], head[part], tail[part])

    def join(self, head: Tensor, tail: Tensor, master: Tensor) -> None:
        dtype_name("head", head, "bfloat16")
        dtype_name("tail", tail, "int16")
        dtype_name("master", master, "float32")
        for part in _blocks(common_length(head=head, tail=tail, master=master)):
            master[part].copy_(_joined(head[part], tail[part]))

    def first_touch(self) -> None:
        """torch's threads are bound to no cores."""


class _States(NamedTuple):
    """The buffers of a call or of a part of it."""

    head: Tensor
    tail: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor
    grad: Tensor

    def parts(self, block: int = BLOCK) -> Iterator[_States]:
        """Pieces of ``block`` elements, after checking types and lengths."""
        buffers = {name: buffer for name, buffer in self._asdict().items() if buffer is not None}
        if self.tail is not None:
            dtype_name("tail", self.tail, "int16")
        dtype_name("head", self.head, "float32" if self.tail is None else "bfloat16")
        dtype_name("exp_avg", self.exp_avg, "float32")
        dtype_name("exp_avg_sq", self.exp_avg_sq, "float32")
        dtype_name("grad", self.grad, "bfloat16", "float32")
        for part in _blocks(common_length(**buffers), block):
            tail = None if self.tail is None else self.tail[part]
            yield _States(self.head[part], tail, self.exp_avg[part], self.exp_avg_sq[part], self.grad[part])

    def master(self) -> Tensor:
        """The FP32 master: the head itself, or a copy that `put` takes back."""
        return self.head if self.tail is None else _joined(self.head, self.tail)

    def put(self, master: Tensor) -> None:
        """Store the changed ``master``."""
        if self.tail is not None:
            _split_into(master, self.head, self.tail)


def _blocks(length: int, block: int = BLOCK) -> Iterator[slice]:
    return (slice(begin, min(begin + block, length)) for begin in range(0, length, block))


def _step(state: _States, scalars: AdamWScalars) -> None:
    master, grad = state.master(), state.grad.float()
    if scalars.grad_scale != 1.0:
        grad = grad * scalars.grad_scale
    master.mul_(scalars.decay)
    _lerp(state.exp_avg, grad, scalars.lerp_weight)
    state.exp_avg_sq.mul_(scalars.beta2).addcmul_(grad, grad, value=scalars.square_weight)
    master.add_(_change(state.exp_avg, state.exp_avg_sq, scalars))
    state.put(master)


def _correct(state: _States, scalars: AdamWScalars, correction: AdamWCorrection) -> None:
    master, grad = state.master(), state.grad.float()
    taken = _change(state.exp_avg, state.exp_avg_sq, scalars)
    state.exp_avg.addcmul_(grad, torch.tensor(correction.first_weight)).mul_(correction.first_rescale)
    square = torch.addcmul(state.exp_avg_sq, grad, grad, value=correction.second_weight)
    state.exp_avg_sq.copy_(torch.where(square > 0, square, 0)).mul_(correction.second_rescale)
    change = _change(state.exp_avg, state.exp_avg_sq, scalars).mul_(correction.change_weight).sub_(taken)
    master.add_(change).mul_(correction.master_rescale)
    state.put(master)


def _change(exp_avg: Tensor, exp_avg_sq: Tensor, scalars: AdamWScalars) -> Tensor:
    """What the moments move the master by, without decay."""
    denominator = _root(exp_avg_sq).div_(scalars.root_correction).add_(scalars.eps)
    return (exp_avg * scalars.step_size).div_(denominator)


def _root(exp_avg_sq: Tensor) -> Tensor:
    """torch.sqrt on the CPU is off by one unit in the last place for some values; through double it is exact."""
    return exp_avg_sq.double().sqrt_().float()


def _lerp(exp_avg: Tensor, grad: Tensor, weight: float) -> None:
    if weight < 0.5:
        exp_avg.lerp_(grad, weight)
    else:
        # torch.lerp starts from the nearer end too, but signs a zero by whether an element fills a vector
        # register.
        coefficient = torch.tensor(weight) - 1
        exp_avg.copy_(torch.addcmul(grad, grad - exp_avg, coefficient))


def _joined(head: Tensor, tail: Tensor) -> Tensor:
    bits = head.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    return bits.add_(tail).view(torch.float32)


def _split_into(master: Tensor, head: Tensor, tail: Tensor) -> None:
    bits = master.view(torch.int32)
    # Narrowing keeps the low 16 bits, so the sign that the arithmetic shift spreads upwards is dropped again.
    tail.copy_(bits)
    head.view(torch.int16).copy_((bits + 0x8000).bitwise_right_shift_(16))
