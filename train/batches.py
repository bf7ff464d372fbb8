"""Token rows -> batches of a few fixed shapes, one row or several packed in a sequence.

Batch number i is a function of the rows, the settings, the seed and i alone, so a run that knows
its position resumes exactly.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import grain
import numpy as np

from spd_jax.models.distill import IGNORED
from train.data import Row

# Each length of rows is compiled anew, for every fill: lengths are multiples of a step of so many
# tokens, or of more where the longest row would have more than this number of lengths below it.
STEP, N_LENGTHS = 64, 8
OPEN_SEQUENCES = 256  # that first-fit looks at: the oldest is closed when there are more


def bucket_len(n_tokens: int, sequence_len: int) -> int:
    """Returns the padded length of a row, one of at most `N_LENGTHS`."""
    step = STEP * -(-sequence_len // (N_LENGTHS * STEP))
    return min(-(-n_tokens // step) * step, sequence_len)


def make_batch(rows: Sequence[Row], n_rows: int, length: int) -> dict[str, np.ndarray]:
    """Pads rows to the right, and with empty rows to `n_rows`.

    Returns:
      input_ids, attention_mask and labels, int32 [n_rows, length]; row_numbers, int32 [n_rows],
      -1 for an empty row.
    """
    batch = _empty_batch(n_rows, length)
    batch["row_numbers"] = np.full(n_rows, -1, np.int32)
    for i, row in enumerate(rows):
        n = len(row.ids)
        batch["input_ids"][i, :n] = row.ids
        batch["attention_mask"][i, :n] = 1
        batch["row_numbers"][i] = row.number
        batch["labels"][i, :n] = np.where(row.scored_mask, row.ids, IGNORED)
    return batch


def make_packed_batch(
    sequences: Sequence[Sequence[Row]], n_rows: int, length: int, n_segments: int
) -> dict[str, np.ndarray]:
    """Lays the rows of each sequence end to end, and pads with empty sequences to `n_rows`.

    Returns:
      As `make_batch`, but attention_mask holds the number 1, 2, ... of each token's row in its
      sequence (0: padding), no first token of a row is a label, since what stands before it
      belongs to another, and row_numbers is int32 [n_rows, n_segments], padded with -1.
    """
    batch = _empty_batch(n_rows, length)
    batch["row_numbers"] = np.full((n_rows, n_segments), -1, np.int32)
    for i, members in enumerate(sequences):
        start = 0
        for k, row in enumerate(members):
            place = i, slice(start, start + len(row.ids))
            batch["input_ids"][place] = row.ids
            batch["attention_mask"][place] = k + 1
            batch["labels"][place] = np.where(row.scored_mask, row.ids, IGNORED)
            batch["labels"][i, start] = IGNORED
            batch["row_numbers"][i, k] = row.number
            start += len(row.ids)
    return batch


def _empty_batch(n_rows: int, length: int) -> dict[str, np.ndarray]:
    return {
        "input_ids": np.zeros((n_rows, length), np.int32),
        "attention_mask": np.zeros((n_rows, length), np.int32),
        "labels": np.full((n_rows, length), IGNORED, np.int32),
    }


def _bucketed(rows: Sequence[Row], sequence_len: int) -> dict[int, list[Row]]:
    buckets: dict[int, list[Row]] = {}
    for row in rows:
        buckets.setdefault(bucket_len(len(row.ids), sequence_len), []).append(row)
    return dict(sorted(buckets.items()))


def training_batches(
    rows: Sequence[Row], sequence_len: int, batch_tokens: int, seed: int, packing: bool = False
) -> tuple[grain.MapDataset, int]:
    """Returns the endless sequence of batches, by position, and the number of one epoch.

    Each epoch shuffles the rows of every length, cuts them into batches and shuffles these; with
    `packing`, it shuffles sequences that are filled once and cuts these into batches.
    """
    if packing:
        return _packed_batches(rows, sequence_len, batch_tokens, seed)
    parts = []
    for length, members in _bucketed(rows, sequence_len).items():
        n_rows = batch_tokens // length
        build = functools.partial(make_batch, n_rows=n_rows, length=length)
        part = grain.MapDataset.source(members).seed(seed + length).shuffle()
        parts.append(part.batch(n_rows, batch_fn=list).map(build))
    epoch = grain.MapDataset.concatenate(parts).seed(seed).shuffle()
    return epoch.repeat(), len(epoch)


def _packed_batches(
    rows: Sequence[Row], sequence_len: int, batch_tokens: int, seed: int
) -> tuple[grain.MapDataset, int]:
    sequences, n_rows = fill_sequences(rows, sequence_len, seed), batch_tokens // sequence_len
    build = functools.partial(
        make_packed_batch,
        n_rows=n_rows,
        length=sequence_len,
        n_segments=max(map(len, sequences)),
    )
    # Filled once: epochs of other sequences would differ in length, and a position would have no
    # epoch without filling all before it. Rows of a sequence do not see each other anyway.
    epoch = grain.MapDataset.source(sequences).seed(seed).shuffle()
    epoch = epoch.batch(n_rows, batch_fn=list).map(build)
    return epoch.repeat(), len(epoch)


def fill_sequences(rows: Sequence[Row], sequence_len: int, seed: int) -> list[list[Row]]:
    """Packs rows, in shuffled order, each into the first open sequence that has room for it."""
    order = np.random.default_rng([seed, sequence_len]).permutation(len(rows))
    sequences: list[list[Row]] = []
    room = np.zeros(0, np.int64)  # of the open sequences: the newest ones
    for i in order:
        row = rows[i]
        n, first = len(row.ids), len(sequences) - len(room)
        fits = np.flatnonzero(room >= n)
        if fits.size:
            at = int(fits[0])
            sequences[first + at].append(row)
            room[at] -= n
        else:
            sequences.append([row])
            room = np.append(room, sequence_len - n)[-OPEN_SEQUENCES:]
    return sequences


def ordered_batches(
    rows: Sequence[Row], sequence_len: int, batch_tokens: int
) -> Iterator[tuple[list[Row], dict[str, np.ndarray]]]:
    """Yields every row once, in order of length: the rows of a batch and the batch."""
    for length, members in _bucketed(rows, sequence_len).items():
        n_rows = batch_tokens // length
        for start in range(0, len(members), n_rows):
            chosen = members[start : start + n_rows]
            yield chosen, make_batch(chosen, n_rows, length)
