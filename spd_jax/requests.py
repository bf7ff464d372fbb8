"""From what a caller passes to padded arrays: prompts, seeds, stop ids, limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spd_jax.config import ConfigError
from spd_jax.models.bundle import Target
from spd_jax.models.reference import padded_prompt_len

Prompt = str | Sequence[int]


@dataclasses.dataclass(frozen=True)
class Request:
    """One batch of prompts, padded; what every decoder starts from."""

    prompts: np.ndarray  # int32 [B, T], right-padded with 0
    prompt_lens: np.ndarray  # int32 [B]
    keys: jax.Array  # typed PRNG keys [B]
    stop_ids: np.ndarray  # int32 [n], a power of two long, -1 pads
    max_new_tokens: int
    single: bool  # the caller passed one prompt, not a list


def make_request(
    target: Target,
    prompt: Prompt | Sequence[Prompt],
    max_new_tokens: int,
    stop_ids: Sequence[int] | None,
    seed: int | Sequence[int],
) -> Request:
    """Validates and pads what a caller passed.

    Raises:
      ConfigError: an empty prompt, ids out of range, a text without a tokenizer, more tokens
        than the context holds, a limit below 1, or a seed list of another length.
    """
    single = isinstance(prompt, str) or _is_ids(prompt)
    ids = [_encode(target, p) for p in ([prompt] if single else list(prompt))]
    if not ids:
        raise ConfigError("prompt: expected at least one prompt, got an empty list")
    if not _is_int(max_new_tokens) or max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens must be an integer of at least 1, got {max_new_tokens}")
    longest = max(map(len, ids))
    context = target.config.max_context
    if longest + max_new_tokens > context:
        raise ConfigError(
            f"prompt of {longest} tokens + max_new_tokens {max_new_tokens} exceed the model's "
            f"context of {context}; shorten the prompt or lower max_new_tokens"
        )
    prompts = np.zeros((len(ids), padded_prompt_len(longest)), np.int32)
    for row, one in zip(prompts, ids, strict=True):
        row[: len(one)] = one
    lens = np.array([len(one) for one in ids], np.int32)
    stops = pad_stop_ids(target, target.stop_ids if stop_ids is None else stop_ids)
    return Request(prompts, lens, _keys(seed, len(ids)), stops, int(max_new_tokens), single)


def pad_stop_ids(target: Target, stop_ids: Sequence[int]) -> np.ndarray:
    """Returns int32 ids padded with -1 to a power of two, so that few programs are needed."""
    ids = sorted({int(i) for i in stop_ids})
    if ids and not 0 <= ids[0] <= ids[-1] < target.config.vocab_size:
        raise ConfigError(
            f"stop_ids must be from 0 to {target.config.vocab_size - 1}, got {list(stop_ids)}"
        )
    padded = np.full(max(1, 1 << (len(ids) - 1).bit_length()) if ids else 1, -1, np.int32)
    padded[: len(ids)] = ids
    return padded


def _is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_ids(prompt: Any) -> bool:
    """True for one prompt of token ids, the empty one too; False for a list of prompts."""
    if isinstance(prompt, np.ndarray | jax.Array):
        return prompt.ndim == 1
    return all(_is_int(x) for x in prompt) and (len(prompt) > 0 or not isinstance(prompt, list))


def _encode(target: Target, prompt: Prompt) -> list[int]:
    if isinstance(prompt, str):
        if target.tokenizer is None:
            raise ConfigError(
                f"prompt: {target.name} has no tokenizer; pass token ids instead of text"
            )
        return _encode(target, target.tokenizer.encode_chat(prompt))
    ids = [x for x in np.asarray(prompt).tolist()]
    if not ids:
        raise ConfigError("prompt: expected at least one token, got an empty prompt")
    size = target.config.vocab_size
    bad = [i for i in ids if not _is_int(i) or not 0 <= i < size]
    if bad:
        raise ConfigError(
            f"prompt: token ids must be integers from 0 to {size - 1} (the vocabulary of "
            f"{target.name}), got {bad[0]!r}"
        )
    return ids


def _keys(seed: int | Sequence[int], n_batch: int) -> jax.Array:
    """Prompt b draws from seed + b, or from its own entry of a list."""
    if _is_int(seed):
        seeds = [int(seed) + b for b in range(n_batch)]
    else:
        seeds = [int(s) for s in seed]
        if len(seeds) != n_batch:
            raise ConfigError(
                f"seed: expected one integer or {n_batch} (one per prompt), got {len(seeds)}"
            )
    return jnp.stack([jax.random.key(s) for s in seeds])
