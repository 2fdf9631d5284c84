"""What is `auto` becomes a choice that fits, is shown and kept; what is set is never changed."""

from __future__ import annotations

from bisect import bisect_left
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from _runs import arguments, chats, make_model, megatrain, metrics, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from megatrain import Model, auto, costs, machine, trainer
from megatrain.choices import Request
from megatrain.config import RunConfig, flat_options
from megatrain.config_file import load_config
from megatrain.datasets import Row
from megatrain.datasets._batches import Batches, mean_padded_tokens
from megatrain.errors import UserError
from megatrain.loggers.console import ConsoleLogger
from megatrain.machines import MachineSpec, load_machine, this_machine
from megatrain.model_spec import load_model_spec
from megatrain.preflight import prepare
from megatrain.search import Search

BASE = ["model.name_or_path=m", "data.train=d.jsonl", "output_dir=o"]
spec = cache(load_model_spec)


def config(*words: str) -> RunConfig:
    return load_config(None, [*BASE, *words])


def chooser(run: RunConfig, where: MachineSpec, model: str = "smollm2-135m", **changes: object) -> auto.Chooser:
    request = Request(rows=16, seq_len=1024, clipping="deferred", fixed=auto.fixed_options(run), **changes)  # type: ignore[arg-type]
    return auto.Chooser(config=run, model=spec(model), machine=where, request=request)


def test_nothing_is_set_by_default() -> None:
    assert auto.fixed_options(config()) == {}
    assert auto.is_open(config("placement.slots=3"))
    assert not auto.is_open(auto.with_options(config(), auto.OPTIONS))


VALUES = {
    "train.micro_batch_size": ["1", "3", "16"],
    "placement.slots": ["1", "4"],
    "placement.weights": ["null", "100MiB", "20%"],
    "placement.states": ["null", "1GiB", "50%"],
    "compute.activations": ["recompute", "keep", "30%", "selective", "keep 20%, selective 50%"],
    "compute.boundaries": ["device", "host"],
    "compute.boundary_every": ["1", "2"],
    "compute.order": ["layer"],
}
WHERE = {"gpu": load_machine("rtx4090-128gb"), "cpu": this_machine(machine.probe(), "cpu")}


@settings(max_examples=25, deadline=None)
@given(
    st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in VALUES.items()}),
    st.sampled_from(sorted(WHERE)),
)
def test_what_is_set_is_never_changed(given_: dict[str, str], where: str) -> None:
    run = config(*(f"{name}={value}" for name, value in given_.items()))
    chosen = chooser(run, WHERE[where]).choose().config
    before, after = flat_options(run), flat_options(chosen)
    assert not auto.is_open(chosen)
    assert {name for name in before if before[name] != after[name]} == set(auto.OPTIONS) - set(given_)
    assert load_config(None, [f"{n}={'null' if v is None else v}" for n, v in after.items()]) == chosen


def test_a_small_model_lives_on_a_large_card_and_streams_through_a_small_one() -> None:
    large = chooser(config(), load_machine("h200-128gb"), "qwen3-4b").choose()
    assert large.config.placement.states not in (None, "auto")
    assert "state of" in large.lines[0]
    small = chooser(config(), replace(load_machine("rtx4090-128gb"), gpu_memory=6 << 30), "qwen3-4b").choose()
    assert small.config.placement.states is None
    assert "rtx4090-128gb" in small.lines[1]
    assert large.seconds is not None
    assert small.seconds is not None
    assert large.seconds < small.seconds


@pytest.mark.slow
def test_memory_that_is_short_is_used_up_to_the_margins_and_then_refused() -> None:
    card = load_machine("rtx4090-128gb")
    sizes = range(60, 130)
    least = sizes[bisect_left(sizes, True, key=lambda g: chooses(replace(card, host_memory=g << 30)))]
    state = 14 * 7.62e9 / 2**30  # some of it can be on the card
    assert state - 22 < least < state + 2, "0.6 GiB of the process and no margin"
    with pytest.raises(UserError, match=r"missing: .* of host memory(?s:.*)fix: +another machine: [a-z]"):
        chooser(config(), replace(card, host_memory=60 << 30), "qwen2.5-7b").choose()


def chooses(where: MachineSpec) -> bool:
    try:
        chooser(config(), where, "qwen2.5-7b").choose()
    except UserError:
        return False
    return True


def test_what_the_engine_refuses_is_planned_smaller_as_far_as_there_is_something_to_choose() -> None:
    first = chooser(config(), load_machine("rtx4090-128gb"), "qwen3-4b")
    refused = UserError("placement.device_memory: 20 GiB is too small")
    shares, following = [], first.after(refused)
    while following is not None:
        shares.append(following.share)
        following = following.after(refused)
    assert shares == sorted(shares, reverse=True)
    assert 5 <= len(shares) <= 10
    kept = first.after(UserError("compute.activations: keep: reads its weights behind autograd's back"))
    assert kept is not None
    assert kept.choose().config.compute.activations == "recompute"
    other = first.after(UserError("compute.activations: selective: layers.0 (llama) uses no fused attention kernel"))
    assert other is not None
    assert "selective" not in str(other.choose().config.compute.activations)
    assert first.after(UserError("optim.lr: something else")) is None
    saved = replace(first, saved=config("placement.slots=4"))
    assert saved.choose().config is saved.saved
    assert saved.choose().device_limit == first.choose().device_limit is not None
    assert saved.after(refused) == saved.after(UserError("compute.activations: keep: reads")) == first
    assert saved.after(UserError("optim.lr: something else")) is None
    set_by_hand = replace(first, config=config("compute.activations=keep"))
    assert set_by_hand.after(UserError("compute.activations: keep: reads")) is None


def test_a_card_that_was_promised_too_much_gets_the_smallest_plan_in_the_end() -> None:
    refused = UserError("placement.device_memory: 20 GiB is too small")
    small = replace(load_machine("rtx4090-128gb"), gpu_memory=6 << 30)
    following: auto.Chooser | None = chooser(config(), small, "qwen3-4b")
    sizes = []
    while following is not None:
        sizes.append(following.choose().config.train.micro_batch_size)
        following = following.after(refused)
    assert sizes == [4, *[1] * (len(sizes) - 1)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model(tmp_path / "model")
    write_rows(tmp_path / "chats.jsonl", chats(24))
    return tmp_path


def train(folder: Path, *words: str) -> tuple[str, dict[str, object]]:
    """Output of a run of everything by default, and the options it ended up with."""
    defaults = arguments(folder)
    by_hand = ("train.micro_batch_size", *(word.partition("=")[0] for word in words))
    kept = [word for word in defaults if word.partition("=")[0] not in by_hand]
    result = megatrain("train", *kept, *words)
    assert result.exit_code == 0, result.output
    run = dict(w.split("=", 1) for w in [*kept, *words])["output_dir"]
    resolved = yaml.safe_load(Path(run, "resolved.yaml").read_text(encoding="utf-8"))
    options = {f"{a}.{b}": v for a, part in resolved.items() if isinstance(part, dict) for b, v in part.items()}
    return result.stdout, {name: options[name] for name in auto.OPTIONS}


def test_the_choice_is_shown_and_saved(folder: Path) -> None:
    output, chosen = train(folder)
    lines = output.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("plan "))
    assert f"micro-batches of {chosen['train.micro_batch_size']} rows · {chosen['placement.slots']} slots" in lines[at]
    assert "activations of 4 of 4 layers" in lines[at]
    assert chosen["compute.activations"] == "keep"
    assert "s a step predicted, limited by CPU arithmetic" in lines[at + 1]
    assert "auto" not in chosen.values()


def test_the_result_does_not_depend_on_the_choice(folder: Path) -> None:
    train(folder)
    train(folder, f"output_dir={folder}/plain", *(f"{n}={'null' if v is None else v}" for n, v in auto.OPTIONS.items()))
    chosen, plain = metrics(folder / "run"), metrics(folder / "plain")
    for key in ("loss", "grad_norm"):
        assert [step[key] for step in chosen] == pytest.approx([step[key] for step in plain], rel=1e-5)


def test_a_resumed_run_goes_on_with_its_choice(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, chosen = train(folder, "train.max_steps=4", "checkpoint.every=2")
    monkeypatch.setattr(Search, "best", None)  # not called again
    words = ["train.max_steps=6", "checkpoint.every=2"]
    output, again = train(folder, *words, "checkpoint.resume=auto")
    assert again == chosen
    changed = next(line for line in output.splitlines() if line.startswith("changed "))
    assert changed == "changed train.max_steps 4 -> 6"
    output, elsewhere = train(
        folder, *words, f"checkpoint.resume={folder}/run/checkpoints/step-00000004", f"output_dir={folder}/elsewhere"
    )
    assert elsewhere == chosen
    assert "plan  " not in output


def test_a_resumed_run_is_planned_again_where_its_choice_does_not_fit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["train.batch_size=24"]
    _, large = train(folder, *words, "train.max_steps=2", "checkpoint.every=1")
    here = machine.probe()
    monkeypatch.setattr(machine, "probe", lambda: replace(here, memory_free=520 << 20))
    output, small = train(folder, *words, "train.max_steps=3", "checkpoint.resume=auto")
    assert small != large
    assert "compute.activations keep -> " in output
    assert [step["step"] for step in metrics(folder / "run")] == [1, 2, 3]


def test_what_stays_on_a_device_that_is_too_small_is_planned_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run's choice was made elsewhere; of a choice by hand the options to change are named."""
    here = machine.probe()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(machine, "probe", lambda: replace(here, memory_free=520 << 20))
        _, chosen = train(folder, "train.batch_size=24", "train.max_steps=2", "checkpoint.every=1")
    really_open = trainer.open_model

    def open_model(config: RunConfig, *rest: Any) -> Model:
        if config.compute.activations == chosen["compute.activations"]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return really_open(config, *rest)

    monkeypatch.setattr(trainer, "open_model", open_model)
    _, again = train(folder, "train.batch_size=24", "train.max_steps=3", "checkpoint.resume=auto")
    assert again["compute.activations"] != chosen["compute.activations"]
    assert "too little for what stays there: CUDA out of memory" in (folder / "run" / "run.log").read_text("utf-8")
    by_hand = [f"{name}={'null' if value is None else value}" for name, value in chosen.items()]
    result = megatrain("train", *arguments(folder, *by_hand, f"output_dir={folder}/by_hand"))
    assert result.exit_code == 2
    assert "fix:   lower placement.states" in result.output


def test_a_choice_that_is_measured_to_be_too_large_is_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the formulas promised far too little memory."""
    words = ["train.batch_size=16", "placement.device_memory=6MiB"]
    _, right = train(folder, *words, f"output_dir={folder}/right")
    monkeypatch.setattr(costs, "EAGER_KEPT", 0.1)
    monkeypatch.setattr(costs, "_EAGER_LOSS_HELD", 1)
    output, chosen = train(folder, *words)
    assert "planning again" in (folder / "run" / "run.log").read_text(encoding="utf-8")
    assert output.count("plan   ") == 1, "the choice that was made in the end"
    assert chosen != right or right["compute.activations"] != "keep"


def test_a_step_beyond_what_is_free_is_planned_again_without_a_budget(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = machine.probe()
    monkeypatch.setattr(machine, "probe", lambda: replace(here, memory_free=530 << 20))
    monkeypatch.setattr(costs, "EAGER_KEPT", 0.1)
    monkeypatch.setattr(costs, "_EAGER_LOSS_HELD", 1)
    train(folder, "train.batch_size=24")
    assert "planning again" in (folder / "run" / "run.log").read_text(encoding="utf-8")


def test_a_model_that_cannot_be_planned_trains_all_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise UserError("model: type 'x' is a mixture of experts, which cannot be planned yet")

    monkeypatch.setattr("megatrain.preflight.load_model_spec", unknown)
    output, chosen = train(folder)
    assert "plan    not for this model, so the same as everywhere: model: type 'x'" in output
    assert chosen == dict(auto.OPTIONS)


def test_a_dry_run_shows_the_choice_and_what_was_asked_for(folder: Path) -> None:
    words = [word for word in arguments(folder, "--dry-run") if not word.startswith("train.micro")]
    output = megatrain("train", *words).stdout
    assert "\nplan    micro-batches of" in output
    assert "placement.slots" not in output


def test_where_nothing_smaller_fits_the_engine_s_own_words_are_shown(folder: Path) -> None:
    """Without much of the state on the device it does not fit the host."""
    run = load_config(None, [word for word in arguments(folder) if not word.startswith("train.micro")])
    first = chooser(run, replace(load_machine("rtx4090-128gb"), host_memory=46 << 30), "qwen3-4b")
    prepared = replace(prepare(run, lambda *_: None), chooser=first, choice=first.choose())
    refused = UserError("placement.device_memory: 20 GiB is too small")
    prepared = prepared.after(refused).after(refused)
    with pytest.raises(UserError) as raised:
        prepared.after(refused)
    assert raised.value is refused


@pytest.mark.parametrize(("device", "place"), [("cpu", "machine"), ("cuda", "GPU")])
def test_a_step_beyond_what_is_free_names_ways_out(folder: Path, device: str, place: str) -> None:
    prepared = prepare(load_config(None, arguments(folder)), lambda *_: None)
    prepared = replace(prepared, chooser=None, choice=replace(prepared.choice, device_limit=1), device=device)
    ways = f"0 MiB of this {place} are free\n  fix:   lower data.max_seq_len .* or free memory of this {place}$"
    with closing(ConsoleLogger(Console())) as console, pytest.raises(UserError, match=ways):
        trainer._open_fitting(prepared, console)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 12), st.integers(1, 12))
@settings(max_examples=30, deadline=None)
def test_the_usual_step_is_that_of_the_batches(lengths: list[int], rows: int, micro: int) -> None:
    rows = min(rows, len(lengths))
    data = [Row(ids=np.zeros(n, np.int32), target=np.ones(n, bool)) for n in lengths]
    batches = Batches(data, batch_size=rows, micro_batch_size=micro, seed=0, shuffle=True, pad_id=0, fingerprint="f")
    usual = mean_padded_tokens(lengths, rows, micro)
    assert rows * min(lengths) <= usual <= rows * max(lengths)
    if rows == len(lengths):
        assert usual == batches.next_step().padded_tokens
