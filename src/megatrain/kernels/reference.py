"""The AdamW kernel in plain torch: the definition of right, and the fallback without a compiler.

Bitwise ``torch.optim.AdamW(fused=True)`` on the CPU for FP32 masters and unscaled FP32 gradients, but for the
last ``n % 16`` elements of a tensor, which the fused kernel rounds another way. The order of operations, with
every multiply-add that is rounded once, is::

    p  = p * decay                                  decay = 1 - lr * weight_decay
    m  = fma(1 - beta1, g - m, m)                   torch.lerp; fma(-beta1, g - m, g) if beta1 <= 0.5
    v  = fma((1 - beta2) * g, g, v * beta2)         torch.addcmul
    p  = p + (step_size * m) / (sqrt(v) / root_correction + eps)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatrain.kernels._adamw import AdamWScalars, adamw_scalars, common_length, dtype_name

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
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        step: int,
        grad_scale: float = 1.0,
    ) -> None:
        scalars = adamw_scalars(
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            weight_decay=weight_decay,
            step=step,
            grad_scale=grad_scale,
        )
        buffers = {"head": head, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "grad": grad}
        if tail is not None:
            buffers["tail"] = tail
            dtype_name("tail", tail, "int16")
        dtype_name("head", head, "float32" if tail is None else "bfloat16")
        dtype_name("exp_avg", exp_avg, "float32")
        dtype_name("exp_avg_sq", exp_avg_sq, "float32")
        dtype_name("grad", grad, "bfloat16", "float32")
        for part in _blocks(common_length(**buffers)):
            gradient = grad[part].float()
            if grad_scale != 1.0:
                gradient = gradient * scalars.grad_scale
            if tail is None:
                _update(head[part], exp_avg[part], exp_avg_sq[part], gradient, scalars)
            else:
                master = _joined(head[part], tail[part])
                _update(master, exp_avg[part], exp_avg_sq[part], gradient, scalars)
                _split_into(master, head[part], tail[part])

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


def _blocks(length: int) -> Iterator[slice]:
    return (slice(begin, min(begin + BLOCK, length)) for begin in range(0, length, BLOCK))


def _update(master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, scalars: AdamWScalars) -> None:
    master.mul_(scalars.decay)
    _lerp(exp_avg, grad, scalars.lerp_weight)
    exp_avg_sq.mul_(scalars.beta2).addcmul_(grad, grad, value=scalars.square_weight)
    # torch.sqrt on the CPU is off by one unit in the last place for some values; through double it is exact.
    denominator = exp_avg_sq.double().sqrt_().float()
    denominator.div_(scalars.root_correction).add_(scalars.eps)
    master.addcdiv_(exp_avg, denominator, value=scalars.step_size)


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
