"""Writes on-policy training data: chats whose answers, and prompts where none are given, are the
target's own.

    python -m train.prepare --out data/train.jsonl --rows 2000
    python -m train.prepare --out data/train.jsonl --rows 2000 --prompts chats/*.parquet

One JSON object a line: `messages`, `input_ids`, `loss_mask` (1 = written by the target),
`temperature`, the target's sha256, and which round and settings it is of. Started again, it goes
on after the last whole round.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

import spd_jax
from spd_jax import ConfigError, SamplingConfig, Target
from spd_jax.commandline import parse_flags, run, say
from spd_jax.prompts import checked_prompt_ids
from spd_jax.weights.files import check_out, file_sha256, one_line, sole_writer
from train.data import HOTTEST
from train.dialogues import (
    OpenChat,
    answer_chats,
    longest_start,
    open_chat,
    read_chat_prompts,
    self_written,
)
from train.progress import RoundProgress
from train.sources import find_files

MAX_ROWS, MAX_BATCH = 10**9, 2**14
OWN_START = b'{"messages": '  # of every row written here


@dataclasses.dataclass(frozen=True)
class PrepareConfig:
    """Write on-policy training data: chats in which the target wrote what is learnt from."""

    out: Path
    """JSONL file, appended to; a run that was stopped goes on from its last whole round."""
    rows: int = 2000
    """Conversations in the file when done, rounded up to whole rounds, one of each temperature at
    least."""
    target: str = "smollm2-135m"
    """Whose text it is: as in infer.decode."""
    prompts: tuple[str, ...] | None = None
    """Files, folders or glob patterns of chats (as train_data of train.pdm) or of `turns`. None:
    the target writes the prompts itself."""
    regenerate: Literal["all", "last"] = "all"
    """all: the target gives every answer of a chat, in order; last: only the last one, after those
    of the file."""
    thinking: bool | None = None
    """As in infer.decode."""
    batch_size: int = 48
    """Conversations generated at once, one round, where `rows` has as many for each temperature;
    else fewer, and then the file cannot be made longer."""
    temperatures: tuple[float, ...] = (0.0, 0.7)
    """Of the answers, one a round in turn."""
    prompt_temperature: float = 1.0
    """Of self-written prompts."""
    prompt_tokens: int = 64
    """At most, of a self-written prompt."""
    answer_tokens: int = 192
    """At most, of an answer."""
    seed: int = 0
    """Seed of the prompts and of all sampling."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype that the target runs in."""

    def __post_init__(self) -> None:
        for name in ("rows", "batch_size", "prompt_tokens", "answer_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name, most in (("rows", MAX_ROWS), ("batch_size", MAX_BATCH)):
            if getattr(self, name) > most:
                raise ConfigError(f"{name} must be at most {most}, got {getattr(self, name)}")
        if self.prompts is not None and not self.prompts:
            raise ConfigError("prompts must name one place or more, got none")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must be from 0 to 2^63 - 1, got {self.seed}")
        drawn_at = (*self.temperatures, self.prompt_temperature)
        if not self.temperatures or not all(0 <= t <= HOTTEST for t in drawn_at):
            raise ConfigError(
                f"temperatures must be one or more numbers from 0 to {HOTTEST}, as must "
                f"prompt_temperature, got {', '.join(map(str, drawn_at))}"
            )
        for temperature in drawn_at:
            SamplingConfig(temperature)  # for its error

    @property
    def round_size(self) -> int:
        """Conversations of one round: no more than leave a round for each temperature."""
        return min(self.batch_size, math.ceil(self.rows / len(self.temperatures)))

    @property
    def n_rounds(self) -> int:
        """Rounds of the whole file."""
        return max(math.ceil(self.rows / self.round_size), len(self.temperatures))


def next_chats(
    target: Target, config: PrepareConfig, prompts: Sequence[OpenChat] | None, round_idx: int
) -> list[OpenChat]:
    """Returns the conversations of a round: those of the files in order and around again, or new
    ones."""
    size = config.round_size
    if prompts is not None:
        first = round_idx * size
        return [prompts[i % len(prompts)] for i in range(first, first + size)]
    return self_written(
        target,
        np.random.default_rng([config.seed, round_idx]),
        [_seed(config, round_idx, b) for b in range(size)],
        max_new_tokens=config.prompt_tokens,
        temperature=config.prompt_temperature,
    )


def write_round(
    target: Target, config: PrepareConfig, chats: list[OpenChat], round_idx: int
) -> tuple[list[dict], int]:
    """Generates the answers of one round; returns its rows and how many answers were left out."""
    return answer_chats(
        target,
        chats,
        lambda b, turn: _seed(config, round_idx, b, *([turn] if turn else [])) ^ 1,
        max_new_tokens=config.answer_tokens,
        temperature=config.temperatures[round_idx % len(config.temperatures)],
    )


def _seed(config: PrepareConfig, *place: int) -> int:
    return int(np.random.SeedSequence([config.seed, *place]).generate_state(1)[0])


def append(path: Path, rows: list[dict], mark: dict) -> None:
    """Appends one round; its last row says so."""
    lines = [
        json.dumps(row | mark | {"last_of_round": i == len(rows)}, ensure_ascii=False) + "\n"
        for i, row in enumerate(rows, 1)
    ]
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(lines))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ConfigError(f"{path}: cannot write ({one_line(error)}); change --out") from None


class Written(NamedTuple):
    """What a file of whole rounds holds."""

    n_rounds: int = 0
    n_rows: int = 0
    n_tokens: int = 0
    n_scored: int = 0

    def with_round(self, rows: Sequence[dict]) -> Written:
        """Returns the counts with one more round."""
        return Written(
            self.n_rounds + 1,
            self.n_rows + len(rows),
            self.n_tokens + sum(len(row["input_ids"]) for row in rows),
            self.n_scored + sum(sum(row["loss_mask"]) for row in rows),
        )


def resume(config: PrepareConfig, settings: str) -> Written:
    """Cuts an unfinished round off the file and returns what it then holds.

    Raises:
      ConfigError: the file was not written by these settings; it is left as it is.
    """
    if not config.out.exists():
        return Written()
    try:
        content = config.out.read_bytes()
    except OSError as error:
        raise ConfigError(f"{config.out}: cannot read ({one_line(error)})") from None
    found, rows, end, offset = Written(), [], 0, 0
    for line in content.splitlines(keepends=True):
        offset += len(line)
        if _is_cut_short(line):
            break
        try:
            row = json.loads(line)
            same = (row["settings"], row["round"]) == (settings, found.n_rounds)
            ends_round = row["last_of_round"]
            rows.append({name: row[name] for name in ("input_ids", "loss_mask")})
        except (ValueError, LookupError, TypeError, RecursionError):
            same = False
        if not same:
            raise ConfigError(
                f"{config.out} holds rows that these settings did not write; give another --out "
                "or the settings it was started with"
            )
        if ends_round and line.endswith(b"\n"):  # a whole row may have lost its line end
            found, rows, end = found.with_round(rows), [], offset
    if end < len(content):
        try:
            os.truncate(config.out, end)
        except OSError as error:
            raise ConfigError(f"{config.out}: cannot write ({one_line(error)})") from None
    return found


def _is_cut_short(line: bytes) -> bool:
    """Whether a line may be a row of ours that a kill cut: one that is whole JSON is not."""
    if line.endswith(b"\n") or not line.startswith(OWN_START[: len(line)]):
        return False
    try:
        json.JSONDecoder().raw_decode(line.decode(errors="ignore"))
    except json.JSONDecodeError:
        return True
    except (ValueError, RecursionError):  # absurd numbers, absurd nesting
        return False
    return False


def settings_digest(config: PrepareConfig, target_sha256: str) -> str:
    """Names everything that the rows depend on."""
    fields = dataclasses.asdict(config)
    fields |= {"target": target_sha256, "batch_size": config.round_size}
    del fields["out"], fields["rows"]
    if config.prompts is not None:
        fields["prompts"] = [file_sha256(path) for path in prompt_files(config)]
    return hashlib.sha256(repr(sorted(fields.items())).encode()).hexdigest()[:16]


def prompt_files(config: PrepareConfig) -> list[Path]:
    """Returns the files of prompts: never the one that is written, wherever it lies.

    Raises:
      ConfigError: there are none.
    """
    files = find_files(config.prompts)
    if config.out.exists():
        files = [path for path in files if not (path.exists() and path.samefile(config.out))]
    if not files:
        raise ConfigError(f"--prompts names only --out {config.out}; give another --out")
    return files


def check_room(target: Target, config: PrepareConfig) -> None:
    """Raises ConfigError where self-written prompts and their answers may not fit the context."""
    context, n_given = target.config.max_context, longest_start(target.tokenizer)
    if n_given + config.prompt_tokens + config.answer_tokens > context:
        raise ConfigError(
            f"{n_given} given tokens + --prompt-tokens {config.prompt_tokens} + --answer-tokens "
            f"{config.answer_tokens} exceed the model's context of {context}; lower one of them"
        )


def read_open_chats(target: Target, config: PrepareConfig) -> list[OpenChat]:
    """Reads the prompts of the files, says what was skipped, and encodes each once.

    Raises:
      ConfigError: a file has no prompt, or one does not fit the context (it is named).
    """
    prompts, tallies = read_chat_prompts(prompt_files(config), config.regenerate)
    for tally in tallies:
        if tally.n_skipped:
            say(f"{tally.path}: {tally.n_used} prompts; {tally.describe_skipped()}")
    encoded = checked_prompt_ids(
        target,
        config.target,
        [(prompt.name, prompt.parts[0]) for prompt in prompts],
        config.answer_tokens,
        limit="answer_tokens",
    )
    return [open_chat(prompt, ids) for prompt, ids in zip(prompts, encoded, strict=True)]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    config = parse_flags(PrepareConfig, "python -m train.prepare", argv)
    check_out(config.out)
    target = spd_jax.load_target(config.target, config.dtype, thinking=config.thinking)
    if target.tokenizer is None:
        raise ConfigError(f"{config.target} has no tokenizer; training data needs one")
    if config.prompts is None:
        check_room(target, config)
    prompts = None if config.prompts is None else read_open_chats(target, config)
    with sole_writer(config.out.with_name(f".{config.out.name}.lock")):
        write_rounds(target, config, prompts)
    return 0


def write_rounds(target: Target, config: PrepareConfig, prompts: list[OpenChat] | None) -> None:
    """Generates rounds until the file holds enough rows, and says what it holds then."""
    settings = settings_digest(config, target.sha256)
    mark = {"target_sha256": target.sha256, "settings": settings}
    before, n_left_out, began = resume(config, settings), 0, time.monotonic()
    held = before
    with RoundProgress(config.n_rounds, held.n_rounds) as progress:
        for round_idx in range(held.n_rounds, config.n_rounds):
            chats = next_chats(target, config, prompts, round_idx)
            rows, n = write_round(target, config, chats, round_idx)
            append(config.out, rows, mark | {"round": round_idx})
            n_left_out += n
            n_scored, held = held.n_scored, held.with_round(rows)
            progress.advance(held.n_scored - n_scored)
    if n_left_out:
        say(
            f"{n_left_out} later answers were left out: the context or the chat template does not "
            "allow them"
        )
    say(describe_written(config.out, held, before, time.monotonic() - began))


def describe_written(out: Path, held: Written, before: Written, seconds: float) -> str:
    """Returns what a file holds, and what came to it in so many seconds."""
    line = f"{out}: {held.n_rows} rows, {held.n_tokens} tokens, {held.n_scored} of them scored; "
    if held == before:
        return f"{line}there was nothing left to write"
    n_new = held.n_scored - before.n_scored
    return f"{line}{n_new} tokens written in {seconds:.1f} s, {n_new / seconds:.0f} a second"


if __name__ == "__main__":
    run(main)
