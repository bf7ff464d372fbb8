"""Training rows: JSONL of train.prepare -> token rows -> batches of a few fixed shapes.

A row is {"input_ids": [...], "loss_mask": [0 or 1 per id], "temperature": t, ...}; mask 1: the
target wrote that id, so it is scored. Batch number i is a function of the rows, the seed and i
alone, so a run that knows its position resumes exactly.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grain
import numpy as np

from spd_jax.checks import ConfigError
from spd_jax.models.distill import IGNORED

BUCKET = 64  # row lengths are rounded up to multiples of this: each length is compiled anew


class Row(NamedTuple):
    """One conversation as the target sees it."""

    ids: np.ndarray  # int32 [T]
    scored_mask: np.ndarray  # bool [T], True where the target wrote the id
    temperature: float  # the target wrote it at this temperature
    number: int = -1  # its index in the corpus


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The usable rows of a file, and what was left out."""

    rows: tuple[Row, ...]
    sha256: str  # of all ids and masks: does a resumed run see the same data?
    n_skipped: int  # rows without a scored id after the first, or a last line cut short
    n_cut: int  # tokens beyond sequence_len

    def describe(self) -> str:
        """Returns one line of counts."""
        n_tokens = sum(len(row.ids) for row in self.rows)
        n_scored = sum(int(row.scored_mask.sum()) for row in self.rows)
        text = f"{len(self.rows)} rows, {n_tokens} tokens, {n_scored} of them scored"
        text += f"; {self.n_skipped} rows skipped (nothing to score)" if self.n_skipped else ""
        return text + (f"; {self.n_cut} tokens beyond sequence_len cut" if self.n_cut else "")


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


def read_corpus(path: str | Path, vocab_size: int, sequence_len: int) -> Corpus:
    """Reads and checks a file of rows.

    Raises:
      ConfigError: it cannot be read, a row is malformed (file and line are named), or no row is
        usable.
    """
    rows, n_skipped, n_cut, digest = [], 0, 0, hashlib.sha256()
    for row in _checked_rows(Path(path), vocab_size):
        n_cut += max(0, len(row.ids) - sequence_len) if row else 0
        row = row and Row(row.ids[:sequence_len], row.scored_mask[:sequence_len], row.temperature)
        if not row or not row.scored_mask[1:].any():
            n_skipped += 1
            continue
        rows.append(row._replace(number=len(rows)))
        digest.update(row.ids.tobytes() + row.scored_mask.tobytes())
    if not rows:
        raise ConfigError(
            f"{path}: no usable row ({n_skipped} without a scored id); write it with train.prepare"
        )
    return Corpus(tuple(rows), digest.hexdigest(), n_skipped, n_cut)


def _checked_rows(path: Path, vocab_size: int) -> Iterator[Row | None]:
    """Yields the rows of a file; None for a last line that a stopped writer left unfinished."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: cannot read training rows ({error}); write them with train.prepare"
        ) from None
    for i, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            if i == len(lines) - 1:  # no line feed: the file is still being written
                yield None
                continue
            raise ConfigError(f"{path}:{i + 1}: not a JSON row ({error}); remove it") from None
        yield _checked_row(fields, f"{path}:{i + 1}", vocab_size)


def _checked_row(fields: Any, where: str, vocab_size: int) -> Row:
    if not isinstance(fields, dict):
        raise ConfigError(f"{where}: a row must be a JSON object, got {type(fields).__name__}")
    for name in ("input_ids", "loss_mask"):
        values = fields.get(name)
        if not isinstance(values, list) or not all(type(v) is int for v in values):
            raise ConfigError(f"{where}: {name} must be a list of integers; use train.prepare")
    ids, mask = fields["input_ids"], fields["loss_mask"]
    if len(ids) != len(mask):
        raise ConfigError(
            f"{where}: loss_mask must have one entry per id, got {len(mask)} for {len(ids)} ids"
        )
    wrong = next((v for v in ids if not 0 <= v < vocab_size), None)
    if wrong is not None:
        raise ConfigError(
            f"{where}: ids must be from 0 to {vocab_size - 1}, got {wrong}; prepare the data "
            "with the same target"
        )
    if not set(mask) <= {0, 1}:
        raise ConfigError(f"{where}: loss_mask must hold 0 and 1 only")
    temperature = fields.get("temperature", 1.0)
    is_number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if not (is_number and 0 <= temperature < float("inf")):
        raise ConfigError(f"{where}: temperature must be a number >= 0, got {temperature!r}")
    return Row(np.asarray(ids, np.int32), np.asarray(mask, bool), float(temperature))


def count_draft_ids(
    rows: Sequence[Row],
    size: int,
    vocab_size: int,
    stop_ids: Sequence[int],
    among: Sequence[int] | None = None,
) -> tuple[tuple[int, ...], float]:
    """Chooses the ids that a draft can propose: the stop ids and the most frequent scored ids.

    A stop id that is not to choose from is left out. Where fewer than `size` ids were seen, the
    lowest unseen ids fill up.

    Args:
      among: the ids to choose from, those of the head to start from; None: all.

    Returns:
      The sorted ids, and the share of the scored ids that are among them.
    Raises:
      ConfigError: there are fewer than `size` ids to choose from, or more stop ids.
    """
    n_known = vocab_size if among is None else len(among)
    if not len(stop_ids) <= size <= n_known:
        source = "target's vocab_size" if among is None else "draft ids of start_from,"
        raise ConfigError(
            f"draft_vocab_size must be from {max(1, len(stop_ids))} (the stop ids) to the "
            f"{source} {n_known}, got {size}"
        )
    counts = np.zeros(vocab_size, np.int64)
    for row in rows:
        counts += np.bincount(row.ids[row.scored_mask], minlength=vocab_size)
    rank = counts.copy()
    if among is not None:
        rank[np.setdiff1d(np.arange(vocab_size), among)] = -1
    rank[[i for i in stop_ids if rank[i] >= 0]] = np.iinfo(np.int64).max
    ids = np.sort(np.argsort(-rank, kind="stable")[:size])  # stable: the lowest id on ties
    return tuple(ids.tolist()), float(counts[ids].sum() / counts.sum())


def bucket_len(n_tokens: int, sequence_len: int) -> int:
    """Returns the padded length of a row."""
    return min(-(-n_tokens // BUCKET) * BUCKET, sequence_len)


def make_batch(rows: Sequence[Row], n_rows: int, length: int) -> dict[str, np.ndarray]:
    """Pads rows to the right, and with empty rows to `n_rows`.

    Returns:
      input_ids, attention_mask and labels, int32 [n_rows, length]; row_numbers, int32 [n_rows],
      -1 for an empty row.
    """
    batch = {
        "input_ids": np.zeros((n_rows, length), np.int32),
        "attention_mask": np.zeros((n_rows, length), np.int32),
        "labels": np.full((n_rows, length), IGNORED, np.int32),
        "row_numbers": np.full(n_rows, -1, np.int32),
    }
    for i, row in enumerate(rows):
        n = len(row.ids)
        batch["input_ids"][i, :n] = row.ids
        batch["attention_mask"][i, :n] = 1
        batch["row_numbers"][i] = row.number
        batch["labels"][i, :n] = np.where(row.scored_mask, row.ids, IGNORED)
    return batch


def _bucketed(rows: Sequence[Row], sequence_len: int) -> dict[int, list[Row]]:
    buckets: dict[int, list[Row]] = {}
    for row in rows:
        buckets.setdefault(bucket_len(len(row.ids), sequence_len), []).append(row)
    return dict(sorted(buckets.items()))


def training_batches(
    rows: Sequence[Row], sequence_len: int, batch_tokens: int, seed: int
) -> tuple[grain.MapDataset, int]:
    """Returns the endless sequence of batches, by position, and the number of one epoch.

    Each epoch shuffles the rows of every length, cuts them into batches and shuffles these.
    """
    parts = []
    for length, members in _bucketed(rows, sequence_len).items():
        n_rows = batch_tokens // length
        build = functools.partial(make_batch, n_rows=n_rows, length=length)
        part = grain.MapDataset.source(members).seed(seed + length).shuffle()
        parts.append(part.batch(n_rows, batch_fn=list).map(build))
    epoch = grain.MapDataset.concatenate(parts).seed(seed).shuffle()
    return epoch.repeat(), len(epoch)


def ordered_batches(
    rows: Sequence[Row], sequence_len: int, batch_tokens: int
) -> Iterator[tuple[list[Row], dict[str, np.ndarray]]]:
    """Yields every row once, in order of length: the rows of a batch and the batch."""
    for length, members in _bucketed(rows, sequence_len).items():
        n_rows = batch_tokens // length
        for start in range(0, len(members), n_rows):
            chosen = members[start : start + n_rows]
            yield chosen, make_batch(chosen, n_rows, length)
