"""Fault 46: data errors point nowhere, or all rows vanish. Each bad row is named, counted, and bounded in share."""

from __future__ import annotations

from pathlib import Path

import pytest
from _runs import arguments, chats, make_model, megatrain, write_rows

USER, ANSWER = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}
BAD = [
    ({"messages": [{"role": "robot", "content": "a"}, ANSWER]}, "message 1 has no known role"),
    ({"messages": [{"role": "user"}, ANSWER]}, "message 1 (user): content is missing"),
    ({"messages": [USER, {"role": "assistant", "content": ""}]}, "the assistant's answer is empty"),
    ({"messages": [USER, {"role": "assistant", "content": None}]}, "message 2 (assistant): content is null"),
    ({"messages": [ANSWER, USER]}, "the dialogue starts with the assistant"),
    ({"messages": [USER, USER, ANSWER]}, "two user messages in a row"),
    ({"text": "no messages here"}, "the column messages is missing"),
    ({"messages": []}, "no assistant message, so nothing to train on"),
    ("{not json", "not JSON"),
    ("[1, 2]", "not a JSON object"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model(tmp_path / "model")
    huge = {"messages": [{"role": "user", "content": "hello " * 170_000}, ANSWER]}
    rows = write_rows(tmp_path / "rows.jsonl", [*chats(10), *(row for row, _ in BAD), huge]).read_bytes()
    (tmp_path / "chats.jsonl").write_bytes(b"\xef\xbb\xbf" + rows)
    return tmp_path


def test_every_bad_row_is_reported_with_line_and_reason(folder: Path) -> None:
    result = megatrain("train", *arguments(folder))
    assert result.exit_code == 2
    assert f"line 11: {BAD[0][1]}" in result.stderr
    for line, (_, reason) in list(enumerate(BAD, 11))[1:]:
        assert f"also:  line {line}: {reason}" in result.stderr


def test_too_large_a_share_stops_the_run_even_when_skipping(folder: Path) -> None:
    result = megatrain("train", *arguments(folder, "data.bad_rows=skip"))
    assert result.exit_code == 2
    assert "10 of 21 rows are bad, more than data.max_bad_share allows" in result.stderr


def test_skipped_rows_are_counted_and_logged(folder: Path) -> None:
    result = megatrain("train", *arguments(folder, "data.bad_rows=skip", "data.max_bad_share=0.6"))
    assert result.exit_code == 0, result.output
    assert "10 rows" in result.stdout
    assert "1 rows dropped (longer than 256)" in result.stdout
    assert "10 rows skipped (bad, see run.log)" in result.stdout
    log = (folder / "run" / "run.log").read_text(encoding="utf-8")
    for line, (_, reason) in enumerate(BAD, 11):
        assert f"line {line} skipped: {reason}" in log
