"""Training rows: files -> records -> token rows, every record used or counted with a reason.

The forms of a record are those of `train.chats`; `train.batches` makes batches of the rows.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from spd_jax.checks import ConfigError
from train.chats import ChatReader, Tokens
from train.sources import Record, UnusableError, find_files, read_records
from train.tally import Tally

N_FILES_SHOWN = 8
NO_LIMIT = 2**31 - 1
HOTTEST = 1000


class Row(NamedTuple):
    """One conversation as the target sees it."""

    ids: np.ndarray  # int32 [T]
    scored_mask: np.ndarray  # bool [T], True where the target wrote the id
    temperature: float  # the target wrote it at this temperature
    number: int = -1  # its index in the corpus


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The usable rows of some files, and what became of the records."""

    rows: tuple[Row, ...]
    sha256: str  # of all ids and masks: does a resumed run see the same data?
    tallies: tuple[Tally, ...] = ()  # of each file

    def describe(self) -> list[str]:
        """Returns lines of counts: of each file, and of all where they are several."""
        lines = [tally.describe() for tally in self.tallies[:N_FILES_SHOWN]]
        if len(self.tallies) > 1:
            total = {
                name: sum(getattr(tally, name) for tally in self.tallies)
                for name in ("n_used", "n_tokens", "n_scored", "n_skipped")
            }
            lines.append(
                f"{len(self.tallies)} files: {total['n_used']} rows, {total['n_tokens']} tokens, "
                f"{total['n_scored']} scored; {total['n_skipped']} skipped"
            )
        return lines


def last_answers(corpus: Corpus) -> Corpus:
    """Scores only the last span that the target wrote in each row: its answer.

    A prompt that it wrote too was drawn at another temperature, so held-out figures leave it out.
    """
    rows = []
    for row in corpus.rows:
        before = np.flatnonzero(~row.scored_mask[: np.flatnonzero(row.scored_mask)[-1]])
        mask = row.scored_mask.copy()
        mask[: before[-1] + 1 if before.size else 0] = False
        rows.append(row._replace(scored_mask=mask))
    return dataclasses.replace(corpus, rows=tuple(rows))


def count_shared(heldout: Corpus, training: Corpus) -> int:
    """Returns how many held-out rows are, id for id, among the training rows too."""
    keys = [row.ids.tobytes() for row in heldout.rows]
    wanted = set(keys)
    shared = {key for row in training.rows if (key := row.ids.tobytes()) in wanted}
    return sum(key in shared for key in keys)


def read_corpus(
    names: str | Path | Iterable[str | Path],
    vocab_size: int,
    sequence_len: int = NO_LIMIT,
    reader: ChatReader | None = None,
    overflow: Literal["cut", "discard"] = "cut",
    target_sha256: str | None = None,
) -> Corpus:
    """Reads the rows of files, folders and glob patterns.

    Args:
      reader: of text and chats; None: rows of token ids only.
      overflow: whether rows longer than `sequence_len` are cut to it or skipped.
      target_sha256: of the target's weights; ids that are recorded as another's are refused.
    Raises:
      ConfigError: a file cannot be read or has no usable row (the reasons and rows are named), or
        ids belong to another target: it is recorded so, or one is not of the vocabulary.
    """
    reader = reader or ChatReader(None)
    rows, tallies, digest = [], [], hashlib.sha256()
    for path in find_files(names):
        tally = Tally(path)
        for record in read_records(path):
            tally.n_records += 1
            try:
                _check_target(record, tally, target_sha256)
                found = _rows_of(record, tally, vocab_size, sequence_len, reader, overflow)
            except UnusableError as error:
                tally.skip(record.number, str(error))
                continue
            for row in found:
                rows.append(row._replace(number=len(rows)))
                digest.update(row.ids.tobytes() + row.scored_mask.tobytes())
        tally.check("give chats, text or the rows of train.prepare")
        tallies.append(tally)
    return Corpus(tuple(rows), digest.hexdigest(), tuple(tallies))


def _rows_of(
    record: Record,
    tally: Tally,
    vocab_size: int,
    sequence_len: int,
    reader: ChatReader,
    overflow: str,
) -> list[Row]:
    """Returns the rows of a record and counts their tokens; UnusableError where there are none."""
    fields = record.fields()
    temperature = _temperature(fields.get("temperature"))
    parts, n_unscored = reader.tokens(fields, sequence_len)
    rows, reason, n_cut = [], "", 0
    for tokens in parts:
        _check_vocabulary(tokens, tally.place(record.number), vocab_size)
        n_over = max(0, len(tokens.ids) - sequence_len)
        if n_over and overflow == "discard":
            reason = f"longer than sequence_len {sequence_len}"
        elif not any(tokens.mask[1:sequence_len]):
            reason = "nothing to score" + (" before sequence_len" if n_over else "")
        else:
            ids = np.asarray(tokens.ids[:sequence_len], np.int32)
            rows.append(Row(ids, np.asarray(tokens.mask[:sequence_len], bool), temperature))
            n_cut += n_over
    if not rows:
        raise UnusableError(reason)
    tally.n_cut += n_cut
    tally.n_unscored += n_unscored + len(parts) - len(rows)
    tally.n_tokens += sum(len(row.ids) for row in rows)
    tally.n_scored += sum(int(row.scored_mask.sum()) for row in rows)
    return rows


def _check_target(record: Record, tally: Tally, target_sha256: str | None) -> None:
    fields = record.fields()
    wrote = fields.get("target_sha256") if fields.get("input_ids") is not None else None
    if None not in (wrote, target_sha256) and wrote != target_sha256:
        raise ConfigError(
            f"{tally.place(record.number)}: its ids are those of the target with sha256 "
            f"{str(wrote)[:12]}, this one has {target_sha256[:12]}; prepare the data with the same "
            "target"
        )


def _check_vocabulary(tokens: Tokens, where: str, vocab_size: int) -> None:
    wrong = next((i for i in tokens.ids if not 0 <= i < vocab_size), None)
    if wrong is not None:
        raise ConfigError(
            f"{where}: ids must be from 0 to {vocab_size - 1}, got {str(wrong)[:40]}; prepare the "
            "data with the same target"
        )


def _temperature(value: Any) -> float:
    if value is None:
        return 1.0
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and 0 <= value <= HOTTEST):
        raise UnusableError(f"temperature is not a number from 0 to {HOTTEST}")
    return float(value)
