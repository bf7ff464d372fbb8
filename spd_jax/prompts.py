"""Prompts as the mains read them: JSONL files -> rows; texts and chats -> checked token ids."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from spd_jax.checks import ConfigError
from spd_jax.requests import check_context
from spd_jax.weights.files import one_line


@dataclasses.dataclass(frozen=True)
class PromptRow:
    """One prompt of a file."""

    path: str
    line: int  # 1-based
    text: str  # the first turn


def read_prompts(path: str, limit: int | None = None) -> list[PromptRow]:
    """Reads a JSONL file of objects with `turns`, a list of texts, or `messages`, chat messages.

    The first turn, or the first message of the user, is the prompt.

    Raises:
      ConfigError: the file cannot be read, or a line is not such an object; names the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"cannot read the prompts {path}: {reason}") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        if limit is not None and len(rows) == limit:
            break
        if line.strip():
            rows.append(PromptRow(path, number, _first_turn(line, f"{path}:{number}")))
    if not rows:
        raise ConfigError(f'{path}: expected one {{"turns": [...]}} object a line, got none')
    return rows


def _first_turn(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # absurd numbers, absurd nesting
        raise ConfigError(f"{where}: not usable JSON ({one_line(error)})") from None
    try:
        if "turns" in record:
            (text, *_) = record["turns"] if isinstance(record["turns"], list) else [None]
        else:
            text = next(m["content"] for m in record["messages"] if m["role"] == "user")
    except (LookupError, TypeError, ValueError, StopIteration):
        text = None
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(
            f'{where}: expected an object with "turns", a list whose first entry is the prompt, or '
            f'with "messages", one of them the user\'s; got {line.strip()[:60]!r}'
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:  # "\\ud800" is valid JSON
        raise ConfigError(
            f"{where}: the prompt has half a character at {error.start}; give it as UTF-8"
        ) from None
    return text


def prompt_ids(target: Any, source: str, texts: list[str]) -> list[list[int]]:
    """Returns the ids of each prompt, a single user turn in the target's chat template.

    Raises:
      ConfigError: a prompt is empty, or the target (loaded from `source`) has no tokenizer.
    """
    if not all(texts):
        raise ConfigError("the prompt is empty; give at least one character")
    _check_tokenizer(target, source)
    return [target.tokenizer.encode_chat(text) for text in texts]


def checked_prompt_ids(
    target: Any,
    source: str,
    named: Iterable[tuple[str, str | list[dict[str, str]]]],
    max_new_tokens: int,
    *,
    limit: str = "max_new_tokens",
) -> list[list[int]]:
    """Returns the ids of prompts of files, all of them checked before the first is decoded.

    Args:
      source: what the target was loaded from, for messages.
      named: the name of each prompt, "file:line", and its text or chat.
      max_new_tokens: that are asked for; limit: the name of the setting that says so.
    Raises:
      ConfigError: the target has no tokenizer, its template refuses a prompt, or one does not fit
        the context; the prompt is named.
    """
    _check_tokenizer(target, source)
    prompts = []
    for name, prompt in named:
        try:
            ids = target.tokenizer.encode_chat(prompt)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
        check_context(target, len(ids), max_new_tokens, f"{name}: prompt", limit)
        prompts.append(ids)
    return prompts


def _check_tokenizer(target: Any, source: str) -> None:
    if target.tokenizer is None:
        raise ConfigError(
            f"the target {source!r} has no tokenizer, so text cannot be its prompt; add "
            "tokenizer.json to its directory or call spd_jax.decode with token ids"
        )
