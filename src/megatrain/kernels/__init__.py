"""Optimizer kernels on the host: one AdamW pass over a unit's state, and the split FP32 master.

``load`` picks the implementation. ``reference`` is plain torch and defines the right result; ``native`` is
C++ with explicit SIMD, gives the same bits and is several times faster. Both work in place on flat buffers.

The split master keeps an FP32 value as two 16-bit halves: the *head* is its nearest bfloat16 (ties away from
zero) and goes to the device as the compute weight, the *tail* is the rest. With FP32 compute the head is the
master itself and there is no tail.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Literal, Protocol

from megatrain.kernels._adamw import AdamWSettings as AdamWSettings
from megatrain.kernels._adamw import blocks_of as blocks_of
from megatrain.kernels._adamw import can_take_back as can_take_back

if TYPE_CHECKING:
    from typing import Unpack

    from torch import Tensor

# Time of one AdamW pass, reference over native: 2 cores of an AVX-512 Xeon, 64 Mi parameters, split master.
REFERENCE_SLOWDOWN = 8

_logger = logging.getLogger(__name__)


class Kernel(Protocol):
    """What the optimizer needs from a kernel.

    Buffers are flat, contiguous, in host memory and of one length. They are torch tensors; ``native`` takes
    NumPy arrays of the same layout too (bfloat16 as uint16). A wrong type or length is a TypeError or
    ValueError.
    """

    name: str
    reason: str  # why this kernel is in use, one sentence for people

    @property
    def threads(self) -> int:
        """Threads that a large call uses."""

    def set_threads(self, count: int) -> None:
        """Use ``count`` threads from now on (at least 1)."""

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
        """Update master and moments in place by one step of AdamW (Loshchilov and Hutter, arXiv 1711.05101).

        ``head`` [n] is bfloat16 with ``tail`` [n] int16, or float32 with ``tail`` None; the moments [n] are float32;
        ``grad`` [n] is bfloat16 or float32 and is multiplied by ``grad_scale``.
        """

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
        """Update, before the clip factor is known, every block whose update can be corrected.

        Blocks are of 4,096 elements from the start of the buffers; the last may be shorter. One gets the update of
        `adamw` with ``grad_scale`` 1 if in all its elements g is finite, (1 - beta1) |g| <= 8 sqrt(v) and (1 - beta2)
        g^2 <= 8 v, with v the second moment before. Any other is left as it is. ``waiting`` [blocks] uint8 is set to 0
        and to 1. ValueError where beta1, beta2 or 1 - lr * weight_decay is below a half: `adamw_resolve` divides by
        them.
        """

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
        """Complete `adamw_speculate`, given the clip factor: the result is that of `adamw` with it as ``grad_scale``.

        Gradient, flags and settings are those of that call. Factor 1 is bitwise: waiting blocks are updated, no other
        is touched. With a smaller one waiting blocks are bitwise too and the others are corrected. Factor 0 stands for
        no step: waiting blocks are left alone and the others put back. Corrected elements of a state that Adam can
        reach are within 2e-6 of v, of max(sqrt(v), |m|) and, for the master, of max(lr, its change) plus 3 units in
        the last place; within 3e-6 where a beta is below 0.9 (measured at the edge of the guard; v is also off by up
        to 2^-146 near the smallest denormal).
        """

    def split(self, master: Tensor, head: Tensor, tail: Tensor) -> None:
        """Write ``master`` [n] float32 to its halves, ``head`` [n] bfloat16 and ``tail`` [n] int16."""

    def join(self, head: Tensor, tail: Tensor, master: Tensor) -> None:
        """Write the value of ``head`` and ``tail`` to ``master`` [n] float32; undoes ``split`` exactly."""

    def first_touch(self) -> DeviceKernel | None:
        """A kernel whose ``adamw`` changes nothing and makes the pages of its buffers present near the cores that will
        update them, where they are not present yet. None where all memory is equally near.
        """


class DeviceKernel(Protocol):
    """The same update for state that lives on the device; asynchronous, and blind to the result of the step."""

    def adamw(
        self,
        head: Tensor,
        tail: Tensor | None,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        grad: Tensor,
        *,
        grad_scale: Tensor,
        **settings: Unpack[AdamWSettings],
    ) -> None:
        """As `Kernel.adamw`; ``grad_scale`` is FP64 ``[norm, factor]``, and a norm that is not finite updates
        nothing."""


def load(name: Literal["auto", "native", "reference"] = "auto") -> Kernel:
    """Return a kernel: ``auto`` is ``native`` where it works, else ``reference`` with one warning that says
    why.

    Raises UserError when ``native`` is asked for by name and does not work, or the name is unknown.
    """
    from megatrain.errors import UserError

    if name == "auto":
        return _automatic()
    if name == "reference":
        return _reference("asked for by name")
    if name == "native":
        from megatrain.kernels.native import NativeKernel, NativeUnavailable

        try:
            return NativeKernel()
        except NativeUnavailable as error:
            raise UserError(f"optimizer kernel 'native' is not usable: {error}") from error
    raise UserError(f"optimizer kernel {name!r} is unknown; choose auto, native or reference")


@cache
def _automatic() -> Kernel:
    """The process-wide choice; cached, so that its warning comes once."""
    from megatrain.kernels.native import NativeKernel, NativeUnavailable

    try:
        return NativeKernel()
    except NativeUnavailable as error:
        reason = str(error)
    _logger.warning(
        "the native optimizer kernel is not usable, the plain torch one is (about %d times slower): %s",
        REFERENCE_SLOWDOWN,
        reason,
    )
    return _reference(reason)


def _reference(reason: str) -> Kernel:
    from megatrain.kernels.reference import ReferenceKernel

    return ReferenceKernel(reason)
