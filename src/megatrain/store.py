"""Host memory as the home of parameters and optimizer states.

A *slab* holds one unit's training state as flat sections: ``head`` (BF16, the array that streams to the device),
``tail`` (int16; head and tail join to the exact FP32 master), ``exp_avg`` and ``exp_avg_sq`` (FP32): 12 bytes a
parameter. With FP32 compute the head is the FP32 master itself and there is no tail.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from megatrain.devices._pages import ask_huge_pages
from megatrain.errors import UserError
from megatrain.kernels import Kernel
from megatrain.layout import PAGE, Layout, Parameter, mapping_bytes, ranges, round_up, slab_bytes, store_bytes

BLOCK = 1 << 22
"""Elements that are converted at a time: 16 MiB of FP32."""


class Arena:
    """One anonymous mapping, carved into named tensors; freed when the last of them is."""

    def __init__(self, nbytes: int, label: str) -> None:
        self.label, self.nbytes = label, mapping_bytes(nbytes)
        try:
            mapping = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise UserError(
                f"host memory: {label} needs {self.nbytes / 2**30:.2f} GiB and the system refused it ({error});"
                " free memory or choose a smaller model"
            ) from error
        self.memory = torch.frombuffer(mapping, dtype=torch.uint8)
        ask_huge_pages(self.memory)
        self._used = 0

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The next ``numel`` elements, page-aligned and zero."""
        nbytes = round_up(numel * dtype.itemsize, PAGE)
        piece = self.memory[self._used : self._used + numel * dtype.itemsize].view(dtype)
        self._used += nbytes
        return piece


Take = Callable[[int, torch.dtype], torch.Tensor]
"""Hands out zeroed memory for a number of elements of a dtype."""


class Slab:
    """One unit's training state, on the host or on the device. Padding stays zero in every section."""

    def __init__(
        self,
        layout: Layout,
        take: Take,
        compute_dtype: torch.dtype,
        gradient_dtype: torch.dtype,
        *,
        keeps_gradient: bool = True,
    ) -> None:
        self.layout = layout
        self.head = take(layout.numel, compute_dtype)
        split = compute_dtype is torch.bfloat16
        self.tail = take(layout.numel, torch.int16) if split else None
        self.exp_avg = take(layout.numel, torch.float32)
        self.exp_avg_sq = take(layout.numel, torch.float32)
        self.gradient = take(layout.numel if keeps_gradient else 0, gradient_dtype)
        """Where the update finds the unit's gradient; empty where it only passes."""
        self.steps = 0
        """Updates applied so far: the step count of Adam's bias correction."""

    @staticmethod
    def nbytes(
        layout: Layout, compute_dtype: torch.dtype, gradient_dtype: torch.dtype, *, keeps_gradient: bool = True
    ) -> int:
        """Bytes of a slab of this layout."""
        return slab_bytes(layout.numel, compute_dtype.itemsize, gradient_dtype.itemsize if keeps_gradient else 0)


class Store:
    """All slabs of a model, addressed by unit or by Hugging Face parameter name."""

    def __init__(
        self,
        layouts: Mapping[str, Layout],
        compute_dtype: torch.dtype,
        kernel: Kernel,
        register: Callable[[torch.Tensor], None],
        unregister: Callable[[torch.Tensor], None],
        gradient_dtype: torch.dtype,
        on_device: Mapping[str, Take] | None = None,
        first_touch: Callable[[Slab], None] | None = None,
        keeps_gradients: bool = True,
    ) -> None:
        """``on_device`` names the units whose state lives on the device, and where each takes its memory.

        ``first_touch`` gets every other slab before it is registered: who touches a page first decides where it lies.
        Without ``keeps_gradients`` there is a place for the gradients of units on the device only.
        """
        self._keeps_gradients = keeps_gradients
        self._kernel, self._unregister, self._first_touch = kernel, unregister, first_touch
        self._arenas: list[Arena] = []
        self._register = register
        self._results: Arena | None = None
        self._boundaries: Arena | None = None
        self._gradient_bytes = 0
        self._slabs: dict[str, Slab] = {}
        self._home: dict[str, str] = {}
        try:
            self._allocate(layouts, compute_dtype, gradient_dtype, on_device or {})
        except BaseException:
            self.close()
            raise

    def _allocate(
        self,
        layouts: Mapping[str, Layout],
        compute_dtype: torch.dtype,
        gradient_dtype: torch.dtype,
        on_device: Mapping[str, Take],
    ) -> None:
        for unit, layout in layouts.items():
            take = on_device.get(unit)
            if take is None:
                keeps = self._keeps_gradients
                nbytes = Slab.nbytes(layout, compute_dtype, gradient_dtype, keeps_gradient=keeps)
                arena = Arena(nbytes, f"training state of {unit}")
                slab = Slab(layout, arena.take, compute_dtype, gradient_dtype, keeps_gradient=keeps)
                if self._first_touch is not None:
                    self._first_touch(slab)
                self._keep(arena)
                self._gradient_bytes += slab.gradient.nbytes
            else:
                slab = Slab(layout, take, compute_dtype, gradient_dtype)
            self._slabs[unit] = slab
            for parameter in layout.parameters:
                self._home[parameter.name] = unit
        self._results = self.arena(PAGE, "results")

    @staticmethod
    def bytes_needed(
        layouts: Iterable[Layout],
        compute_dtype: torch.dtype,
        gradient_dtype: torch.dtype,
        boundaries: int = 0,
        landings: Iterable[int] | None = None,
    ) -> int:
        """What `nbytes` of a store for these units will be, before it is made, with bytes of ``boundaries``;
        ``landings``: elements of each buffer that gradients pass through, None where they are kept."""
        numels = (layout.numel for layout in layouts)
        return store_bytes(numels, compute_dtype.itemsize, gradient_dtype.itemsize, boundaries, landings)

    def landing(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory that gradients which are not kept pass through."""
        arena = self.arena(numel * dtype.itemsize, "gradients")
        self._gradient_bytes += arena.nbytes
        return arena.take(numel, dtype)

    def arena(self, nbytes: int, label: str) -> Arena:
        """A new arena that the device can copy from and to fast."""
        return self._keep(Arena(nbytes, label))

    def _keep(self, arena: Arena) -> Arena:
        self._register(arena.memory)
        self._arenas.append(arena)
        return arena

    @property
    def units(self) -> Sequence[str]:
        """Unit names in order."""
        return tuple(self._slabs)

    @property
    def nbytes(self) -> int:
        """Bytes of all arenas."""
        return sum(arena.nbytes for arena in self._arenas)

    @property
    def by_label(self) -> dict[str, int]:
        """`nbytes` by what they are for."""
        boundaries = 0 if self._boundaries is None else self._boundaries.nbytes
        state = self.nbytes - self._gradient_bytes - boundaries
        return {"masters and moments": state, "gradients": self._gradient_bytes, "boundary activations": boundaries}

    @property
    def parameter_names(self) -> Sequence[str]:
        """Hugging Face names of all parameters, in order of units and offsets."""
        return tuple(self._home)

    def slab(self, unit: str) -> Slab:
        """The slab of a unit."""
        return self._slabs[unit]

    def gradient(self, unit: str) -> torch.Tensor:
        """The unit's flat gradient as it left the device."""
        return self._slabs[unit].gradient

    def results(self, numel: int) -> torch.Tensor:
        """FP64 host memory that a device copies a step's few results to; the next step overwrites it."""
        if self._results is None or numel * 8 > self._results.nbytes:
            self._results = self.arena(numel * 8, "results")
        return self._results.memory[: numel * 8].view(torch.float64)

    def boundaries(self, nbytes: int) -> torch.Tensor:
        """At least ``nbytes`` (uint8) for boundary activations; where they have to grow, their content is lost."""
        if self._boundaries is not None and nbytes > self._boundaries.nbytes:
            self._unregister(self._boundaries.memory)
            self._arenas.remove(self._boundaries)
            self._boundaries = None
        if self._boundaries is None:
            self._boundaries = self.arena(nbytes, "boundary activations")
        return self._boundaries.memory

    def nbytes_with_boundaries(self, nbytes: int) -> int:
        """What `nbytes` will be with room for boundaries of so many bytes."""
        held = 0 if self._boundaries is None else self._boundaries.nbytes
        return self.nbytes - held + max(held, mapping_bytes(nbytes) if nbytes else 0)

    def layout(self, unit: str) -> Layout:
        """The layout of a unit."""
        return self._slabs[unit].layout

    def place(self, name: str) -> tuple[Slab, Parameter]:
        """Slab and place of a parameter; ``KeyError`` when there is none of that name."""
        slab = self._slabs[self._home[name]]
        return slab, slab.layout[name]

    def load_master(self, name: str, start: int, block: torch.Tensor) -> None:
        """Set elements ``start`` and following of a parameter to the FP32 values of ``block`` (1-D)."""
        slab, parameter = self.place(name)
        piece = slice(parameter.offset + start, parameter.offset + start + block.numel())
        if slab.tail is None:
            slab.head[piece].copy_(block)
            return
        head, tail = slab.head[piece], slab.tail[piece]
        if not head.is_cuda:
            self._kernel.split(block.contiguous(), head, tail)
            return
        halves = torch.empty(block.numel(), dtype=head.dtype), torch.empty(block.numel(), dtype=tail.dtype)
        self._kernel.split(block.contiguous(), *halves)
        head.copy_(halves[0])
        tail.copy_(halves[1])

    def master_blocks(self, name: str) -> Iterator[torch.Tensor]:
        """The parameter's FP32 master in order, in pieces of at most `BLOCK` elements on the host."""
        slab, parameter = self.place(name)
        for start, end in ranges(parameter.numel, BLOCK):
            piece = slice(parameter.offset + start, parameter.offset + end)
            block = torch.empty(end - start, dtype=torch.float32)
            if slab.tail is None:
                block.copy_(slab.head[piece])
            else:
                self._kernel.join(slab.head[piece].cpu(), slab.tail[piece].cpu(), block)
            yield block

    def master(self, name: str) -> torch.Tensor:
        """A copy of the FP32 master in its own shape."""
        return torch.cat(list(self.master_blocks(name))).view(self.place(name)[1].shape)

    def moment(self, name: str, which: str) -> torch.Tensor:
        """The 1-D FP32 view of ``exp_avg`` or ``exp_avg_sq`` of a parameter, in place."""
        slab, parameter = self.place(name)
        section: torch.Tensor = getattr(slab, which)
        return section[parameter.offset : parameter.end]

    def step_count(self, unit: str) -> int:
        """Updates applied to the unit."""
        return self._slabs[unit].steps

    def set_step_count(self, unit: str, steps: int) -> None:
        """Restore the number of updates applied to the unit."""
        self._slabs[unit].steps = steps

    def close(self) -> None:
        """Unregister and drop all memory."""
        for arena in self._arenas:
            self._unregister(arena.memory)
        self._arenas.clear()
        self._results = self._boundaries = None
        self._slabs.clear()
        self._home.clear()
