"""A data file to encoded rows, with a count of everything that was left out and why."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from megatrain.config import DataConfig
from megatrain.datasets import BadRow, Format, Row, find_format, format_names
from megatrain.datasets._chat import ChatTemplate, find_template
from megatrain.datasets._encode import Encoder
from megatrain.datasets._jsonl import read_jsonl
from megatrain.errors import UserError

Progress = Callable[[str, int, int], None]
_SHOWN = 10  # bad rows that are named one by one


@dataclass(slots=True)
class Dataset:
    """Encoded rows in file order, and the counts behind the console's data line."""

    encoder: Encoder
    format: str
    max_seq_len: int
    rows: list[Row] = field(default_factory=list)
    dropped_long: int = 0
    cut: int = 0
    dropped_empty: int = 0
    bad: list[tuple[int, BadRow]] = field(default_factory=list)
    fingerprint: str = ""

    @property
    def tokens(self) -> int:
        """Tokens of all rows, without padding."""
        return sum(len(r) for r in self.rows)

    @property
    def target_tokens(self) -> int:
        """Tokens that a loss is taken on: a row's first token has nothing before it to be predicted from."""
        return sum(int(r.target[1:].sum()) for r in self.rows)


def load_dataset(
    config: DataConfig, tokenizer: Any, *, vocab_size: int, positions: int | None, progress: Progress
) -> Dataset:
    """Read, encode and check ``config.train`` for a model of ``vocab_size`` embedding rows and ``positions``.

    Raises :class:`UserError` for a file that cannot be used, for bad rows (as ``data.bad_rows`` says), for token ids
    that the model does not have, and when no row is left to train on.
    """
    path = Path(config.train)
    limit = _length_limit(config, positions)
    template = find_template(tokenizer, config.chat_template)
    chat = ChatTemplate(tokenizer, *template) if template else None
    reader = _Reader(
        config,
        path,
        Dataset(Encoder(tokenizer, chat, config.chat_template == "none"), config.format, limit),
        vocab_size,
    )
    size = path.stat().st_size if path.is_file() else 0
    for line, record, done in read_jsonl(path):
        reader.add(line, record)
        progress("reading data", done, size)
    return reader.finish()


def _length_limit(config: DataConfig, positions: int | None) -> int:
    if config.max_seq_len is None:
        return min(4096, positions or 4096)
    if positions is not None and config.max_seq_len > positions:
        raise UserError(
            f"data.max_seq_len: {config.max_seq_len} is more than the model has positions for\n"
            f"  found: {positions} positions\n  fix:   set data.max_seq_len={positions} or less"
        )
    return config.max_seq_len


class _Reader:
    """Adds the records of one file to a :class:`Dataset`."""

    def __init__(self, config: DataConfig, path: Path, dataset: Dataset, vocab_size: int) -> None:
        self.config, self.path, self.data, self.vocab_size = config, path, dataset, vocab_size
        self.format: Format | None = None if config.format == "auto" else find_format(config.format)
        self.digest, self.seen = hashlib.blake2b(digest_size=16), 0
        self.checked = False  # whether the mapped columns have been found in a row

    def add(self, line: int, record: dict[str, Any] | BadRow) -> None:
        self.seen += 1
        try:
            if isinstance(record, BadRow):
                raise record
            if not self.checked:
                self._check_columns(record)
            self._encode(line, self._renamed(record))
        except BadRow as bad:
            self.data.bad.append((line, bad))
            if self.config.bad_rows == "stop" and len(self.data.bad) >= _SHOWN:
                self._stop_for_bad_rows()
        except UserError as e:
            raise UserError(f"data.train: {self.path} line {line}: {e}") from None

    def _check_columns(self, record: dict[str, Any]) -> None:
        """Raise :class:`UserError` if ``data.columns`` names a column that the first row does not have."""
        inner = [k for v in record.values() if isinstance(v, list) for m in v if isinstance(m, dict) for k in m]
        names = list(dict.fromkeys([*record, *inner]))
        for ours, theirs in self.config.columns.items():
            if theirs not in names:
                near = get_close_matches(theirs, names, 1)
                raise UserError(
                    f"data.columns: {ours}: {theirs}: the row has no column {theirs!r}\n"
                    f"  found: {', '.join(names) or 'no columns'}\n"
                    f"  fix:   {f'did you mean {near[0]}?' if near else 'name one of these'}"
                )
        self.checked = True

    def _renamed(self, record: dict[str, Any]) -> dict[str, Any]:
        """The record under our column names; also the keys of the messages in it."""
        if not self.config.columns:
            return record
        ours = {theirs: name for name, theirs in self.config.columns.items()}
        record = {ours.get(k, k): v for k, v in record.items()}
        for value in record.values():
            if isinstance(value, list):
                value[:] = [{ours.get(k, k): v for k, v in m.items()} if isinstance(m, dict) else m for m in value]
        return record

    def _encode(self, line: int, record: dict[str, Any]) -> None:
        if self.format is None:
            self.format = self._recognise(record)
        row = self.format.encode(record, self.data.encoder)
        high = int(row.ids.max())
        if high >= self.vocab_size:
            token = self.data.encoder.decode([high])
            raise UserError(
                f"token {token!r} has id {high}, but the model's embedding has {self.vocab_size} rows\n"
                "  fix:   use the tokenizer that belongs to the model"
            )
        for part in self._fit(row):
            if not part.target[1:].any():
                self.data.dropped_empty += 1
                continue
            self.data.rows.append(part)
            self.digest.update(part.ids.tobytes() + part.target.tobytes())

    def _recognise(self, record: dict[str, Any]) -> Format:
        unknown = set(self.config.columns) - {c for n in format_names() for c in find_format(n).COLUMNS}
        if unknown:
            known = ", ".join(c for n in format_names() for c in find_format(n).COLUMNS)
            raise UserError(f"data.columns: {sorted(unknown)[0]!r} is none of our columns\n  known: {known}")
        for name in format_names():
            if find_format(name).recognises(record):
                self.data.format = name
                return find_format(name)
        forms = "; ".join(f"{n}: {', '.join(find_format(n).COLUMNS[:2])}" for n in format_names())
        raise UserError(
            f"the columns fit none of the formats\n  found: {', '.join(record) or 'no columns'}\n"
            f"  known: {forms}\n  fix:   name yours, as data.columns='{{text: {next(iter(record), 'body')}}}'"
        )

    def _fit(self, row: Row) -> list[Row]:
        """The row within the length limit: itself, cut, split, or nothing."""
        assert self.format is not None
        limit, policy = self.data.max_seq_len, self.config.too_long
        if policy == "split" and not self.format.SPLITS:
            raise UserError(
                f"data.too_long: split is for text rows only\n  found: {self.data.format} rows\n"
                "  fix:   set data.too_long=drop or truncate"
            )
        if len(row) <= limit:
            return [row]
        if policy == "auto":
            policy = "split" if self.format.SPLITS else "drop"
        if policy == "drop":
            self.data.dropped_long += 1
            return []
        self.data.cut += 1
        if policy == "truncate":
            return [Row(row.ids[:limit], row.target[:limit])]
        # Pieces overlap by one token, so that each token but the first is predicted exactly once.
        starts = range(0, len(row) - 1, limit - 1)
        return [Row(row.ids[a : a + limit], row.target[a : a + limit]) for a in starts]

    def finish(self) -> Dataset:
        bad, data = self.data.bad, self.data
        if bad and self.config.bad_rows == "stop":
            self._stop_for_bad_rows()
        if len(bad) > self.config.max_bad_share * self.seen:
            self._stop_for_bad_rows(f"{len(bad)} of {self.seen} rows are bad, more than data.max_bad_share allows")
        if not data.rows:
            raise UserError(
                f"data.train: {self.path}: no row is left to train on\n"
                f"  found: {self.seen} rows: {data.dropped_long} longer than {data.max_seq_len} tokens, "
                f"{data.dropped_empty} without a target token, {len(bad)} bad\n"
                "  fix:   raise data.max_seq_len, or set data.too_long=truncate or split"
            )
        data.fingerprint = self.digest.hexdigest()
        return data

    def _stop_for_bad_rows(self, headline: str = "") -> None:
        (line, first), rest = self.data.bad[0], self.data.bad[1:_SHOWN]
        where = f"data.train: {self.path} line {line}: "
        parts = [
            f"data.train: {self.path}: {headline}\n  first: line {line}: {first.reason}"
            if headline
            else where + first.reason
        ]
        parts += [f"  found: {first.found}"] if first.found else []
        parts += [f"  also:  line {n}: {b.reason}" for n, b in rest]
        more = len(self.data.bad) - 1 - len(rest)
        parts += [f"  also:  {more} more"] if more else []
        parts.append(f"  fix:   {first.fix}, or set " + ("data.max_bad_share" if headline else "data.bad_rows=skip"))
        raise UserError("\n".join(parts))
