"""Which tokens of a dialogue are trained on: every assistant turn with its end marker, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from _tokenizers import INSTRUCT, MARKED, SMOLLM2, THINKING, small_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.datasets import BadRow, Row, messages
from megatrain.datasets._chat import ChatTemplate, find_template
from megatrain.datasets._encode import Encoder
from megatrain.errors import UserError

THREE_TURNS = [
    ("system", "Be brief."),
    ("user", "What is the capital of France?"),
    ("assistant", "Paris."),
    ("user", "hello"),
    ("assistant", ""),
    ("user", "And you?"),
    ("assistant", "I am well, thank you."),
]


def encoder(template: str | None, **kwargs: Any) -> Encoder:
    tokenizer = small_tokenizer(template, **kwargs)
    return Encoder(tokenizer, ChatTemplate(tokenizer, template, "the template") if template else None)


def dialogue(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": r, "content": c} for r, c in turns]}


def trained(enc: Encoder, row: Row) -> list[str]:
    """The texts of the runs of consecutive targets."""
    runs, open_run = [], False
    for token, is_target in zip(row.ids.tolist(), row.target.tolist(), strict=True):
        if is_target and open_run:
            runs[-1].append(token)
        elif is_target:
            runs.append([token])
        open_run = is_target
    return [enc.decode(run) for run in runs]


@pytest.mark.parametrize("template", [SMOLLM2, MARKED, THINKING])
def test_each_turn_with_its_end_marker_and_nothing_else(template: str) -> None:
    enc = encoder(template)
    row = messages.encode(dialogue(*THREE_TURNS), enc)
    assert trained(enc, row) == ["Paris.<|im_end|>", "<|im_end|>", "I am well, thank you.<|im_end|>"]
    assert enc.decode(row.ids.tolist()) == enc.chat.render(dialogue(*THREE_TURNS)["messages"])


def test_the_prompt_is_tokenized_as_it_is_when_the_model_is_used() -> None:
    enc = encoder(SMOLLM2)
    turns = dialogue(("user", "hello"), ("assistant", "\n\nParis."))["messages"]
    row = enc.dialogue(turns)
    prompt = enc.tokenizer(enc.chat.render(turns[:1], prompt=True), add_special_tokens=False)["input_ids"]
    assert row.ids[: len(prompt)].tolist() == prompt
    assert not row.target[: len(prompt)].any()
    assert row.target[len(prompt) :][:-1].all()
    assert trained(enc, row) == ["\n\nParis.<|im_end|>"]


def test_beginning_of_text_once_and_end_of_text_trained() -> None:
    enc = encoder(INSTRUCT, bos="<|endoftext|>")
    row = messages.encode(dialogue(("user", "hello"), ("assistant", "yes"), ("user", "no"), ("assistant", "well")), enc)
    assert row.ids.tolist().count(0) == 1
    assert row.ids[0] == 0
    assert [t.strip() for t in trained(enc, row)] == ["yes <|im_end|>", "well <|im_end|>"]
    double = encoder("{{ bos_token }}" + INSTRUCT, bos="<|endoftext|>")
    assert messages.encode(dialogue(("user", "hello"), ("assistant", "yes")), double).ids.tolist().count(0) == 1


@settings(deadline=None)
@given(st.lists(st.text(max_size=12), min_size=1, max_size=3))
def test_any_text_is_trained_on_exactly(answers: list[str]) -> None:
    enc = encoder(SMOLLM2)
    turns = [t for a in answers for t in (("user", "hello"), ("assistant", a))]
    row = enc.dialogue(dialogue(*turns)["messages"])
    assert trained(enc, row) == [a + "<|im_end|>" for a in answers]


def test_a_template_that_changes_an_answer_stops_the_run() -> None:
    upper = SMOLLM2.replace("message['content']", "(message['content'] | upper)")
    enc = encoder(upper)
    with pytest.raises(UserError, match=r"the template does not give back .* at character 1\n  wanted: 'Paris"):
        messages.encode(dialogue(("user", "hello"), ("assistant", "Paris")), enc)


def test_marks_that_leave_out_the_end_marker_stop_the_run() -> None:
    bare = MARKED.replace("+ '<|im_end|>\n' }}{% endgeneration %}", "}}{% endgeneration %}{{ '<|im_end|>\n' }}")
    assert bare != MARKED
    with pytest.raises(UserError, match=r"wanted: 'yes<\|im_end\|>'\n  found:  'yes'"):
        messages.encode(dialogue(("user", "hello"), ("assistant", "yes")), encoder(bare))


def test_history_that_the_template_drops_stops_the_run() -> None:
    last_only = SMOLLM2.replace("message['content'] +", "(message['content'] if loop.last else '') +")
    with pytest.raises(UserError, match="does not give back"):
        messages.encode(
            dialogue(("user", "a"), ("assistant", "yes"), ("user", "b"), ("assistant", "no")),
            encoder(last_only),
        )


def test_a_template_without_an_end_marker_is_refused() -> None:
    with pytest.raises(UserError, match="never learn to stop"):
        encoder("{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}")


def test_a_template_that_is_not_jinja_is_refused() -> None:
    with pytest.raises(UserError, match="the template cannot be used"):
        encoder("{% for m in messages %}")


def test_a_refusal_by_the_template_is_a_bad_row() -> None:
    strict = SMOLLM2 + "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    with pytest.raises(BadRow, match="the chat template refuses it: no system message"):
        messages.encode(dialogue(*THREE_TURNS), encoder(strict))


def test_template_by_file_by_name_and_none(tmp_path: Any) -> None:
    tokenizer = small_tokenizer()
    file = tmp_path / "mine.jinja"
    file.write_text(MARKED, encoding="utf-8")
    assert find_template(tokenizer, str(file)) == (MARKED, f"the chat template {file}")
    assert find_template(tokenizer, None) == (SMOLLM2, "the model's chat template")
    assert find_template(tokenizer, "none") is None
    assert find_template(small_tokenizer(None), None) is None
    with pytest.raises(UserError, match=r"data.chat_template: nowhere.jinja: no such file"):
        find_template(tokenizer, "nowhere.jinja")


def test_a_dialogue_without_template_names_the_ways_out() -> None:
    with pytest.raises(UserError, match=r"data.chat_template=FILE.jinja"):
        messages.encode(dialogue(("user", "a"), ("assistant", "b")), encoder(None))
