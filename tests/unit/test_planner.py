"""Plans: close to what was measured, within every capacity, never slower with more memory, or refused with ways out."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.engine.placement import resident_units
from megatrain.errors import UserError
from megatrain.layout import slab_bytes
from megatrain.machines import MachineSpec, known_machines, load_machine
from megatrain.model_spec import ModelSpec, known_models, load_model_spec
from megatrain.planner import Plan, plan
from megatrain.search import Choice, Request, Search

GIB = 2**30
model = cache(load_model_spec)
machine = cache(load_machine)

# Qwen2.5-7B on one H200 with 16 cores and 128 GiB, sequence 1024: states on the device, layers kept, speculative, rows,
# seconds a step, device peak in GiB (None: measured with another chunk of the loss). benchmarks/results
MEASURED = [
    (0, 0, False, 16, 3.15, None),
    (0, 0, False, 16, 3.08, None),
    (0, 0, False, 64, 6.63, 31.1),
    (0, 0, False, 64, 6.82, 31.2),
    (0, 0, True, 16, 2.30, 13.0),
    (0, 0, True, 64, 6.22, 31.2),
    (30, 0, False, 16, 1.59, 108.4),
    (30, 7, False, 16, 1.456, 123.7),
    (6, 5, False, 64, 5.79, 90.5),
    (26, 0, False, 64, 6.30, 114.2),
    (20, 0, False, 128, 12.35, 120.2),
]


@pytest.mark.parametrize(("states", "kept", "speculative", "rows", "seconds", "peak"), MEASURED)
def test_predictions_against_what_was_measured(
    states: int, kept: int, speculative: bool, rows: int, seconds: float, peak: float | None
) -> None:
    search = Search(model("qwen2.5-7b"), machine("h200-128gb"), Request(rows=rows, seq_len=1024))
    choice = Choice(2, states, kept, 1, speculative)
    assert search.timeline(choice).seconds == pytest.approx(seconds, rel=0.1)
    if peak is not None:
        assert peak <= search.peak(choice)[0] / GIB <= 1.06 * peak


def test_host_bytes_against_what_was_measured() -> None:
    search = Search(model("qwen2.5-7b"), machine("h200-128gb"), Request(rows=64, seq_len=1024))
    for states, host in ((0, 99.3), (6, 77.0), (26, 16.2)):
        assert sum(search.host_bytes(Choice(2, states, 0, 1, False)).values()) / GIB == pytest.approx(host, rel=0.005)


def test_auto_is_at_least_as_fast_as_the_best_set_by_hand() -> None:
    for rows, by_hand in ((16, Choice(2, 30, 7, 1, False)), (64, Choice(2, 6, 5, 1, False))):
        request = Request(rows=rows, seq_len=1024)
        found = plan(model("qwen2.5-7b"), machine("h200-128gb"), request)
        assert found.seconds <= Search(model("qwen2.5-7b"), machine("h200-128gb"), request).timeline(by_hand).seconds


requests = st.builds(
    Request,
    rows=st.sampled_from([1, 3, 8, 16, 48, 256]),
    seq_len=st.sampled_from([128, 1024, 4096, 32768]),
    clipping=st.sampled_from(["auto", "deferred", "speculative"]),
    compute_dtype=st.sampled_from(["bfloat16", "float32"]),
    gradient_dtype=st.sampled_from([None, "float32"]),
    device_memory=st.sampled_from([None, 2 * GIB, 12 * GIB, 40 * GIB]),
    host_memory=st.sampled_from([None, 8 * GIB, 100 * GIB]),
)
SMALL = [name for name in known_models() if model(name).parameters < 9e9]


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(SMALL), st.sampled_from(known_machines()), requests)
def test_a_plan_stays_within_every_capacity_or_is_refused(name: str, where: str, request: Request) -> None:
    spec, host = model(name), machine(where)
    if not Search(spec, host, request).best():
        with pytest.raises(UserError, match=r"missing: .* of (GPU|host) memory \(\d+ bytes\)"):
            plan(spec, host, request)
        return
    found = plan(spec, host, request)
    assert found.device_peak <= found.device_limit <= 0.95 * min(host.gpu_memory, request.device_memory or 1 << 62)
    assert found.host_total <= found.host_limit <= 0.9 * min(host.host_memory, request.host_memory or 1 << 62)
    assert found.request == request
    assert all(other.seconds >= found.seconds for other in found.next_best)


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(SMALL), requests, st.floats(1, 4), st.floats(1, 4))
def test_more_memory_is_never_slower(name: str, request: Request, gpu: float, host: float) -> None:
    small = machine("rtx4090-128gb")
    large = replace(small, host_memory=int(small.host_memory * host), gpu_memory=small.gpu_memory)
    asked = replace(request, device_memory=int(8 * GIB))
    more = replace(request, device_memory=int(8 * GIB * gpu))
    try:
        found = plan(model(name), small, replace(asked, host_memory=request.host_memory))
    except UserError:
        return
    assert plan(model(name), large, more).seconds <= found.seconds


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(SMALL), requests, st.randoms(use_true_random=False))
def test_quick_bounds_are_bounds(name: str, request: Request, random: object) -> None:
    """What the search passes over by its bounds could not have been the answer."""
    search = Search(model(name), machine("h200-128gb"), request)
    for choice in random.sample(search._choices, 10):  # type: ignore[attr-defined]
        assert search._bound(choice) <= search.timeline(choice).seconds * (1 + 1e-9)
        assert search._least_device(choice) <= search.peak(choice)[0]


def settings_of(found: Plan) -> dict[str, str]:
    return dict(override.split("=", 1) for override in found.overrides)


@pytest.mark.parametrize(
    ("name", "where", "rows"), [("qwen2.5-7b", "h200-128gb", 64), ("smollm2-135m", "rtx4090-128gb", 8)]
)
def test_overrides_mean_what_was_planned(name: str, where: str, rows: int) -> None:
    """`placement.states` and `compute.activations` choose the units that the simulation had on the device."""
    spec = model(name)
    search = Search(spec, machine(where), Request(rows=rows, seq_len=1024))
    sizes = {unit.name: slab_bytes(unit.layout.numel, 2, 2) for unit in spec.units}
    layers = [unit.name for unit in spec.units[1:-1]]
    for candidate in search.best():
        found = settings_of(plan_of(spec, machine(where), search.request, candidate.choice))
        states = None if found["placement.states"] == "null" else found["placement.states"]
        assert resident_units("placement.states", states, sizes) == set(list(sizes)[: candidate.choice.states])
        share = {"recompute": "0%", "keep": "100%"}.get(found["compute.activations"], found["compute.activations"])
        kept = resident_units("compute.activations", share, dict.fromkeys(reversed(layers), 1))
        assert kept == set(layers[len(layers) - candidate.choice.kept :])


def plan_of(spec: ModelSpec, where: MachineSpec, request: Request, choice: Choice) -> Plan:
    from megatrain.planner import _plan

    search = Search(spec, where, request)
    candidate = search._candidate(choice)
    assert candidate is not None
    return _plan(search, [candidate])


@pytest.mark.parametrize("kept", range(1, 61))
def test_a_share_keeps_whole_layers(kept: int) -> None:
    for total in (28, 30, 36, 48, 61, 126):
        if kept < total:
            share = -(-kept * 10_000 // total) / 100
            layers = {str(i): 1 for i in range(total)}
            assert len(resident_units("compute.activations", f"{share:g}%", layers)) == kept


@pytest.mark.parametrize(
    ("name", "where", "request_", "ways"),
    [
        ("qwen2.5-72b", "h200-128gb", Request(rows=64, seq_len=1024), ["--machine h200-1.5tb", "--model qwen2.5-14b"]),
        ("qwen2.5-7b", "rtx4090-128gb", Request(rows=4, seq_len=65536), ["data.max_seq_len=16384", "--machine"]),
        (
            "qwen2.5-7b",
            "h200-128gb",
            Request(rows=64, seq_len=1024, host_memory=20 * GIB, device_memory=30 * GIB),
            ["placement.device_memory=", "placement.host_memory=131072MiB", "--machine h200-1.5tb"],
        ),
        (
            "qwen2.5-14b",
            "h200-128gb",
            Request(rows=64, seq_len=1024, compute_dtype="float32"),
            ["compute.dtype=bfloat16", "train.batch_size=", "data.max_seq_len="],
        ),
    ],
)
def test_a_refusal_names_the_bytes_and_ways_out(name: str, where: str, request_: Request, ways: list[str]) -> None:
    begun = time.monotonic()
    with pytest.raises(UserError) as error:
        plan(model(name), machine(where), request_)
    assert time.monotonic() - begun < 15, "a few seconds even when others use this machine"
    lines = str(error.value).splitlines()
    assert re.match(rf"plan: {re.escape(name)} does not fit {re.escape(where)} at \d+ x \d+ tokens a step", lines[0])
    assert [line for line in lines if re.match(r"  missing: [\d.]+ [KMG]iB of (GPU|host) memory \(\d+ bytes\)", line)]
    fixes = [line.removeprefix("  fix:").strip() for line in lines if line.startswith("  fix:")]
    assert 1 <= len(fixes) <= 3
    for fix, way in zip(fixes, ways, strict=False):
        assert fix.startswith(way), str(error.value)


def test_a_way_out_is_a_way_out() -> None:
    request = Request(rows=4, seq_len=65536)
    with pytest.raises(UserError, match=r"data\.max_seq_len=16384 +([\d.]+) s") as error:
        plan(model("qwen2.5-7b"), machine("rtx4090-128gb"), request)
    promised = re.search(r"data\.max_seq_len=16384 +([\d.]+) s", str(error.value))
    assert promised is not None
    found = plan(model("qwen2.5-7b"), machine("rtx4090-128gb"), replace(request, seq_len=16384))
    assert found.seconds == pytest.approx(float(promised[1]), abs=0.01)
