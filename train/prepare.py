"""Writes on-policy training data: chats whose answers, and prompts where none are given, are the
target's own.

    python -m train.prepare --out data/train.jsonl --rows 2000

One JSON object a line: `messages`, `input_ids`, `loss_mask` (1 = written by the target),
`temperature`, and which round and settings it is of. Started again, it goes on after the last
whole round.
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
from typing import Literal

import numpy as np

import spd_jax
from spd_jax import ConfigError, SamplingConfig, Target
from spd_jax.commandline import parse_flags, run, say
from spd_jax.prompts import read_prompts
from spd_jax.requests import check_context
from spd_jax.weights.files import file_sha256, one_line, sole_writer

OWN_START = b'{"messages": '  # of every row written here
STEMS = Path(__file__).with_name("stems.jsonl")


@dataclasses.dataclass(frozen=True)
class PrepareConfig:
    """Write on-policy training data: chats in which the target wrote what is learnt from."""

    out: Path
    """JSONL file, appended to; a run that was stopped goes on from its last whole round."""
    rows: int = 2000
    """Conversations in the file when done, rounded up to whole rounds."""
    target: str = "smollm2-135m"
    """Whose text it is: as in infer.decode."""
    prompts: Path | None = None
    """JSONL with `turns` or `messages`. None: the target writes the prompts itself."""
    batch_size: int = 48
    """Conversations generated at once: one round."""
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
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must be from 0 to 2^63 - 1, got {self.seed}")
        drawn_at = (*self.temperatures, self.prompt_temperature)
        if not self.temperatures or not all(0 <= t < math.inf for t in drawn_at):
            raise ConfigError("temperatures must be one or more numbers that are not negative")


@dataclasses.dataclass(frozen=True)
class OpenChat:
    """A conversation before its answer: ids, which of them the target wrote, and the text."""

    ids: list[int]  # up to and including the generation prompt
    loss_mask: list[int]  # one per id
    user: str


def from_file(target: Target, prompts: list[str], round_idx: int, size: int) -> list[OpenChat]:
    """The next `size` prompts of the file, in order and around again."""
    chats = []
    for idx in range(round_idx * size, (round_idx + 1) * size):
        user = prompts[idx % len(prompts)]
        ids = target.tokenizer.encode_chat(user)
        chats.append(OpenChat(ids, [0] * len(ids), user))
    return chats


def self_written(target: Target, config: PrepareConfig, round_idx: int) -> list[OpenChat]:
    """Lets the target write user turns that go on from short stems."""
    tokenizer = target.tokenizer
    stems = [json.loads(line) for line in STEMS.read_text(encoding="utf-8").splitlines()]
    rng = np.random.default_rng([config.seed, round_idx])
    chosen = [stems[i] for i in rng.integers(len(stems), size=config.batch_size)]
    marker = "\N{WHITE SQUARE}"
    before, after = _around(tokenizer.encode_chat, marker, tokenizer)
    starts = [before + tokenizer.encode(stem) for stem in chosen]
    written = spd_jax.generate(
        target,
        starts,
        max_new_tokens=config.prompt_tokens,
        sampling=SamplingConfig(temperature=config.prompt_temperature),
        seed=[_seed(config, round_idx, b) for b in range(config.batch_size)],
    )
    chats = []
    for start, result in zip(starts, written, strict=True):
        new = [i for i in result.tokens if i not in target.stop_ids]
        ids = start + new
        mask = [0] * len(start) + [1] * len(new) + [0] * len(after)
        chats.append(OpenChat(ids + after, mask, tokenizer.decode(ids[len(before) :])))
    return chats


def _around(encode_chat, marker: str, tokenizer) -> tuple[list[int], list[int]]:
    """Token ids of the chat template before and after a user turn."""
    whole, inner = encode_chat(marker), tokenizer.encode(marker)
    for start in range(len(whole) - len(inner) + 1):
        if whole[start : start + len(inner)] == inner:
            return whole[:start], whole[start + len(inner) :]
    raise ConfigError("the target's chat template changes the user's text; pass --prompts")


def _seed(config: PrepareConfig, round_idx: int, b: int) -> int:
    sequence = np.random.SeedSequence([config.seed, round_idx, b])
    return int(sequence.generate_state(1)[0])


def write_round(
    target: Target, config: PrepareConfig, chats: list[OpenChat], round_idx: int
) -> list[dict]:
    """Generates the answers of one round and returns its rows."""
    temperature = config.temperatures[round_idx % len(config.temperatures)]
    answers = spd_jax.generate(
        target,
        [chat.ids for chat in chats],
        max_new_tokens=config.answer_tokens,
        sampling=SamplingConfig(temperature=temperature),
        seed=[_seed(config, round_idx, b) ^ 1 for b in range(len(chats))],
    )
    return [
        {
            "messages": [
                {"role": "user", "content": chat.user},
                {"role": "assistant", "content": answer.text},
            ],
            "input_ids": chat.ids + answer.tokens,
            "loss_mask": chat.loss_mask + [1] * len(answer.tokens),
            "temperature": temperature,
        }
        for chat, answer in zip(chats, answers, strict=True)
    ]


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


def resume(config: PrepareConfig, settings: str) -> int:
    """Cuts an unfinished round off the file and returns how many rounds it holds.

    Raises:
      ConfigError: the file was not written by these settings; it is left as it is.
    """
    if not config.out.exists():
        return 0
    try:
        content = config.out.read_bytes()
    except OSError as error:
        raise ConfigError(f"{config.out}: cannot read ({one_line(error)})") from None
    n_rounds = end = offset = 0
    for line in content.splitlines(keepends=True):
        offset += len(line)
        if not line.endswith(b"\n") and line.startswith(OWN_START[: len(line)]):
            break  # cut short by a kill
        try:
            row = json.loads(line)
            same = (row["settings"], row["round"]) == (settings, n_rounds)
            ends_round = row["last_of_round"]
        except (ValueError, LookupError, TypeError, RecursionError):
            same = False
        if not same:
            raise ConfigError(
                f"{config.out} holds rows that these settings did not write; give another --out "
                "or the settings it was started with"
            )
        if ends_round:
            n_rounds, end = n_rounds + 1, offset
    if end < len(content):
        try:
            os.truncate(config.out, end)
        except OSError as error:
            raise ConfigError(f"{config.out}: cannot write ({one_line(error)})") from None
    return n_rounds


def settings_digest(config: PrepareConfig, target_sha256: str) -> str:
    """Names everything that the rows depend on."""
    fields = dataclasses.asdict(config) | {"target": target_sha256}
    del fields["out"], fields["rows"]
    if config.prompts is not None:
        fields["prompts"] = file_sha256(config.prompts)
    return hashlib.sha256(repr(sorted(fields.items())).encode()).hexdigest()[:16]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    config = parse_flags(PrepareConfig, "python -m train.prepare", argv)
    if config.out.is_dir():
        raise ConfigError(f"--out must name a file, got the folder {config.out}")
    target = spd_jax.load_target(config.target, config.dtype)
    if target.tokenizer is None:
        raise ConfigError(f"{config.target} has no tokenizer; training data needs one")
    prompts = None
    if config.prompts is not None:
        rows = list(read_prompts(config.prompts))
        prompts = [row.text for row in rows]
        for row in rows:
            ids = target.tokenizer.encode_chat(row.text)
            name = f"{row.path}:{row.line}: prompt"
            check_context(target, len(ids), config.answer_tokens, name, "answer_tokens")
    with sole_writer(config.out.with_name(f".{config.out.name}.lock")):
        write_rounds(target, config, prompts)
    return 0


def write_rounds(target: Target, config: PrepareConfig, prompts: list[str] | None) -> None:
    """Generates rounds until the file holds enough rows."""
    settings = settings_digest(config, target.sha256)
    first, began, n_tokens = resume(config, settings), time.perf_counter(), 0
    n_rounds = -(-config.rows // config.batch_size)
    for round_idx in range(first, n_rounds):
        if prompts is None:
            chats = self_written(target, config, round_idx)
        else:
            chats = from_file(target, prompts, round_idx, config.batch_size)
        rows = write_round(target, config, chats, round_idx)
        append(config.out, rows, {"round": round_idx, "settings": settings})
        n_tokens += sum(sum(row["loss_mask"]) for row in rows)
        rate = n_tokens / (time.perf_counter() - began)
        say(f"round {round_idx + 1}/{n_rounds}: {n_tokens} tokens written, {rate:.0f} a second")


if __name__ == "__main__":
    run(main)
