"""What a caller passes, checked: prompts, seeds, stop ids and limits, padded; training batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spd_jax.checks import ConfigError, require
from spd_jax.config import SamplingConfig, V10DraftConfig
from spd_jax.models.bundle import Draft, Target
from spd_jax.models.distill import IGNORED
from spd_jax.models.reference import padded_prompt_len
from spd_jax.ops.sampling import plan
from spd_jax.pipeline.programs import bucket_batch
from spd_jax.pipeline.state import Inputs
from spd_jax.program import is_traced

Prompt = str | Sequence[int]


@dataclasses.dataclass(frozen=True)
class Request:
    """One batch of prompts, padded; what every decoder starts from."""

    prompts: np.ndarray  # int32 [B, T], right-padded with 0; B is a bucket
    prompt_lens: np.ndarray  # int32 [B]; 0 in the last rows, which only pad the batch
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
    single = _is_single(prompt)
    ids = [_encode(target, p) for p in ([prompt] if single else list(prompt))]
    if not is_int(max_new_tokens) or max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens must be an integer of at least 1, got {max_new_tokens}")
    longest = max(map(len, ids))
    check_context(target, longest, max_new_tokens)
    n_rows = bucket_batch(len(ids))
    prompts = np.zeros((n_rows, padded_prompt_len(longest)), np.int32)
    lens = np.zeros(n_rows, np.int32)
    for b, one in enumerate(ids):
        prompts[b, : len(one)], lens[b] = one, len(one)
    stops = pad_stop_ids(target, target.stop_ids if stop_ids is None else stop_ids)
    keys = prompt_keys(_seeds(seed, len(ids)) + [0] * (n_rows - len(ids)))
    return Request(prompts, lens, keys, stops, int(max_new_tokens), single)


def make_inputs(target: Target, request: Request, sampling: SamplingConfig) -> Inputs:
    """Returns what the engine's programs read of a request."""
    method, knobs = plan(sampling, target.config.vocab_size)
    return Inputs(
        jnp.asarray(request.prompt_lens),
        request.keys,
        jnp.asarray(request.stop_ids),
        jnp.int32(request.max_new_tokens),
        knobs,
        method,
    )


def check_context(
    target: Target,
    n_tokens: int,
    max_new_tokens: int,
    name: str = "prompt",
    limit: str = "max_new_tokens",
) -> None:
    """Raises ConfigError where a prompt and the text asked for exceed the context."""
    context = target.config.max_context
    if n_tokens + max_new_tokens > context:
        raise ConfigError(
            f"{name} of {n_tokens} tokens + {limit} {max_new_tokens} exceed the model's context "
            f"of {context}; shorten the prompt or lower {limit}"
        )


def pad_stop_ids(target: Target, stop_ids: Sequence[int]) -> np.ndarray:
    """Returns int32 ids padded with -1 to a power of two, so that few programs are needed."""
    ids = sorted(set(check_ids(target, stop_ids, "stop_ids"))) if np.size(stop_ids) else []
    padded = np.full(max(1, 1 << (len(ids) - 1).bit_length()) if ids else 1, -1, np.int32)
    padded[: len(ids)] = ids
    return padded


def check_ids(target: Target, ids: object, name: str = "prompt") -> list[int]:
    """Returns token ids as a list.

    Raises:
      ConfigError: it is empty or not a flat sequence of ids of the target's vocabulary.
    """
    size = target.config.vocab_size
    wanted = f"{name}: token ids must be integers from 0 to {size - 1} (the vocabulary of "
    try:
        ids = np.asarray(ids)
    except ValueError:  # ragged
        ids = np.asarray(None)
    if ids.size == 0:
        raise ConfigError(f"{name}: expected at least one token, got an empty prompt")
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ConfigError(f"{wanted}{target.name}), got {ids.dtype} of shape {ids.shape}")
    bad = ids[(ids < 0) | (ids >= size)]
    if bad.size:
        raise ConfigError(f"{wanted}{target.name}), got {bad[0]}")
    return ids.tolist()


def is_int(value: Any) -> bool:
    """True for an integer of Python's or numpy's; a boolean is none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_single(prompt: Any) -> bool:
    """True for one prompt (a text, or ids, also none), False for a list of prompts."""
    if isinstance(prompt, str):
        return True
    if isinstance(prompt, np.ndarray | jax.Array):
        return prompt.ndim == 1
    if not isinstance(prompt, Sequence):
        raise ConfigError(f"prompt: expected a text, token ids or a list of these, got {prompt!r}")
    return not any(isinstance(x, str | Sequence | np.ndarray | jax.Array) for x in prompt)


def _encode(target: Target, prompt: Prompt) -> list[int]:
    if isinstance(prompt, str):
        if target.tokenizer is None:
            raise ConfigError(
                f"prompt: {target.name} has no tokenizer; pass token ids instead of text"
            )
        prompt = target.tokenizer.encode_chat(prompt)
    return check_ids(target, prompt)


def _seeds(seed: int | Sequence[int], n_batch: int) -> list[int]:
    """Prompt b draws from seed + b, or from its own entry of a list."""
    seeds = [seed + b for b in range(n_batch)] if is_int(seed) else seed
    if not isinstance(seeds, Sequence) or not all(map(is_int, seeds)) or len(seeds) != n_batch:
        raise ConfigError(
            f"seed: expected one integer or {n_batch} of them (one per prompt), got {seed!r}"
        )
    if not all(-(2**63) <= s < 2**63 for s in seeds):
        raise ConfigError(f"seed: expected 64-bit integers, got {seed!r}")
    return list(seeds)


def prompt_keys(seeds: Sequence[int]) -> jax.Array:
    """Returns the typed keys [B] of sequences with these 64-bit seeds."""

    def key(seed: int) -> jax.Array:
        high, low = divmod(int(seed) % 2**64, 2**32)
        key = jax.random.key(np.uint32(low), impl="threefry2x32")  # it takes 32 bits
        return jax.random.fold_in(key, np.uint32(high)) if high else key

    return jnp.stack([key(seed) for seed in seeds])


def check_batch(target: Target, draft: Draft, batch: dict[str, jax.Array]) -> None:
    """Raises ConfigError where a training batch is not what `pdm_loss` says."""
    names = ("input_ids", "attention_mask", "labels")
    given = batch if isinstance(batch, Mapping) else {}
    shapes = [getattr(given.get(name), "shape", "none") for name in names]
    if len(set(shapes)) > 1 or len(shapes[0]) != 2:
        got = ", ".join(f"{name} {shape}" for name, shape in zip(names, shapes, strict=True))
        raise ConfigError(
            f"batch: expected arrays {', '.join(names)} of one shape [B, T], got {got}"
        )
    if shapes[0][1] > target.config.max_context:
        raise ConfigError(
            f"batch: expected at most {target.config.max_context} tokens in a row (the context of "
            f"{target.name}), got {shapes[0][1]}; cut them"
        )
    if not is_traced(batch):
        check_ids(target, np.ravel(batch["input_ids"]), "input_ids")
        labels = np.ravel(batch["labels"])
        check_ids(target, np.where(labels == IGNORED, 0, labels), "labels")
        _check_texts(target, draft, np.asarray(batch["attention_mask"]))


def _check_texts(target: Target, draft: Draft, segments: np.ndarray) -> None:
    """Raises ConfigError where rows [B, T] hold texts that target or draft cannot keep apart."""
    if np.max(segments, initial=0) > 1:
        readers = {
            f"the delta-nets of {target.name}": target.config.delta is not None,
            "a draft of version 10": isinstance(draft.config, V10DraftConfig),
        }
        for reader, is_there in readers.items():
            require(
                not is_there,
                f"batch: attention_mask numbers several texts in a row, and {reader} cannot keep "
                "them apart; give each text a row",
            )
    before_tokens = (segments[:, 1:] > 0) & (segments[:, :-1] <= 0)
    require(
        target.config.delta is None or not before_tokens.any(),
        "batch: attention_mask has padding before tokens, which the delta-nets of "
        f"{target.name} would read; pad rows on the right",
    )
