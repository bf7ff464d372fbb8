"""What the decode loop carries. Positions are absolute; rolling back is integer arithmetic."""

from __future__ import annotations

import dataclasses
import functools

import jax

from spd_jax.ops.sampling import Knobs, Method
from spd_jax.pipeline.slots import Slots
from spd_jax.pipeline.synthetic import Script

_FIELDS = [
    "caches", "proposals", "hidden", "ring", "tokens", "accepted", "newest", "fill",
    "n_committed", "n_cycles", "done",
]  # fmt: skip


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["log_q", "overlap"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Proposals:
    """What drafts were drawn from, on one shard of the draft head: for rejection sampling."""

    log_q: jax.Array  # float32 [B, N, W'], of the draft at position x at x mod N; draws
    overlap: jax.Array  # float32 [B], this shard's sum of min(p, q) of all verified; draws


@functools.partial(jax.tree_util.register_dataclass, data_fields=_FIELDS, meta_fields=[])
@dataclasses.dataclass(frozen=True)
class PipelineState:
    """State between two cycles; donated. `caches` and `proposals` differ by rank, nothing else."""

    caches: list[Slots]  # [local rank][mixer][slot], leaves [B, ...] of `models.cache`; cycle
    proposals: Proposals | None  # of this rank's shard; None: not rejection sampling; the cycle
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
    data_fields=["prompt_lens", "keys", "stop_ids", "limit", "knobs", "script"],
    meta_fields=["method"],
)
@dataclasses.dataclass(frozen=True)
class Inputs:
    """What stays the same while a batch is decoded."""

    prompt_lens: jax.Array  # int32 [B], 0 in rows that pad the batch: these come last
    keys: jax.Array  # typed PRNG keys [B], of each sequence's draws
    stop_ids: jax.Array  # int32 [n], -1 pads
    limit: jax.Array  # int32 scalar, max_new_tokens
    knobs: Knobs  # temperature, top_k, top_p
    method: Method  # static: how tokens are drawn and verified
    script: Script | None = None  # replaces what is drafted, to measure speed; None: nothing does
