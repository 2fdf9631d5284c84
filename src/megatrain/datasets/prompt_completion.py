"""Prompt and completion: ``{"prompt": "...", "completion": "..."}``. The completion is trained on.

With a chat template (the model's own, or ``data.chat_template``) a row is one user turn and one assistant turn.
Without one, or with ``data.chat_template: none``, the two texts are joined as they are and the end is marked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatrain.datasets import BadRow, Row

if TYPE_CHECKING:
    from megatrain.datasets._encode import Encoder

COLUMNS = ("prompt", "completion")
SPLITS = False


def recognises(record: dict[str, Any]) -> bool:
    return "prompt" in record and "completion" in record


def encode(record: dict[str, Any], encoder: Encoder) -> Row:
    for column in COLUMNS:
        if not isinstance(record.get(column), str):
            state = "not a text" if record.get(column) is not None else "missing" if column not in record else "null"
            raise BadRow(f"{column} is {state}", f"columns {', '.join(record)}")
    prompt, completion = record["prompt"], record["completion"]
    if not completion.strip():
        raise BadRow("completion is empty, so nothing to train on")
    if encoder.chat is None:
        return encoder.document(prompt + completion, [(len(prompt), len(prompt) + len(completion))])
    return encoder.dialogue([{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}])
