"""What `auto` in a run's options becomes: the fastest placement for this machine, model and data. No torch.

An option that is set is never changed. The choice is part of the run's `resolved.yaml` and of its saves, so a run goes
on with it when it is resumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatrain.choices import Request
from megatrain.config import RunConfig, flat_options, parse_bytes
from megatrain.costs import LIBRARIES
from megatrain.engine.placement import check_passing
from megatrain.errors import UserError
from megatrain.loggers._screens import short_time
from megatrain.machines import MachineSpec
from megatrain.model_spec import ModelSpec
from megatrain.planner import limited_by, refusal, settings
from megatrain.search import DEVICE_MARGIN, HOST_MARGIN, Candidate, Search

OPTIONS: Mapping[str, Any] = {
    "train.micro_batch_size": 4,
    "placement.slots": 2,
    "placement.weights": None,
    "placement.states": None,
    "compute.activations": "recompute",
    "compute.boundaries": "device",
    "compute.boundary_every": 1,
    "compute.order": "layer",
}
"""The options that may be `auto`, and what they become where nothing can be planned."""

_SMALLER = 0.8  # of the device memory of the plan before, where that did not fit
_LEAST = 0.2


def is_open(config: RunConfig) -> bool:
    """Whether any option is `auto`."""
    return "auto" in (flat_options(config)[name] for name in OPTIONS)


def fixed_options(config: RunConfig) -> dict[str, Any]:
    """Those of `OPTIONS` that are set."""
    return {name: value for name, value in flat_options(config).items() if name in OPTIONS and value != "auto"}


def compiles(config: RunConfig, device: str) -> bool:
    """Whether layers are compiled on ``device`` (``cpu``, ``cuda``)."""
    return device == "cuda" if config.compute.compile is None else config.compute.compile


def request_of(config: RunConfig, *, rows: int, seq_len: int, **step: Any) -> Request:
    """What a run asks of the planner for steps of ``rows`` x ``seq_len``; ``step``: what its config leaves open. Raises
    `UserError` for options that contradict each other."""
    passing = config.placement.gradients == "passing"
    if passing:
        check_passing(config.optim.max_grad_norm, config.optim.clipping)
    return Request(
        rows=rows,
        seq_len=seq_len,
        speculated=config.optim.speculated,
        selective=config.model.attn_implementation == "sdpa",
        gradient_dtype=config.compute.gradient_dtype,
        passing_gradients=passing,
        device_memory=parse_bytes("placement.device_memory", config.placement.device_memory),
        host_memory=parse_bytes("placement.host_memory", config.placement.host_memory),
        fixed=fixed_options(config),
        **step,
    )


def with_options(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """The config with ``values`` (option name -> value) in place of each `auto`; other options stay."""
    for name, value in values.items():
        section, _, key = name.partition(".")
        part = getattr(config, section)
        if getattr(part, key) == "auto":
            config = replace(config, **{section: replace(part, **{key: value})})
    return config


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A run's config without any `auto`.

    ``lines`` say what was chosen; ``seconds`` is the predicted step; ``device_limit`` is what the step may take of the
    device, where no option says so.
    """

    config: RunConfig
    lines: tuple[str, ...] = ()
    seconds: float | None = None
    device_limit: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chooser:
    """Chooses for one run."""

    config: RunConfig
    model: ModelSpec
    machine: MachineSpec
    request: Request
    share: float = 1.0
    """Of the device memory that a plan may use."""
    saved: RunConfig | None = None
    """What was chosen before the run was saved: it is tried first, as this may be another machine."""

    def choose(self) -> Choice:
        """The saved choice, or the fastest that is predicted to fit; raises `UserError` with ways out when none is.

        Where nothing leaves the margins free the plan may use them up. On the CPU, whose activations are predicted less
        well, and where the engine has refused a choice already, the smallest one is chosen in the end: the engine
        measures whether it fits.
        """
        if self.saved is not None:
            return Choice(config=self.saved, device_limit=self._device_limit)
        for device_margin, host_margin in ((DEVICE_MARGIN, HOST_MARGIN), (0.0, 0.0)):
            search = Search(
                self.model,
                self.machine,
                self.request,
                device_margin=1 - (1 - device_margin) * self.share,
                host_margin=host_margin,
            )
            found = search.best()
            if found:
                return self._choice(search, found[0])
        if self.machine.unified or self.share < 1:
            smallest = search.smallest()
            if self.machine.unified or search.host_need(smallest.choice) <= search.host_limit:
                return self._choice(search, smallest)
        raise UserError(refusal(Search(self.model, self.machine, self.request), "train"))

    def after(self, error: UserError) -> Chooser | None:
        """Who chooses next when the engine has refused a choice for what it measured; None where nothing is left."""
        text = str(error)
        if self.saved is not None and text.startswith(("compute.activations:", "placement.device_memory:")):
            return replace(self, saved=None)
        if text.startswith("compute.activations:") and self.config.compute.activations == "auto":
            if "selective" in text and self.request.selective:
                return replace(self, request=replace(self.request, selective=False))
            fixed = {**self.request.fixed, "compute.activations": "recompute"}
            return replace(self, request=replace(self.request, fixed=fixed))
        if not text.startswith("placement.device_memory:") or self.share * _SMALLER < _LEAST:
            return None
        return replace(self, share=self.share * _SMALLER)

    def _choice(self, search: Search, candidate: Candidate) -> Choice:
        config = with_options(self.config, settings(search, candidate))
        return Choice(
            config=config,
            lines=tuple(_lines(search, candidate)),
            seconds=candidate.timeline.seconds,
            device_limit=self._device_limit,
        )

    @property
    def _device_limit(self) -> int | None:
        if self.request.device_memory is not None:
            return None  # the engine's own contract
        if self.machine.unified:
            return self.machine.gpu_memory
        return int(self.machine.gpu_memory * (1 - DEVICE_MARGIN / 2)) - LIBRARIES


def _lines(search: Search, candidate: Candidate) -> Iterator[str]:
    """What was chosen, for people."""
    choice, layers, units = candidate.choice, search.model.layers, len(search.model.units)
    rows = search.costs(choice.micro_batches, choice.major).workload.micro_rows
    kept = {
        f"state of {choice.states} of {units} units": choice.states,
        f"weights of {choice.weights} of {units} units": choice.weights > choice.states,
        f"activations of {choice.kept} of {layers} layers": choice.kept,
        f"attention's output of {choice.selective} of {layers} layers": choice.selective,
    }
    ways = {
        "inputs of layers on the host": choice.host,
        f"only every {choice.every}. layer's input kept": choice.every > 1,
        "one micro-batch after the other": choice.major,
    }
    resident = ", ".join(text for text, applies in kept.items() if applies) or "nothing that could stream"
    others = "".join(f" · {text}" for text, applies in ways.items() if applies)
    sizes = f"micro-batches of {rows} row{'s' * (rows > 1)} · {choice.slots} slot{'s' * (choice.slots > 1)}"
    yield f"plan    {sizes} · resident: {resident}{others}"
    timeline, limit = candidate.timeline, limited_by(search.machine, candidate.timeline)
    yield f"        {short_time(timeline.seconds)} a step predicted, limited by {limit} · {search.machine.name}"
