"""Plain text: ``{"text": "..."}``. Every token is trained on; the end of the document is marked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatrain.datasets import BadRow, Row

if TYPE_CHECKING:
    from megatrain.datasets._encode import Encoder

COLUMNS = ("text",)
SPLITS = True


def recognises(record: dict[str, Any]) -> bool:
    return "text" in record


def encode(record: dict[str, Any], encoder: Encoder) -> Row:
    text = record.get("text")
    if not isinstance(text, str):
        raise BadRow(f"text is {'missing' if text is None else 'not a text'}", f"columns {', '.join(record)}")
    if not text.strip():
        raise BadRow("text is empty, so nothing to train on")
    return encoder.document(text, [(0, len(text))])
