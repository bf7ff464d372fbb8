"""What the decode loop carries. Positions are absolute; rolling back is integer arithmetic."""

from __future__ import annotations

import dataclasses
import functools

import jax

from spd_jax.pipeline.slots import Slots

_FIELDS = [
    "caches", "hidden", "ring", "tokens", "accepted", "newest", "fill", "n_committed",
    "n_cycles", "done",
]  # fmt: skip


@functools.partial(jax.tree_util.register_dataclass, data_fields=_FIELDS, meta_fields=[])
@dataclasses.dataclass(frozen=True)
class PipelineState:
    """State between two cycles; donated. Only `caches` differ by rank, the rest is replicated."""

    caches: list[Slots]  # [local rank][mixer][slot], leaves [B, ...] of `models.cache`; cycle
    hidden: jax.Array  # [N, B, D], input of each stage in the next cycle; written by the cycle
    ring: jax.Array  # [B, N+1, M, D], anchors of position x at x mod (N+1); cycle, as they pass
    tokens: jax.Array  # int32 [B, slots], ids by position - prompt length; drafts in flight too
    accepted: jax.Array  # bool [B, slots], the id is the first or an accepted draft; control
    newest: jax.Array  # int32 [B], p, position of the newest token in flight; control
    fill: jax.Array  # int32 [B], f, tokens in flight, 1..N; control
    n_committed: jax.Array  # int32 [B], verified ids in `tokens`; control
    n_cycles: jax.Array  # int32 [B], cycles run while not done; control
    done: jax.Array  # bool [B], stopped or at the limit: commits and counts nothing more; control


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["prompt_lens", "stop_ids", "limit"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Inputs:
    """What stays the same while a batch is decoded."""

    prompt_lens: jax.Array  # int32 [B]
    stop_ids: jax.Array  # int32 [n], -1 pads
    limit: jax.Array  # int32 scalar, max_new_tokens
