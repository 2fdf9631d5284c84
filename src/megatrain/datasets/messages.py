"""Dialogues: ``{"messages": [{"role": "user", "content": "..."}, ...]}``. Every assistant turn is trained on.

Turns alternate between user and assistant, after at most one system message. ShareGPT's ``human`` and ``gpt`` are read
as ``user`` and ``assistant``.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from megatrain.datasets import BadRow, Row

if TYPE_CHECKING:
    from megatrain.datasets._encode import Encoder

COLUMNS = ("messages", "role", "content")
SPLITS = False

_OTHER_NAMES = {"human": "user", "gpt": "assistant"}
_ROLES = ("system", "user", "assistant")
# Parts of a turn that a template would render but that are not in `content`: they would go untrained unnoticed.
_UNSUPPORTED = ("tool_calls", "function_call", "reasoning_content", "thinking")


def recognises(record: dict[str, Any]) -> bool:
    return isinstance(record.get("messages"), list)


def encode(record: dict[str, Any], encoder: Encoder) -> Row:
    if "messages" not in record:
        raise BadRow("the column messages is missing", f"columns {', '.join(record)}")
    messages = record["messages"]
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise BadRow("messages is not a list of {role, content}", f"{type(messages).__name__}")
    messages = [_with_our_role(m) for m in messages]
    for number, message in enumerate(messages, 1):
        _check_message(number, message)
    roles = [m["role"] for m in messages]
    _check_order(roles)
    if not any(m["content"].strip() for m in messages if m["role"] == "assistant"):
        raise BadRow("the assistant's answer is empty, so nothing to train on", "an empty text")
    return encoder.dialogue([{"role": m["role"], "content": m["content"]} for m in messages])


def _with_our_role(message: dict[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    return message | {"role": _OTHER_NAMES[role]} if isinstance(role, str) and role in _OTHER_NAMES else message


def _check_message(number: int, message: dict[str, Any]) -> None:
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        state = f"role {role!r}" if "role" in message else f"keys {', '.join(message)}"
        raise BadRow(f"message {number} has no known role", state, f"use the roles {', '.join(_ROLES)}")
    extra = next((k for k in _UNSUPPORTED if message.get(k)), None)
    if extra:
        raise BadRow(
            f"message {number} has {extra}, which is not supported yet",
            extra,
            "put it into content or remove it",
        )
    if not isinstance(content, str):
        state = "missing" if "content" not in message else "null" if content is None else "not a text"
        raise BadRow(f"message {number} ({role}): content is {state}", f"keys {', '.join(message)}")


def _check_order(roles: list[str]) -> None:
    if "assistant" not in roles:
        raise BadRow("no assistant message, so nothing to train on", "roles " + (", ".join(roles) or "none"))
    turns = roles[1:] if roles[0] == "system" else roles
    if "system" in turns:
        raise BadRow("a system message that is not the first", "roles " + ", ".join(roles))
    if turns[0] == "assistant":
        raise BadRow("the dialogue starts with the assistant", "roles " + ", ".join(roles))
    twice = next((a for a, b in pairwise(turns) if a == b), None)
    if twice:
        raise BadRow(f"two {twice} messages in a row", "roles " + ", ".join(roles), "join them into one message")
