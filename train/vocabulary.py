"""The draft vocabulary: the ids that a draft can propose, counted, and kept in a JSON file.

    python -m train.vocabulary --data train.jsonl --size 32000 --out vocab.json

The file is that of the published implementation: `token_ids`, and how they were counted.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from spd_jax.checks import ConfigError
from spd_jax.commandline import parse_flags, run, say
from spd_jax.config import DraftConfig
from spd_jax.weights import LoadedTarget, load_target_files
from spd_jax.weights.files import check_out, read_json, replace_file
from train.chats import ChatReader
from train.config import TrainConfig
from train.data import Row, read_corpus
from train.sources import find_files

POOR_SHARE = 0.5  # of the scored ids; a draft can propose none of the rest


@dataclasses.dataclass(frozen=True)
class VocabularyFlags:
    """Count the ids that a target's text is made of, and write the most frequent ones."""

    data: tuple[str, ...]
    """Files, folders or glob patterns, as train_data of train.pdm."""
    size: int
    """Ids to choose; the target's stop ids are always among them."""
    out: Path
    """JSON file to write; draft_vocab of train.pdm takes it."""
    target: str = "smollm2-135m"
    """As in infer.decode."""
    thinking: bool | None = None
    """As in infer.decode."""


def count_ids(rows: Sequence[Row], vocab_size: int) -> np.ndarray:
    """Returns how often each id is scored, int64 [V]."""
    counts = np.zeros(vocab_size, np.int64)
    for row in rows:
        counts += np.bincount(row.ids[row.scored_mask], minlength=vocab_size)
    return counts


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
    counts = count_ids(rows, vocab_size)
    ids = choose_ids(counts, size, stop_ids, among)
    return ids, float(counts[list(ids)].sum() / counts.sum())


def choose_ids(
    counts: np.ndarray,
    size: int,
    stop_ids: Sequence[int],
    among: Sequence[int] | None = None,
    name: str = "draft_vocab_size",
) -> tuple[int, ...]:
    """Returns the ids that `count_draft_ids` chooses, from the counts of all ids.

    Args:
      name: of the setting that says `size`, for errors.
    """
    vocab_size = len(counts)
    n_known = vocab_size if among is None else len(among)
    if not len(stop_ids) <= size <= n_known or size < 1:
        source = "target's vocab_size" if among is None else "draft ids of start_from,"
        raise ConfigError(
            f"{name} must be from {max(1, len(stop_ids))} (the stop ids) to the "
            f"{source} {n_known}, got {size}"
        )
    rank = counts.copy()
    if among is not None:
        rank[np.setdiff1d(np.arange(vocab_size), among)] = -1
    rank[[i for i in stop_ids if rank[i] >= 0]] = np.iinfo(np.int64).max
    ids = np.sort(np.argsort(-rank, kind="stable")[:size])  # stable: the lowest id on ties
    return tuple(ids.tolist())


def run_draft_ids(
    config: TrainConfig,
    rows: Sequence[Row],
    target: LoadedTarget,
    among: Sequence[int] | None = None,
) -> tuple[tuple[int, ...] | None, float]:
    """Returns the draft ids that a run's settings ask for, None for all, and their share.

    Raises:
      ConfigError: as `read_draft_ids` and `count_draft_ids`.
    """
    vocab_size = target.config.vocab_size
    if config.draft_vocab is not None:
        ids, counts = read_draft_ids(config.draft_vocab, vocab_size), count_ids(rows, vocab_size)
        share = float(counts[list(ids)].sum() / counts.sum())
        if share < POOR_SHARE:
            say(
                f"warning: the ids of {config.draft_vocab} are only {share:.2%} of the scored ids: "
                "is it of other data? train.vocabulary counts those of these"
            )
        return ids, share
    if config.draft_vocab_size is None:
        return None, 1.0
    return count_draft_ids(rows, config.draft_vocab_size, vocab_size, target.stop_ids, among)


def check_same_ids(config: TrainConfig, draft: DraftConfig, target: LoadedTarget) -> None:
    """Raises ConfigError where draft_vocab names other ids than the draft of a run to resume."""
    if config.draft_vocab is None:
        return
    if read_draft_ids(config.draft_vocab, target.config.vocab_size) != draft.draft_ids:
        raise ConfigError(
            f"{config.draft_vocab}: its ids are not those of the run in {config.workdir}; give the "
            "file it began with or a new workdir"
        )


def read_draft_ids(path: str | Path, vocab_size: int) -> tuple[int, ...]:
    """Returns the ids of a draft vocabulary file.

    Its own `vocab_size` is ignored: in published files it is the tokenizer's base size, and some
    ids (the end of a turn) are beyond it.

    Args:
      vocab_size: of the model.
    Raises:
      ConfigError: the file is none, or an id is not of the model's vocabulary.
    """
    fields = read_json(Path(path))
    ids = fields.get("token_ids")
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise ConfigError(
            f"{path}: token_ids must be a list of integers; write it with train.vocabulary"
        )
    if any(a >= b for a, b in zip(ids, ids[1:], strict=False)):
        raise ConfigError(f"{path}: token_ids must ascend, each once; sort them")
    if ids[0] < 0 or ids[-1] >= vocab_size:
        wrong = ids[0] if ids[0] < 0 else ids[-1]
        raise ConfigError(
            f"{path}: token_ids must be from 0 to {vocab_size - 1} (the target's vocabulary), got "
            f"{str(wrong)[:40]}; count the ids of this target"
        )
    stated = fields.get("draft_vocab_size")
    if stated is not None and stated != len(ids):
        raise ConfigError(
            f"{path}: draft_vocab_size says {stated!r:.40}, token_ids has {len(ids)}; get it anew"
        )
    return tuple(ids)


def check_replaceable(out: Path, data: Sequence[str]) -> None:
    """Raises ConfigError where a draft vocabulary file at `out` would cost anything but its like.

    Args:
      data: where the ids are counted.
    """
    check_out(out)
    if not out.parent.is_dir():
        raise ConfigError(f"--out must name a file in an existing folder, got {out}")
    if not out.exists():
        return
    if any(path.exists() and path.samefile(out) for path in find_files(data)):
        raise ConfigError(f"--out {out} is one of the files of --data; give another --out")
    try:
        fields = read_json(out)
    except ConfigError:
        fields = {}
    if not isinstance(fields.get("token_ids"), list) or "draft_vocab_size" not in fields:
        raise ConfigError(
            f"--out {out} is there and is no draft vocabulary; give another --out or remove it"
        )


def write_vocabulary(
    path: Path,
    ids: Sequence[int],
    counts: np.ndarray,
    tokenizer_name: str,
    data_paths: Sequence[str],
) -> float:
    """Writes a draft vocabulary file; returns the share of the counted ids that it covers.

    Args:
      counts: of all ids of the model, int [V].
    Raises:
      ConfigError: the disk refuses.
    """
    total, chosen = int(counts.sum()), int(counts[list(ids)].sum())
    fields = {
        "tokenizer_name": tokenizer_name,
        "data_paths": list(data_paths),
        "mask_assistant": True,  # only scored ids are counted
        "vocab_size": len(counts),
        "draft_vocab_size": len(ids),
        "token_ids": list(ids),
        "total_positions_counted": total,
        "topk_selected_token_count_sum": chosen,
        "topk_mass_ratio": chosen / total,
    }
    try:
        replace_file(path, (json.dumps(fields) + "\n").encode())
    except OSError as error:
        raise ConfigError(f"{path}: cannot write ({error.strerror}); change --out") from None
    return chosen / total


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    flags = parse_flags(VocabularyFlags, "python -m train.vocabulary", argv)
    check_replaceable(flags.out, flags.data)
    target = load_target_files(flags.target)
    reader = ChatReader(target.tokenizer, target.stop_ids, flags.thinking)
    corpus = read_corpus(
        flags.data, target.config.vocab_size, reader=reader, target_sha256=target.sha256
    )
    for line in corpus.describe():
        say(line)
    counts = count_ids(corpus.rows, target.config.vocab_size)
    ids = choose_ids(counts, flags.size, target.stop_ids, name="--size")
    mass = write_vocabulary(flags.out, ids, counts, flags.target, flags.data)
    say(f"{len(ids)} ids cover {mass:.2%} of {counts.sum()} scored ids; wrote {flags.out}")
    return 0


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
