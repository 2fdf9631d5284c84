"""Text to token ids, with the part that is trained on given as spans of characters and checked by decoding."""

from __future__ import annotations

import unicodedata
from itertools import pairwise
from typing import Any

import numpy as np

from megatrain.datasets import Row
from megatrain.datasets._chat import ChatTemplate
from megatrain.errors import UserError

Span = tuple[int, int]  # characters [start, end)


class Encoder:
    """Encodes rows with one tokenizer and, for dialogues, one chat template.

    ``chat`` is None for a model without a template, or where it is ``switched_off``: dialogues are then refused by
    :meth:`dialogue`.
    """

    def __init__(self, tokenizer: Any, chat: ChatTemplate | None, switched_off: bool = False) -> None:
        self.tokenizer, self.chat, self._switched_off = tokenizer, chat, switched_off
        bos, start = tokenizer.bos_token_id, tokenizer("a")["input_ids"][:1]
        self._document_start = [bos] if bos is not None and start == [bos] else []

    def document(self, text: str, spans: list[Span]) -> Row:
        """A text without a template: beginning-of-text once (where the tokenizer has it), the end marked."""
        ids, target = self._encode(text, spans)
        if ids[:1] != self._document_start:
            ids, target = self._document_start + ids, [False] * len(self._document_start) + target
        end = self.tokenizer.eos_token_id
        if end is not None and ids[-1:] != [end]:
            ids, target = [*ids, end], [*target, True]
        return _row(ids, target)

    def dialogue(self, messages: list[dict[str, str]]) -> Row:
        """A dialogue under the chat template, trained on every assistant turn with its end marker.

        Raises :class:`UserError` naming the template and the first difference when what would be trained on
        does not decode to exactly the assistant's texts.
        """
        if self.chat is None and self._switched_off:
            raise UserError(
                "the row is a dialogue, and data.chat_template=none leaves no way to write it as text\n"
                "  fix:   remove data.chat_template for the model's own template, or name one with\n"
                "         data.chat_template=FILE.jinja"
            )
        if self.chat is None:
            raise UserError(
                "the row is a dialogue, but the model brings no chat template\n"
                "  fix:   name one with data.chat_template=FILE.jinja, use the instruct version of the model,\n"
                "         or train on prompt_completion or text rows"
            )
        if self.chat.has_marks:
            ids, target = self.chat.marked(messages)
        else:
            text, spans = self.chat.spans(messages)
            ids, target = self._encode(text, spans)
        ids, target = self._once(ids, target)
        self._verify(ids, target, messages)
        return _row(ids, target)

    def _once(self, ids: list[int], target: list[bool]) -> tuple[list[int], list[bool]]:
        """Beginning-of-text once: a template and a row may both bring it."""
        bos = self.tokenizer.bos_token_id
        while bos is not None and ids[:2] == [bos, bos]:
            ids, target = ids[1:], target[1:]
        return ids, target

    def _encode(self, text: str, spans: list[Span]) -> tuple[list[int], list[bool]]:
        """Token ids of ``text``; a token is a target if it lies inside a span.

        Tokens are those of the whole text. Where one would straddle the border of a span (a line feed that merges
        with the answer's own), the pieces are tokenized apart, as they are when the model is used.
        """
        if self.tokenizer.is_fast:
            whole = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            ids: list[int] = whole["input_ids"]
            start, end = np.asarray(whole["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
            inside, straddles = np.zeros(len(ids), dtype=bool), False
            for a, b in spans:
                touches = (start < b) & (end > a)
                within = (start >= a) & (end <= b) & (end > start)
                inside |= within
                straddles |= bool((touches & ~within).any())
            if not straddles:
                return ids, inside.tolist()
        borders = sorted({0, len(text), *(c for span in spans for c in span)})
        ids, target = [], []
        for a, b in pairwise(borders):
            piece = self.tokenizer(text[a:b], add_special_tokens=False)["input_ids"]
            ids += piece
            target += [any(s <= a and b <= e for s, e in spans)] * len(piece)
        return ids, target

    def decode(self, ids: list[int]) -> str:
        """The text of token ids, special tokens included, nothing cleaned up."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _verify(self, ids: list[int], target: list[bool], messages: list[dict[str, str]]) -> None:
        assert self.chat is not None
        marker = self.chat.end_marker
        found = [self.decode(segment) for segment in _segments(ids, target)]
        wanted = [m["content"] for m in messages if m["role"] == "assistant"]
        if len(found) == len(wanted) and all(_same(f, w, marker) for f, w in zip(found, wanted, strict=True)):
            return
        pairs = [
            *zip(found, wanted, strict=False),
            ("".join(found[len(wanted) :]), "".join(wanted[len(found) :])),
        ]
        f, w = next((f, w) for f, w in pairs if not _same(f, w, marker))
        raise self.chat.mismatch(w + marker, f)


def _segments(ids: list[int], target: list[bool]) -> list[list[int]]:
    """The runs of consecutive targets."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], np.asarray(target, dtype=bool), [False]]).astype(np.int8)))
    return [ids[a:b] for a, b in edges.reshape(-1, 2)]


def _same(found: str, content: str, marker: str) -> bool:
    """Whether ``found`` is the content and its marker, up to the white space that templates trim around the content
    and the Unicode composition that tokenizers normalise."""
    found, content, marker = (unicodedata.normalize("NFC", t).strip() for t in (found, content, marker))
    return found.endswith(marker) and found[: len(found) - len(marker)].strip() == content


def _row(ids: list[int], target: list[bool]) -> Row:
    return Row(np.asarray(ids, dtype=np.int32), np.asarray(target, dtype=np.bool_))
