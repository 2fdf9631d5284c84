"""Reads JSON lines with their line numbers; broken lines become :class:`BadRow`, the file's own flaws errors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from shlex import quote
from typing import Any

from megatrain.datasets import BadRow
from megatrain.errors import UserError

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_OTHER_FORMS = {
    ".parquet": "Parquet",
    ".csv": "CSV",
    ".tsv": "TSV",
    ".arrow": "Arrow",
    ".gz": "gzip",
    ".zst": "zstd",
}


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any] | BadRow, int]]:
    """Yields ``(line number from 1, record or BadRow, bytes read so far)``; empty lines are passed over.

    Accepts a byte-order mark and Windows line ends. Raises :class:`UserError` when the file cannot be read as
    JSON lines at all.
    """
    check_readable(path)
    done = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            done += len(raw)
            line = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            if line.strip():
                yield number, _parse(line, cut_off=not raw.endswith(b"\n")), done


def check_readable(path: Path) -> None:
    """Raise :class:`UserError` unless ``path`` is a non-empty file that may hold JSON lines."""
    if not path.exists():
        beside = [p.name for p in path.parent.glob("*.jsonl")] if path.parent.is_dir() else []
        near = get_close_matches(path.name, beside, 1)
        hint = (
            f"did you mean {path.with_name(near[0])}?" if near else "check the path (it is read from where you start)"
        )
        raise UserError(f"data.train: {path}: no such file\n  fix:   {hint}")
    if path.is_dir():
        files = ", ".join(sorted(p.name for p in path.glob("*.jsonl"))[:3]) or "no .jsonl files"
        raise UserError(f"data.train: {path} is a folder\n  found: {files}\n  fix:   name one JSONL file")
    try:
        with path.open("rb") as file:
            start = file.read(4096)
    except OSError as e:
        raise UserError(f"data.train: {path}: {e.strerror}\n  fix:   make the file readable") from None
    if path.suffix.lower() in _OTHER_FORMS:
        form = _OTHER_FORMS[path.suffix.lower()]
        raise UserError(f"data.train: {path}: {form} is not supported yet\n  fix:   write it as JSON lines (.jsonl)")
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise UserError(f"data.train: {path} is UTF-16\n  fix:   save it as UTF-8")
    text = start.removeprefix(b"\xef\xbb\xbf").strip()
    if not text:
        raise UserError(f"data.train: {path} is empty\n  fix:   give a file with one JSON object per line")
    if text == b"{" or text.startswith((b"[", b"{\n", b"{\r\n")):
        raise UserError(
            f"data.train: {path} is one JSON document, not one object per line\n"
            f"  fix:   jq -c '.[]' {quote(str(path))} > {quote(path.with_suffix('.jsonl').name)}"
        )


def _parse(line: bytes, cut_off: bool) -> dict[str, Any] | BadRow:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as e:
        return BadRow("not UTF-8", f"byte {line[e.start]:#04x} at column {e.start + 1}", "save the file as UTF-8")
    except (json.JSONDecodeError, RecursionError) as e:
        if cut_off:
            end = line[-60:].decode("utf-8", "replace")
            return BadRow("the file ends in the middle of this row", f"... {end}", "write or fetch the file anew")
        return BadRow(f"not JSON: {e}", line[:60].decode("utf-8", "replace").strip())
    if not isinstance(record, dict):
        return BadRow("not a JSON object", type(record).__name__)
    if _SURROGATE.search(line):  # a pair of them is one character; one alone is none, and no tokenizer takes it
        try:
            json.dumps(record, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as e:
            return BadRow("half a character (a lone surrogate)", f"\\u{ord(e.object[e.start]):04x}")
    return record
