"""Device memory is a contract: the reported peak is enough, less is refused before anything has changed."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from _fixtures import tiny_config

from megatrain import AdamW, Model, UserError
from megatrain.config import parse_bytes
from megatrain.devices import _measure
from megatrain.engine.workspace import Workspaces

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(120)]

ALL = 6  # slots: four layers, embedding and head
TOKENS = 40


def batches(micros: int, tokens: int = TOKENS) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(3, 320, (micros, 2, tokens), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row.clone()} for row in ids]


def model_of(device: str, tied: bool = False, **options: Any) -> Model:
    options = {"compute_dtype": "float32", "kernel": "reference", "compile": False, "loss_chunk_tokens": 32} | options
    # A GPU has no fused attention in FP32 for grouped heads.
    heads = {"num_key_value_heads": 4} if options.get("activations") == "selective" else {}
    config = options.pop("config", None) or tiny_config("tiny-tied" if tied else "tiny", **heads)
    return Model.from_config(config, seed=1, device=device, optimizer=AdamW(lr=1e-2), **options)


def matrix(fast: int = 3) -> Iterator[Any]:
    """Every combination; of every ``fast`` one is fast, with 3 every pair of values among them."""
    choices = ((1, 2, ALL), (1, 2), (False, True), ("float32", "bfloat16"), ("recompute", "selective", "keep"))
    for places in itertools.product(*(range(len(values)) for values in choices)):
        chosen = [values[place] for values, place in zip(choices, places, strict=True)]
        yield pytest.param(*chosen, marks=() if sum(places) % fast == 0 else pytest.mark.slow)


MATRIX = list(matrix())


@pytest.mark.parametrize(("slots", "micros", "tied", "dtype", "activations"), MATRIX)
def test_planned_peak_is_the_real_one(
    slots: int, micros: int, tied: bool, dtype: str, activations: str, counted: _measure._LiveBytes
) -> None:
    """Never below what a step really holds at once, and little above it."""
    with model_of("sim", tied, slots=slots, compute_dtype=dtype, activations=activations) as model:
        fixed = sum(model.memory.by_label.values())
        for _ in range(2):
            model.step(batches(micros))
        model.state_dict()
        real, planned = fixed + counted.peak, model.memory.device_peak
    assert counted.peak > 0
    assert real <= planned <= 1.15 * real


@pytest.mark.parametrize(("slots", "micros", "tied", "dtype", "activations"), list(matrix(6)))
def test_reported_peak_is_enough_and_less_is_refused(
    slots: int, micros: int, tied: bool, dtype: str, activations: str, device: str
) -> None:
    options: dict[str, Any] = {"slots": slots, "compute_dtype": dtype, "activations": activations}
    step = batches(micros)
    for _ in range(2 if device == "cuda" else 1):  # libraries take their own memory at first use
        with model_of(device, tied, **options) as model:
            model.step(step)
            peak = model.memory.device_peak
    with model_of(device, tied, device_memory=peak, **options) as model:
        for _ in range(2):
            model.step(step)
        assert model.memory.device_peak <= model.memory.device_budget == peak
    refused_unchanged(device, tied, step, device_memory=peak * 95 // 100, **options)


def refused_unchanged(device: str, tied: bool, step: list[dict[str, torch.Tensor]], **options: Any) -> None:
    try:
        model = model_of(device, tied, **options)
    except UserError as error:
        assert "placement.device_memory" in str(error)  # noqa: PT017 - or it is refused below
        return
    with model:
        before = model.state_dict()
        with pytest.raises(UserError, match=r"placement\.device_memory: .* is too small: .*\(\d+ bytes\)"):
            model.step(step)
        assert (model._step, model._skipped_in_a_row) == (0, 0)
        assert all(model._store.step_count(unit) == 0 for unit in model._store.units)
        assert all(torch.equal(master, before[name]) for name, master in model.state_dict().items())
        assert not any(model._store.moment(name, "exp_avg").any() for name in before)
        with pytest.raises(UserError, match=r"placement\.device_memory"):
            model.reserve(2, step[0]["input_ids"].shape[1], len(step))
        model.step(batches(1, tokens=2))  # what fits still runs


ORDERS: dict[str, dict[str, Any]] = {
    "boundaries on the host": {"boundaries": "host"},
    "blocks of three": {"boundary_every": 3},
    "blocks of three, boundaries on the host": {"boundary_every": 3, "boundaries": "host"},
    "one kept, boundaries on the host": {"activations": ["layers.4"], "boundaries": "host"},
    "micro-batch-major": {"order": "micro_batch", "weights_on_device": "100%"},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("order", ORDERS)
def test_planned_peak_in_every_order(order: str, micros: int, dtype: str, counted: _measure._LiveBytes) -> None:
    config = tiny_config(num_hidden_layers=8)
    with model_of("sim", config=config, compute_dtype=dtype, **ORDERS[order]) as model:
        for _ in range(2):
            model.step(batches(micros))
        model.state_dict()
        real, planned = sum(model.memory.by_label.values()) + counted.peak, model.memory.device_peak
    assert real <= planned <= 1.15 * real


@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("order", ORDERS)
def test_reported_peak_is_enough_in_every_order(order: str, micros: int, device: str) -> None:
    options: dict[str, Any] = {"config": tiny_config(num_hidden_layers=8), **ORDERS[order]}
    for _ in range(2 if device == "cuda" else 1):
        with model_of(device, **options) as model:
            model.step(batches(micros))
            peak = model.memory.device_peak
    with model_of(device, device_memory=peak, **options) as model:
        for tokens in (8, TOKENS, 20, TOKENS):  # the pools grow once and are cut anew
            model.step(batches(micros, tokens=tokens))
        assert model.memory.device_peak == peak
    refused_unchanged(device, False, batches(micros), device_memory=peak * 95 // 100, **options)


def peak_of(layers: int, micros: int, **options: Any) -> tuple[int, int]:
    """Planned peak of a deep model in bytes, and the bytes of one boundary."""
    config = tiny_config(num_hidden_layers=layers)
    with model_of("sim", config=config, **options) as model:
        model.reserve(2, 120, micros)
        return model.memory.device_peak, 2 * 120 * config.hidden_size * 4


@pytest.mark.parametrize("micros", [1, 3])
def test_boundaries_on_the_host_leave_a_few_on_the_device(micros: int) -> None:
    """Two more than micro-batches under way, however many layers there are."""
    on_device, boundary = peak_of(12, micros)
    on_host, _ = peak_of(12, micros, boundaries="host")
    assert on_device - on_host == (12 * micros - (micros + 2)) * boundary
    assert peak_of(24, micros, boundaries="host")[0] == on_host


@pytest.mark.parametrize("micros", [1, 3])
def test_blocks_keep_one_boundary_each(micros: int) -> None:
    every, boundary = peak_of(12, micros)
    in_blocks, _ = peak_of(12, micros, boundary_every=4)
    assert every - in_blocks == (12 - (3 + 3)) * micros * boundary, (
        "three blocks, and three layers more of the last one"
    )


def test_micro_batch_major_needs_the_activations_of_one_micro_batch() -> None:
    one, several = (peak_of(12, m, order="micro_batch", weights_on_device="100%")[0] for m in (1, 4))
    assert one == several


def test_micro_batch_major_sums_each_unit_apart() -> None:
    options: dict[str, Any] = {"compute_dtype": "bfloat16", "weights_on_device": "100%", "order": "micro_batch"}
    with model_of("sim", **options) as model:
        padded = sum(model._store.layout(unit).numel for unit in model._store.units)
        assert model.memory.by_label["gradient sums"] == 4 * padded


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_boundaries_are_host_memory(device: str, dtype: str) -> None:
    config = tiny_config(num_hidden_layers=8)
    options: dict[str, Any] = {"config": config, "compute_dtype": dtype, "boundaries": "host"}
    step = batches(3, tokens=400)
    boundaries = 8 * 3 * 2 * 400 * config.hidden_size * (2 if dtype == "bfloat16" else 4)
    with model_of(device, **options) as model:
        before = model.memory.host_bytes
        model.step(batches(1))
        model.step(step)
        needed = model.memory.host_bytes
    assert boundaries // 2 < needed - before <= boundaries + (2 << 20), "what never leaves the device needs none"
    with model_of(device, host_memory=needed, **options) as model:
        model.step(step)
    with model_of(device, host_memory=needed - 1, **options) as model:
        for call in (lambda: model.step(step), lambda: model.reserve(2, 400, 3)):
            with pytest.raises(UserError, match=rf"placement\.host_memory: .*boundary activations.*\({needed} bytes\)"):
                call()
        model.step(batches(1))


@pytest.mark.gpu
def test_reported_peak_covers_the_allocator(device: str) -> None:
    if device != "cuda":
        pytest.skip("needs --device cuda")
    config = tiny_config(hidden_size=512, intermediate_size=1024, vocab_size=4096)
    options: dict[str, Any] = {"config": config, "compute_dtype": "bfloat16", "loss_chunk_tokens": 256}
    with model_of(device, **options) as model:
        model.step(batches(2, tokens=512))
    torch.cuda.synchronize()
    requested = "requested_bytes.all."  # what was asked for; recycled blocks may be up to 1 MiB larger
    before = torch.cuda.memory_stats()[requested + "current"]
    with model_of(device, **options) as model:
        model.reserve(2, 512, 2)
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            model.step(batches(2, tokens=512))
        model.state_dict()
        real, planned = torch.cuda.memory_stats()[requested + "peak"] - before, model.memory.device_peak
    assert real <= planned + (1 << 16)  # scalars
    assert planned <= 1.2 * real


def test_a_closed_model_holds_no_buffer(device: str) -> None:
    """Not even while its caller still has it: the next model needs the memory."""
    gc.collect()
    with model_of(device, compute_dtype="bfloat16") as model:
        model.step(batches(1))
    large = [t for t in gc.get_objects() if type(t) is torch.Tensor and not t.is_meta and t.numel() >= 320 * 64]
    assert not [(tuple(t.shape), t.dtype) for t in large]


def test_a_model_that_is_refused_holds_no_buffer(device: str) -> None:
    """Not even until the next garbage collection: whoever is refused tries again with less."""
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(UserError):
            model_of(device, activations="selective", attn_implementation="eager", compute_dtype="bfloat16")
        large = [t for t in gc.get_objects() if type(t) is torch.Tensor and not t.is_meta and t.numel() >= 320 * 64]
        assert not [(tuple(t.shape), t.dtype) for t in large]
    finally:
        gc.enable()


def test_the_default_chunk_of_the_loss_fits_too(device: str) -> None:
    with model_of(device, loss_chunk_tokens=None) as model:
        model.step(batches(1))
        peak = model.memory.device_peak
    with model_of(device, loss_chunk_tokens=None, device_memory=peak) as model:
        model.step(batches(1))


def test_scoring_stays_within_the_budget(device: str) -> None:
    (batch,) = batches(1, tokens=120)
    for _ in range(2 if device == "cuda" else 1):
        with model_of(device, slots=1) as model:
            expected = model.logprobs(batch)
            peak, fixed = model.memory.device_peak, sum(model.memory.by_label.values())
            model.reserve(2, 120, 1)
            assert model.memory.device_peak > peak, "scoring needs less than training"
    with model_of(device, slots=1, device_memory=peak) as model:
        assert torch.equal(model.logprobs(batch), expected)
        assert model.evaluate([batch, batch]).tokens == 2 * 2 * 119
        with pytest.raises(UserError, match=r"placement\.device_memory"):
            model.step([batch])
    with model_of(device, slots=1, device_memory=fixed + (peak - fixed) * 95 // 100) as model:
        for score in (lambda: model.logprobs(batch), lambda: model.evaluate([batch])):
            with pytest.raises(UserError, match=r"placement\.device_memory"):
                score()
        model.logprobs(batches(1, tokens=4)[0])


def test_units_beyond_the_budget_are_refused_at_construction(device: str) -> None:
    message = r"placement\.device_memory: 293\.0 KiB is too small: holding slots and gradients"
    with pytest.raises(UserError, match=message):
        model_of(device, device_memory=300_000)


@pytest.mark.parametrize("gradient_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trying_whether_activations_can_be_kept_takes_no_buffers_of_its_own(
    dtype: str, gradient_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    check = Workspaces.check_keep

    def recorded(self: Workspaces, *args: Any) -> int:
        taken.append(check(self, *args))
        return taken[-1]

    monkeypatch.setattr(Workspaces, "check_keep", recorded)
    with model_of("sim", slots=1, activations="keep", compute_dtype=dtype, gradient_dtype=gradient_dtype) as model:
        layer = model._store.layout("layers.0").num_parameters * (4 if dtype == "float32" else 2)
        assert model.memory.device_peak == sum(model.memory.by_label.values()) + taken[0]
        assert not model._engine._workspaces._weights("layers.0").any()
    assert len(taken) == 1
    assert layer <= taken[0] < 2 * layer, "the gradients that autograd returns, and activations of eight tokens"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_host_memory(device: str, dtype: str) -> None:
    with model_of(device, compute_dtype=dtype) as model:
        needed = model.memory.host_bytes
    with model_of(device, compute_dtype=dtype, host_memory=needed) as model:
        model.step(batches(1))
        assert model.memory.host_bytes <= needed
    with pytest.raises(UserError, match=rf"placement\.host_memory: .* is too small: .*\({needed} bytes\)"):
        model_of(device, compute_dtype=dtype, host_memory=needed - 1)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("400MiB", 400 * 2**20),
        ("24GiB", 24 * 2**30),
        ("24GB", 24 * 10**9),
        (" 1.5 gib ", 3 * 2**29),
        (".5TiB", 2**39),
        ("4096", 4096),
        ("10KB", 10_000),
        (12345, 12345),
        (None, None),
    ],
)
def test_sizes(text: str | int | None, nbytes: int | None) -> None:
    assert parse_bytes("field", text) == nbytes


@pytest.mark.parametrize("text", ["", "MiB", "4 apples", "4MiBs", "-4MiB", "1e3", "0", 0, -1, "0GiB", 4.5, [1]])
@pytest.mark.parametrize("field", ["device_memory", "host_memory"])
def test_sizes_that_are_none(field: str, text: Any) -> None:
    with pytest.raises(UserError, match=rf"placement\.{field}: .*{text!r}|placement\.{field}: "):
        model_of("sim", **{field: text})
