"""Conversations that the target answers turn by turn: read from files or opened by itself.

prompts -> OpenChat -> the target's answer -> the next user turn -> ... -> rows of training data.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

import spd_jax
from spd_jax import ConfigError, SamplingConfig, Target
from train.chats import Turns, read_turns
from train.sources import UnusableError, find_files, read_records
from train.tally import Tally

STEMS = Path(__file__).with_name("stems.jsonl")
Seeds = Callable[[int, int], int]  # (chat of the batch, turn) -> seed


@dataclasses.dataclass(frozen=True)
class ChatPrompt:
    """What is said to the target: before each of its answers, the turns that are new."""

    name: str  # "file:line"
    parts: tuple[Turns, ...]  # each ends with a user turn


@dataclasses.dataclass(frozen=True)
class OpenChat:
    """A conversation before an answer: ids, which of them the target wrote, and the text."""

    ids: list[int]  # up to and including the generation prompt
    loss_mask: list[int]  # one per id
    turns: Turns
    later: tuple[Turns, ...] = ()  # what is said after the answer


def read_chat_prompts(
    names: Sequence[str | Path], regenerate: Literal["all", "last"]
) -> tuple[list[ChatPrompt], list[Tally]]:
    """Reads prompts from files of chats, in every form that training reads, or of `turns`.

    Args:
      regenerate: all: the target gives every answer, and those of the file are dropped; last: only
        the one to the last user turn, after the file's own.
    Raises:
      ConfigError: a file cannot be read, or holds no prompt (the reasons are named).
    """
    prompts, tallies = [], []
    for path in find_files(names):
        tally = Tally(path)
        for record in read_records(path):
            tally.n_records += 1
            try:
                parts = prompt_parts(record.fields(), regenerate)
            except UnusableError as error:
                tally.skip(record.number, str(error))
                continue
            prompts.append(ChatPrompt(tally.place(record.number), parts))
        tally.check('give chats, or one {"turns": [...]} object a line')
        tallies.append(tally)
    return prompts, tallies


def prompt_parts(fields: dict[str, Any], regenerate: str) -> tuple[Turns, ...]:
    """Returns the parts of a ChatPrompt.

    Raises:
      UnusableError: the record holds no prompt.
    """
    said = fields.get("turns")
    if said is not None:
        if not isinstance(said, list):
            raise UnusableError("turns is not a list of texts")
        turns = read_turns({"messages": [{"role": "user", "content": text} for text in said]})
        if regenerate == "last" and len(turns) > 1:
            raise UnusableError("turns without the answers between them (regenerate is last)")
    else:
        turns = read_turns(fields)
    ends = [k + 1 for k, turn in enumerate(turns) if turn["role"] == "user"]
    if not ends:
        raise UnusableError("no user turn")
    if regenerate == "last":
        return (turns[: ends[-1]],)
    return tuple(
        [turn for turn in turns[start:end] if turn["role"] != "assistant"]
        for start, end in zip([0, *ends], ends, strict=False)
    )


def open_chat(prompt: ChatPrompt, ids: list[int]) -> OpenChat:
    """Returns a prompt, whose first part is encoded as `ids`, as a conversation to answer."""
    first, *later = prompt.parts
    return OpenChat(ids, [0] * len(ids), first, tuple(later))


def self_written(
    target: Target,
    rng: np.random.Generator,
    seeds: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float,
) -> list[OpenChat]:
    """Lets the target write user turns that go on from short stems, one per seed."""
    tokenizer = target.tokenizer
    stems = _stems()
    chosen = [stems[i] for i in rng.integers(len(stems), size=len(seeds))]
    before, after = _around(tokenizer)
    starts = [before + tokenizer.encode(stem) for stem in chosen]
    written = spd_jax.generate(
        target,
        starts,
        max_new_tokens=max_new_tokens,
        sampling=SamplingConfig(temperature=temperature),
        seed=list(seeds),
    )
    chats = []
    for start, result in zip(starts, written, strict=True):
        new = [i for i in result.tokens if i not in target.stop_ids]
        ids = start + new
        mask = [0] * len(start) + [1] * len(new) + [0] * len(after)
        user = {"role": "user", "content": tokenizer.decode(ids[len(before) :])}
        chats.append(OpenChat(ids + after, mask, [user]))
    return chats


def longest_start(tokenizer: Any) -> int:
    """Returns how many ids of a self-written prompt are given, at most."""
    before, after = _around(tokenizer)
    return len(before) + max(len(tokenizer.encode(stem)) for stem in _stems()) + len(after)


def _stems() -> list[str]:
    return [json.loads(line) for line in STEMS.read_text(encoding="utf-8").splitlines()]


def _around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Token ids of the chat template before and after a user turn."""
    marker = "\N{WHITE SQUARE}"
    whole, inner = tokenizer.encode_chat(marker), tokenizer.encode(marker)
    for start in range(len(whole) - len(inner) + 1):
        if whole[start : start + len(inner)] == inner:
            return whole[:start], whole[start + len(inner) :]
    raise ConfigError("the target's chat template changes the user's text; pass --prompts")


def answer_chats(
    target: Target,
    chats: Sequence[OpenChat],
    seeds: Seeds,
    *,
    max_new_tokens: int,
    temperature: float,
) -> tuple[list[dict[str, Any]], int]:
    """Lets the target answer every part of some conversations, all at once, turn by turn.

    Returns:
      The rows, and how many answers were left out since the context or the chat template does
      not allow them. A conversation is one row, unless the chat template shows an earlier answer
      otherwise than it was written: then a new row begins.
    """
    rows: list[list[dict[str, Any]]] = [[] for _ in chats]
    waiting, turn, n_left_out = dict(enumerate(chats)), 0, 0
    while waiting:
        answers = _generate(
            target,
            [chat.ids for chat in waiting.values()],
            [seeds(b, turn) for b in waiting],
            max_new_tokens,
            temperature,
            n_at_most=len(chats),
        )
        following: dict[int, OpenChat] = {}
        for (b, chat), answer in zip(waiting.items(), answers, strict=True):
            closed = _closed(chat, answer)
            after = _next_chat(target, closed, max_new_tokens) if closed.later else None
            n_left_out += len(closed.later) if after is None else 0
            if after is None or not any(after.loss_mask):
                rows[b].append(_row(closed, temperature))
            if after is not None:
                following[b] = after
        waiting, turn = following, turn + 1
    return [row for of_chat in rows for row in of_chat], n_left_out


def _generate(
    target: Target,
    prompts: list[list[int]],
    seeds: list[int],
    max_new_tokens: int,
    temperature: float,
    n_at_most: int,
) -> list[Any]:
    """`generate` in batches of few sizes, each of which is compiled: powers of two, and the most.

    A smaller batch is filled up with its first prompt.
    """
    n = len(prompts)
    n_more = min(1 << (n - 1).bit_length(), n_at_most) - n
    answers = spd_jax.generate(
        target,
        prompts + prompts[:1] * n_more,
        max_new_tokens=max_new_tokens,
        sampling=SamplingConfig(temperature=temperature),
        seed=seeds + seeds[:1] * n_more,
    )
    return answers[:n]


def _closed(chat: OpenChat, answer: Any) -> OpenChat:
    """The conversation with its answer."""
    return dataclasses.replace(
        chat,
        ids=chat.ids + answer.tokens,
        loss_mask=chat.loss_mask + [1] * len(answer.tokens),
        turns=[*chat.turns, {"role": "assistant", "content": answer.text}],
    )


def _next_chat(target: Target, closed: OpenChat, max_new_tokens: int) -> OpenChat | None:
    """The conversation with what is said next; its mask is all 0 where its ids begin anew.

    None: the chat template refuses it, or it leaves no room for an answer.
    """
    new, *later = closed.later
    turns = [*closed.turns, *new]
    try:
        ids = target.tokenizer.encode_chat(turns)
    except ConfigError:
        return None
    if len(ids) + max_new_tokens > target.config.max_context:
        return None
    goes_on = ids[: len(closed.ids)] == closed.ids
    written = closed.loss_mask if goes_on else []
    return OpenChat(ids, written + [0] * (len(ids) - len(written)), turns, tuple(later))


def _row(chat: OpenChat, temperature: float) -> dict[str, Any]:
    return {
        "messages": chat.turns,
        "input_ids": chat.ids,
        "loss_mask": chat.loss_mask,
        "temperature": temperature,
    }
