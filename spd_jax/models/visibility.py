"""In which row a query of the Pipeline Draft Module sees an earlier token (paper, appendix A.3).

Rows are blocks of one row type each, the deepest first. `seen_types` is the rule; `structural_mask`
spells it out cell by cell, and `seen_blocks` says it to `ops.depth_attention`, which needs no mask.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from spd_jax.checks import ConfigError
from spd_jax.config import PipelineConfig


def all_blocks(anchors: tuple[int, ...]) -> tuple[int, ...]:
    """Every row type, deepest first: the order of training rows."""
    return tuple(reversed(range(len(anchors))))


def seen_types(pipeline: PipelineConfig, anchors: tuple[int, ...], mode: str) -> np.ndarray:
    """Returns int [N, M, N + 1]: as what row type a query sees an earlier token.

    Entry [fill - 1, i, distance] is for a query of type i at its smallest depth d; farther tokens
    are seen as at distance N. A token is seen as the type f(min(N, d + distance)). With `fill` < N
    tokens in flight, older tokens are complete: mode "exact" takes the deepest type where d +
    distance >= fill, as decoding does; mode "reference" where distance >= fill, as published.
    """
    check_mask_mode(mode)
    n, deepest = pipeline.n_stages, len(anchors) - 1
    fill = np.arange(1, n + 1)[:, None, None]
    distance = np.arange(n + 1)
    age = np.asarray(pipeline.min_depths(anchors))[:, None] + distance  # depth of the key token
    complete = ((age if mode == "exact" else distance) >= fill) & (fill < n)
    row_types = np.asarray(pipeline.row_types(anchors))
    return np.where(complete, deepest, row_types[np.minimum(age, n)])


def check_mask_mode(mode: str) -> None:
    """Raises ConfigError where a mask_mode is unknown."""
    if mode not in ("exact", "reference"):
        raise ConfigError(f"mask_mode must be 'exact' or 'reference', got {mode!r}")


def structural_mask(
    pipeline: PipelineConfig,
    anchors: tuple[int, ...],
    n_tokens: int,
    fill: jax.Array | int,
    mode: str = "exact",
    blocks: tuple[int, ...] | None = None,
) -> jax.Array:
    """Returns bool [K*T, K*T]: True where a query row sees a key row, by `seen_types`.

    `blocks` are the K row types to keep, in order; None: all M, deepest first.
    """
    kept = np.asarray(all_blocks(anchors) if blocks is None else blocks)
    types = jnp.asarray(seen_types(pipeline, anchors, mode)[:, kept])[fill - 1]  # [K, N + 1]
    time = jnp.arange(n_tokens)
    distance = time[:, None] - time[None, :]  # [T, T]
    needed = types[:, jnp.clip(distance, 0, pipeline.n_stages)]  # [K, T, T]
    seen = needed[:, :, None, :] == jnp.asarray(kept)[None, None, :, None]  # [K, T, K, T]
    seen &= (distance >= 0)[None, :, None, :]
    return seen.reshape(len(kept) * n_tokens, len(kept) * n_tokens)


def live_blocks(
    pipeline: PipelineConfig, anchors: tuple[int, ...], fill: int, mode: str
) -> tuple[int, ...]:
    """The row types that a scored row (type 0) sees at this fill, itself or through others.

    Few tokens in flight leave the types between unseen: rows of those need not be computed.
    """
    types = seen_types(pipeline, anchors, mode)[fill - 1]
    live, unseen = set(), {0}
    while unseen:
        query = unseen.pop()
        live.add(query)
        unseen |= set(types[query].tolist()) - live
    return tuple(i for i in all_blocks(anchors) if i in live)


def seen_blocks(
    pipeline: PipelineConfig,
    anchors: tuple[int, ...],
    fill: jax.Array | int,
    mode: str,
    blocks: tuple[int, ...],
) -> tuple[np.ndarray | jax.Array, np.ndarray]:
    """Returns what `seen_types` says as `attend_by_depth` takes it: seen [K, n], far_from [K].

    `blocks` are the K row types that are kept, the deepest first, and all that they see.
    """
    index = np.zeros(len(anchors), int)
    index[list(blocks)] = np.arange(len(blocks))
    seen = index[seen_types(pipeline, anchors, mode)[:, list(blocks)]]  # [N, K, N + 1]
    n = pipeline.n_stages
    if isinstance(fill, jax.core.Tracer):
        return jnp.asarray(seen[..., :n])[fill - 1], np.full(len(blocks), n)
    seen = seen[fill - 1]
    is_near = seen != 0
    far_from = np.where(is_near.any(axis=1), n + 1 - np.argmax(is_near[:, ::-1], axis=1), 0)
    return seen, far_from
