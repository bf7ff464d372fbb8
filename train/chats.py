"""Records -> token ids and which of them are scored: chats, plain text, token ids.

Of a chat, the scored ids of an answer are those that the target would have generated: what follows
the chat template's generation prompt, up to the first end-of-turn marker. The ids before it are
those of `encode_chat`, so that training sees what decoding with the same `thinking` sees.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from spd_jax.checks import ConfigError
from spd_jax.weights.tokenizer import ChatTokenizer
from train.sources import UnusableError

ROLES = {
    "system": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "model": "assistant", "chatgpt": "assistant",
    "bot": "assistant",
}  # fmt: skip
MAX_RENDERED = 2**25  # characters of one chat; each of its answers renders what is before it
TURN_COST = 64  # characters that rendering a turn is worth besides its own
Turns = list[dict[str, str]]  # {"role", "content"}, and "reasoning_content" where it is given


class Tokens(NamedTuple):
    """What the target sees, and what of it is scored."""

    ids: list[int]
    mask: list[int]  # 0 or 1 per id


class _Answer(NamedTuple):
    n_prompt: int  # ids before it
    ids: list[int]  # of the prompt and of the answer with its end


@dataclasses.dataclass(frozen=True)
class ChatReader:
    """How a target turns records into ids."""

    tokenizer: ChatTokenizer | None  # None: rows of token ids only
    stop_ids: tuple[int, ...] = ()
    thinking: bool | None = None  # as in `spd_jax.load_target`; None: as the tokenizer has it

    def tokens(
        self, fields: dict[str, Any], sequence_len: int | None = None
    ) -> tuple[list[Tokens], int]:
        """Returns the token rows of a record, and how many of its answers they do not score.

        A chat is one row, unless its template shows earlier answers otherwise than they were
        written (without their thoughts, say): those are scored in rows of their own.

        Args:
          sequence_len: ids of a row that are used. A chat is read until an answer begins beyond
            them, or until so many turns were rendered that the rest would take minutes.
        Raises:
          UnusableError: the record has no known form, or nothing of it can be scored.
        """
        if fields.get("input_ids") is not None:
            return [_token_ids(fields)], 0
        is_text = _chat_field(fields) is None and fields.get("text") is not None
        turns = None if is_text else read_turns(fields)
        if self.tokenizer is None:
            raise UnusableError("text for a target that has no tokenizer")
        if turns is None:
            ids = self.tokenizer.encode(_text(fields["text"], "text"))
            return [Tokens(ids, [1] * len(ids))], 0
        return self._chat(turns, sequence_len)

    def _chat(self, turns: Turns, sequence_len: int | None) -> tuple[list[Tokens], int]:
        places = [k for k, turn in enumerate(turns) if turn["role"] == "assistant"]
        if not places:
            raise UnusableError("no assistant turn")
        sizes = [*itertools.accumulate(TURN_COST + sum(map(len, t.values())) for t in turns)]
        answers, reasons, n_rendered = [], [], 0
        for k in places:
            n_rendered += sizes[k]
            try:
                answers.append(self._answer(turns[:k], turns[k]))
            except UnusableError as error:
                reasons.append(str(error))
            else:
                # Not after an answer: thoughts since the last user turn may not be shown later on.
                is_beyond = sequence_len is not None and answers[-1].n_prompt >= sequence_len
                if is_beyond and turns[k - 1]["role"] == "user":
                    break
            if n_rendered > MAX_RENDERED:
                break
        if not answers:
            raise UnusableError(reasons[0])
        return _rows(answers), len(places) - len(answers)

    def _answer(self, before: Turns, turn: dict[str, str]) -> _Answer:
        if not before:
            raise UnusableError("an answer without a prompt")
        tokenizer = self._served
        try:
            prompt = tokenizer.render_chat(before, opens_turn=True)
            through = tokenizer.render_chat([*before, turn], opens_turn=False)
        except ConfigError as error:
            raise UnusableError(f"{error}"[:120]) from None
        start = len(prompt)
        if not through.startswith(prompt):
            start = self._start_of_content(before, turn, prompt, through)
        answer = self._until_end(through[start:])
        prompt_ids, ids = tokenizer.encode(prompt), tokenizer.encode(prompt + answer)
        if ids[: len(prompt_ids)] != prompt_ids:
            # A token lies across the seam, which decoding cannot write: it begins at the seam.
            ids = prompt_ids + tokenizer.encode(answer)
            if tokenizer.decode(ids, with_markers=True) != prompt + answer:
                raise UnusableError("an answer whose first token begins in the prompt")
        if len(ids) == len(prompt_ids):
            raise UnusableError("an empty answer")
        return _Answer(len(prompt_ids), ids)

    def _start_of_content(
        self, before: Turns, turn: dict[str, str], prompt: str, through: str
    ) -> int:
        """Returns where an answer begins that is shown without the end of its generation prompt.

        Some templates open an answer without thoughts with an empty thought, and do not show it
        afterwards. Thoughts that are merely opened are none of these: they are for the target to
        write, so the prompt must be one that thinking would change.
        """
        thoughtful = self._served.with_thinking(True)
        if prompt != thoughtful.render_chat(before, opens_turn=True):
            n_before = len(self._served.render_chat(before, opens_turn=False))
            n_same = len(os.path.commonprefix([prompt, through]))
            # The content may begin as the rest of the prompt does: then it begins before n_same.
            for content in (turn["content"], turn["content"].strip()):
                for start in range(n_same, n_before, -1):
                    if through.startswith(content, start):
                        tags = re.findall(r"<[^<>]+>", prompt[start:])  # the last ends the thought
                        if tags and tags[-1] not in content:
                            return start
        thoughtless = self._served.with_thinking(False).render_chat(before, opens_turn=True)
        hint = "" if prompt == thoughtless else " (thinking False changes it)"
        raise UnusableError(f"an answer that does not continue the generation prompt{hint}")

    @functools.cached_property
    def _served(self) -> ChatTokenizer:
        return self.tokenizer.with_thinking(self.thinking)

    @functools.cached_property
    def _ends(self) -> tuple[str, ...]:
        return self.tokenizer.marker_texts(sorted({*self.stop_ids, *self.tokenizer.end_ids}))

    def _until_end(self, text: str) -> str:
        """Cuts what the template writes after an answer."""
        ends = [text.index(marker) + len(marker) for marker in self._ends if marker in text]
        return text[: min(ends)] if ends else text.rstrip()  # a template without end markers


def _rows(answers: Sequence[_Answer]) -> list[Tokens]:
    """Joins answers into as few rows as there can be: each row scores what it repeats exactly."""
    rows, left = [], list(answers)
    while left:
        ids, kept = left[-1].ids, []
        mask = [0] * len(ids)
        for answer in left:
            n = len(answer.ids)
            if answer.ids == ids[:n]:
                mask[answer.n_prompt : n] = [1] * (n - answer.n_prompt)
            else:
                kept.append(answer)
        rows.append(Tokens(ids, mask))
        left = kept
    return rows[::-1]


def _chat_field(fields: dict[str, Any]) -> str | None:
    return next((n for n in ("messages", "conversations") if fields.get(n) is not None), None)


def read_turns(fields: dict[str, Any]) -> Turns:
    """Returns the turns of a chat: {"role", "content"} or {"from", "value"} each.

    Raises:
      UnusableError: they are none.
    """
    name = _chat_field(fields)
    if name is None:
        raise UnusableError("none of messages, conversations, text and input_ids")
    turns = fields[name]
    if not isinstance(turns, list) or not turns:
        raise UnusableError(f"{name} is not a list of turns")
    return [_turn(turn) for turn in turns]


def _turn(turn: Any) -> dict[str, str]:
    if not isinstance(turn, dict):
        raise UnusableError("a turn is not an object")
    names = ("role", "content") if turn.get("role") is not None else ("from", "value")
    role, content = (turn.get(name) for name in names)
    if not isinstance(role, str) or role not in ROLES:
        raise UnusableError("a turn without a role" if role is None else "a turn of unknown role")
    if turn.get("tool_calls"):
        raise UnusableError("a turn with tool calls")
    if isinstance(content, list):  # parts, of which only text is for a language model
        parts = [p.get("text") if isinstance(p, dict) else None for p in content]
        content = "".join(parts) if all(isinstance(p, str) for p in parts) else None
    result = {"role": ROLES[role], "content": _text(content, "a turn")}
    thoughts = turn.get("reasoning_content")
    if thoughts is not None and thoughts != "":
        result["reasoning_content"] = _text(thoughts, "reasoning_content")
    return result


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise UnusableError(f"{name} without text")
    if not value.strip():
        raise UnusableError(f"{name} that is empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UnusableError(f"{name} with half a character") from None
    return value


def _token_ids(fields: dict[str, Any]) -> Tokens:
    ids, mask = fields["input_ids"], fields.get("loss_mask")
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise UnusableError("input_ids is not a list of integers")
    if mask is None:
        return Tokens(ids, [1] * len(ids))
    if not isinstance(mask, list) or not all(type(m) in (int, bool) and m in (0, 1) for m in mask):
        raise UnusableError("loss_mask is not a list of 0 and 1")
    if len(ids) != len(mask):
        raise UnusableError("loss_mask has not one entry per id")
    return Tokens(ids, [int(m) for m in mask])
