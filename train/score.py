"""Scores a draft head on held-out rows, at one number of pipeline stages or several.

    python -m train.score --head runs/smollm2_n5/heads/4000 --data data/heldout.jsonl --stages 3 5

The figures are those that train.pdm logs while it trains: agreement, the pipeline replayed along
the rows (alpha, tau) beside the 2-gram lookup, and what sampling at temperature 1 would accept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import spd_jax
from spd_jax.checks import ConfigError
from spd_jax.commandline import parse_flags, run, say
from spd_jax.config import refuse_v10
from spd_jax.models.bundle import Trained
from spd_jax.weights.files import check_writable, write_json
from train.chats import ChatReader
from train.config import MOST
from train.data import last_answers, read_corpus
from train.evaluate import Figures, at_stages, evaluate, make_eval_step
from train.teacher import Teacher

COLUMNS = {
    "alpha": "alpha",
    "tau": "tau",
    "lookup_alpha": "lookup\nalpha",
    "lookup_tau": "lookup\ntau",
    "agree_target": "agree-\nment",
    "kl": "KL",
    "coverage": "cover-\nage",
    "acceptance": "accept-\nance\nat T=1",
    "acceptance_tau": "its\ntau",
}
WIDTH = 100  # of the printed table
UNRECORDED = Trained(thinking=None, sequence_len=256)  # of heads that do not say


@dataclasses.dataclass(frozen=True)
class ScoreFlags:
    """Score a draft head on held-out rows."""

    data: tuple[str, ...]
    """Files, folders or glob patterns, as heldout_data of train.pdm."""
    head: str | None = None
    """As --draft of infer.decode. None: the head that is shipped for the target."""
    target: str = "smollm2-135m"
    """As in infer.decode."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Run dtype of target and draft."""
    stages: tuple[int, ...] = ()
    """Numbers of pipeline stages. (): the one that the head was trained for."""
    rows: int | None = None
    """Rows used at most, from the first on. None: all."""
    sequence_len: int | None = None
    """Longest row in tokens; what becomes of longer ones is said by overflow. None: as the head
    was trained with, 256 where it does not say."""
    overflow: Literal["cut", "discard"] = "cut"
    """As in train.pdm."""
    batch_tokens: int | None = None
    """Tokens scored at once. None: 512, or one row where that is longer."""
    thinking: bool | None = None
    """As in infer.decode."""
    json: Path | None = None
    """File for the figures."""

    def __post_init__(self) -> None:
        row_len = self.sequence_len or 2
        for name, least in (("rows", 1), ("sequence_len", 2), ("batch_tokens", row_len)):
            value, most = getattr(self, name), MOST.get(name)
            if value is None:
                continue
            if value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}")
            if most is not None and value > most:
                raise ConfigError(f"{name} must be at most {most}, got {value}")


def score_head(flags: ScoreFlags) -> dict[int, Figures]:
    """Returns the figures of `evaluate` at each number of stages.

    Raises:
      ConfigError: the head is not one of this target, or the data or stages cannot be.
    """
    target = spd_jax.load_target(flags.target, flags.dtype, thinking=flags.thinking)
    head = spd_jax.load_draft(flags.head, target)
    draft = head.config
    refuse_v10(draft, head.name, "scored here")
    counts = list(dict.fromkeys(flags.stages or (draft.n_stages,)))
    drafts = [at_stages(draft, n, target.config.n_layers) for n in counts]
    sequence_len = flags.sequence_len or (head.trained or UNRECORDED).sequence_len
    batch_tokens = flags.batch_tokens or max(512, sequence_len)
    if batch_tokens < sequence_len:
        raise ConfigError(
            f"batch_tokens must be at least {sequence_len}, a row of this head, got "
            f"{batch_tokens}; raise it or lower sequence_len"
        )
    reader = ChatReader(target.tokenizer, target.stop_ids, flags.thinking)
    corpus = read_corpus(
        flags.data,
        target.config.vocab_size,
        sequence_len,
        reader,
        flags.overflow,
        target.sha256,
    )
    for line in corpus.describe():
        say(line)
    corpus = last_answers(corpus)
    found = evaluate(
        [make_eval_step(target.config, one) for one in drafts],
        Teacher(target.config, draft, target.params, corpus),
        target.params,
        head.params,
        corpus.rows[: flags.rows],
        sequence_len,
        batch_tokens,
    )
    return dict(zip(counts, found, strict=True))


def print_table(found: dict[int, Figures], console: Console) -> None:
    """Prints a line for each group of rows and number of stages."""
    table = Table("rows", box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for heading in ("positions", "stages", *COLUMNS.values()):
        table.add_column(heading, justify="right")
    for group in next(iter(found.values())):
        for n_stages, figures in found.items():
            rates = figures[group]
            shown = (rates[name] for name in COLUMNS)
            cells = ("-" if rate is None else f"{rate:.3f}" for rate in shown)
            table.add_row(group, f"{rates['n_scored']}", f"{n_stages}", *cells)
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    flags = parse_flags(ScoreFlags, "python -m train.score", argv)
    if flags.json is not None:
        check_writable(flags.json)
    found = score_head(flags)
    print_table(found, Console(highlight=False, width=WIDTH))
    if flags.json is not None:
        write_json(flags.json, found)
    return 0


if __name__ == "__main__":
    run(main)
