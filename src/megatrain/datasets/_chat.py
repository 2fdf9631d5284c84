"""A chat template, and where in its output the assistant speaks.

Two ways lead to the assistant's turns. A template with ``{% generation %}`` marks says itself where they are. For all
others the dialogue is rendered up to each assistant turn, with the prompt for it: that prefix is what the model is
given when it is used, and the turn begins where the prefix ends. Either way the encoder decodes what would be trained
on and compares it with the texts of the row.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError

from megatrain.datasets import BadRow
from megatrain.errors import UserError

_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_PROBE = "PROBE0123"


class ChatTemplate:
    """One Jinja template with the tokenizer it is used with.

    ``end_marker`` is what follows the assistant's text in each turn, white space after it left out.
    Raises :class:`UserError` for a template that cannot be read or never ends a turn.
    """

    def __init__(self, tokenizer: Any, source: str, name: str) -> None:
        self._tokenizer, self._source, self.name = tokenizer, source, name
        self.has_marks = bool(_MARK.search(source))
        self.end_marker = self._find_end_marker()

    def render(self, messages: list[dict[str, str]], prompt: bool = False) -> str:
        """The text of ``messages``; with ``prompt``, followed by the opening of an assistant turn."""
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, chat_template=self._source, tokenize=False, add_generation_prompt=prompt
            )
        except TemplateError as e:
            raise BadRow(
                f"the chat template refuses it: {e}", "roles " + ", ".join(m["role"] for m in messages)
            ) from None
        return text

    def spans(self, messages: list[dict[str, str]]) -> tuple[str, list[tuple[int, int]]]:
        """The rendered text and the characters [start, end) of each assistant turn with its end marker."""
        text, found = self.render(messages), []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render(messages[:i], prompt=True)
            if not text.startswith(before):
                raise self.mismatch(before, text[: len(before)])
            found.append(self._locate(text, len(before), message["content"]))
        return text, found

    def _locate(self, text: str, start: int, content: str) -> tuple[int, int]:
        """Where ``content`` and its end marker stand at or after ``start``.

        What a template puts between its own prompt and the answer (Qwen3's empty ``<think>`` block) is not the
        assistant's text and is left out.
        """
        for wanted in (content + self.end_marker, content.strip() + self.end_marker):
            at = text.find(wanted, start)
            if at >= 0 and self.end_marker not in text[start:at]:
                gap_is_space = not text[start:at].strip()
                return (start if gap_is_space else at), at + len(wanted)
        raise self.mismatch(content + self.end_marker, text[start : start + len(content) + len(self.end_marker)])

    def marked(self, messages: list[dict[str, str]]) -> tuple[list[int], list[bool]]:
        """Token ids and targets by the template's own marks; white space after an end marker is no target."""
        out = self._tokenizer.apply_chat_template(
            messages,
            chat_template=self._source,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        ids, target = list(out["input_ids"]), [bool(m) for m in out["assistant_masks"]]
        for i in range(len(ids) - 1, -1, -1):
            follows = i + 1 < len(ids) and target[i + 1]
            if target[i] and not follows and not self._tokenizer.decode([ids[i]]).strip():
                target[i] = False
        return ids, target

    def mismatch(self, wanted: str, found: str) -> UserError:
        """The error that names the template and the first difference."""
        at = next(
            (i for i, (a, b) in enumerate(zip(wanted, found, strict=False)) if a != b),
            min(len(wanted), len(found)),
        )
        begin = max(0, at - 20)
        return UserError(
            f"{self.name} does not give back the assistant's text at character {at}\n"
            f"  wanted: {wanted[begin : at + 30]!r}\n"
            f"  found:  {found[begin : at + 30]!r}\n"
            f"  fix:    use a template that keeps every assistant turn as it is (data.chat_template=FILE.jinja)"
        )

    def _find_end_marker(self) -> str:
        turn = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": _PROBE}]
        try:
            after = self.render(turn).partition(_PROBE)[2]
        except BadRow as e:
            raise UserError(f"{self.name} cannot be used: {e.reason}\n  fix:   correct the template") from None
        special = {str(t) for t in self._tokenizer.all_special_tokens}
        special |= {t.content for t in self._tokenizer.added_tokens_decoder.values() if t.special}
        first = re.match(rf"\s*(?:{'|'.join(map(re.escape, sorted(special, key=len, reverse=True)))})", after)
        marker = first.group() if special and first else after.rstrip() or after
        if not marker:
            raise UserError(
                f"{self.name} does not show where an assistant turn ends, so the model would never learn to stop\n"
                "  fix:   let the template write an end marker after the assistant's text"
            )
        return marker


def find_template(tokenizer: Any, override: str | None) -> tuple[str, str] | None:
    """``(source, name for messages)`` of the template to use, or None: the file in ``data.chat_template``, else the
    model's own."""
    if override == "none":
        return None
    if override is not None:
        path = Path(override)
        if not path.is_file():
            raise UserError(
                f"data.chat_template: {override}: no such file\n  fix:   give a Jinja file, or none for plain text"
            )
        return path.read_text(encoding="utf-8-sig"), f"the chat template {override}"
    source = tokenizer.chat_template
    if isinstance(source, dict):  # several named templates: "default" is the one for chats without tools
        source = source.get("default")
    return (source, "the model's chat template") if source else None
