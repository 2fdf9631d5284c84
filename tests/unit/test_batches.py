"""Micro-batches: padding on either side means the same, and every mistake is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _fixtures import tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain import Model, UserError
from megatrain.engine.batches import check_batch, check_batches

VOCAB = 50
ROW = torch.arange(3, 9)[None]


def batch(**changes: Any) -> dict[str, Any]:
    return {"input_ids": ROW, "labels": ROW} | changes


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(1, 12), st.data())
def test_left_padding_is_rolled_to_the_right(rows: int, tokens: int, data: st.DataObject) -> None:
    lengths = torch.tensor(data.draw(st.lists(st.integers(1, tokens), min_size=rows, max_size=rows)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    ids = torch.randint(0, VOCAB, (rows, tokens), generator=generator)
    labels = torch.where(torch.rand(rows, tokens, generator=generator) < 0.3, -100, ids)
    right = torch.arange(tokens)[None] < lengths[:, None]
    left = right.flip(1)
    given_right = {"input_ids": ids, "labels": labels.where(right, torch.tensor(-100)), "attention_mask": right.long()}
    given_left = {
        key: torch.stack([row.roll(tokens - int(n)) for row, n in zip(value, lengths, strict=True)])
        for key, value in given_right.items()
    }
    assert torch.equal(given_left["attention_mask"], left.long())
    one, other = (check_batch(b, "batch", VOCAB) for b in (given_right, given_left))
    for row, n in enumerate(lengths.tolist()):
        assert torch.equal(one.input_ids[row, :n], other.input_ids[row, :n])
    assert torch.equal(one.index, other.index)
    assert torch.equal(one.targets, other.targets)
    for checked, source in ((one, given_right), (other, given_left)):
        assert torch.equal(source["labels"].flatten()[checked.source], checked.targets)
        # A target is what follows the position that predicts it.
        assert torch.equal(checked.input_ids.flatten()[checked.index + 1], checked.targets)
        assert not bool((checked.index % tokens == tokens - 1).any())


def test_positions_roll_along_and_plain_ones_are_dropped() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    positions = torch.tensor([[9, 9, 0, 1, 0, 1]])
    labels = ROW.where(mask.bool(), torch.tensor(-100))
    checked = check_batch(batch(labels=labels, attention_mask=mask, position_ids=positions), "b", VOCAB)
    assert checked.position_ids is not None
    assert checked.position_ids[0, :4].tolist() == [0, 1, 0, 1]
    plain = check_batch(batch(position_ids=torch.arange(6)[None]), "b", VOCAB)
    assert plain.position_ids is None


def test_padding_changes_neither_loss_nor_logprobs(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 320, (1, 10), generator=generator)
    pad = torch.zeros(1, 4, dtype=torch.int64)
    ignored = torch.full((1, 4), -100)
    ones, zeros = torch.ones_like(ids), torch.zeros_like(pad)

    def padded(left: bool) -> dict[str, torch.Tensor]:
        def side(padding: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return torch.cat([padding, value] if left else [value, padding], 1)

        return {"input_ids": side(pad, ids), "labels": side(ignored, ids), "attention_mask": side(zeros, ones)}

    with Model.from_config(
        tiny_config(), device=device, compute_dtype="float32", kernel="reference", compile=False
    ) as model:
        plain = model.logprobs({"input_ids": ids, "labels": ids})
        right, left = model.logprobs(padded(left=False)), model.logprobs(padded(left=True))
        assert plain[0, 0] == 0
        assert bool((plain[0, 1:] < 0).all())
        assert torch.allclose(right[:, :10], plain, rtol=1e-5, atol=1e-5)
        assert torch.allclose(left[:, 4:], plain, rtol=1e-5, atol=1e-5)
        assert not right[:, 10:].any()
        assert not left[:, :4].any()
        assert model.evaluate([padded(left=True)]).tokens == 9


MISTAKES = {
    "unknown key": (batch(token_type_ids=ROW), r"unknown key 'token_type_ids'; a micro-batch has attention_mask"),
    "a key that is no text": ({**batch(), 3: ROW}, "unknown key 3"),
    "no ids": ({"labels": ROW}, r"input_ids: missing"),
    "no labels": ({"input_ids": ROW}, r"labels: missing"),
    "a list": (batch(input_ids=[[1, 2]]), r"input_ids: list"),
    "one row without its batch": (batch(input_ids=ROW[0]), r"input_ids: torch.int64 of shape \(6,\)"),
    "floats": (batch(input_ids=ROW.float()), r"input_ids: torch.float32 of shape \(1, 6\)"),
    "other shape": (batch(labels=ROW[:, :3]), r"labels: shape \(1, 3\) differs from input_ids' \(1, 6\)"),
    "other shape of the mask": (batch(attention_mask=ROW[:, :3]), r"attention_mask: shape"),
    "other shape of positions": (batch(position_ids=ROW.T), r"position_ids: shape"),
    "nothing": (batch(input_ids=ROW[:, :0], labels=ROW[:, :0]), r"holds no token"),
    "no rows": (batch(input_ids=ROW[:0], labels=ROW[:0]), r"holds no token"),
    "id too large": (batch(input_ids=ROW + 44), r"input_ids: 50 is out of range; .* 0 to 49\."),
    "negative id": (batch(input_ids=ROW - 4), r"input_ids: -1 is out of range"),
    "label too large": (batch(labels=ROW + 44), r"labels: 50 is out of range; .* \(or -100\)"),
    "negative label": (batch(labels=ROW - 10), r"labels: -7 is out of range"),
    "holes": (batch(attention_mask=torch.tensor([[1, 0, 1, 1, 1, 1]])), r"row 0 is not one run of ones"),
    "padding on both sides": (batch(attention_mask=torch.tensor([[0, 1, 1, 1, 1, 0]])), r"not one run of ones"),
    "all padding": (batch(attention_mask=torch.zeros(1, 6, dtype=torch.int64)), r"not one run of ones"),
    "labels on padding": (batch(attention_mask=torch.tensor([[1, 1, 1, 1, 0, 0]])), r"hides has a label; use -100"),
    "no dict": ([ROW, ROW], r"micro_batches\[1\]: list; give a dict"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake: str) -> None:
    wrong, message = MISTAKES[mistake]
    with pytest.raises(UserError, match=message) as caught:
        check_batches([batch(), wrong], VOCAB)  # type: ignore[list-item]
    assert "micro_batches[1]" in str(caught.value)


@pytest.mark.parametrize("wrong", [[], (), batch(), None, ROW, 3, {}])
def test_what_is_no_list_of_micro_batches(wrong: Any) -> None:
    with pytest.raises(UserError, match="non-empty list of dicts"):
        check_batches(wrong, VOCAB)


@pytest.mark.parametrize("labels", [torch.full((1, 6), -100), torch.tensor([[5, *[-100] * 5]])])
def test_no_target_at_all(labels: torch.Tensor, device: str) -> None:
    with Model.from_config(
        tiny_config(), device=device, compute_dtype="float32", kernel="reference", compile=False
    ) as model:
        with pytest.raises(UserError, match="no label is a target"):
            model.step([batch(labels=labels)])
        with pytest.raises(UserError, match="no label is a target"):
            model.evaluate([batch(labels=labels)])
        with pytest.raises(UserError, match="lr: nan"):
            model.step([batch()], lr=float("nan"))
        assert not model.logprobs(batch(labels=labels)).any()
