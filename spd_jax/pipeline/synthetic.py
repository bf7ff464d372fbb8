"""A drafter of set quality, so that speed can be measured apart from how well a head drafts.

The draft module and both heads run as always; what the draft names is then replaced.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from spd_jax.ops import sampling
from spd_jax.pipeline.comm import Comm
from spd_jax.pipeline.heads import Heads


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "n_tokens", "acceptance"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Script:
    """The texts that a batch will turn out to be, and how often the draft is to be right."""

    tokens: jax.Array  # int32 [B, n], new ids as `generate` gives them; anything after these
    n_tokens: jax.Array  # int32 [B], how many are known; after these the draft is on its own
    acceptance: jax.Array  # float32 scalar, probability that the draft of a position is right


def replace_draft(
    comm: Comm,
    heads: Heads,
    script: Script,
    packed: jax.Array,
    keys: jax.Array,
    index: jax.Array,
    positions: jax.Array,
) -> jax.Array:
    """Replaces a draft by the known id, with the set probability, else by one that is wrong.

    Args:
      packed: int32 [B, 2 + D], the shard's best id as `heads.pick` packs it.
      keys: typed [B]; index: int32 [B], which new ids are drafted; positions: [B], of these.
    """
    known = jnp.take_along_axis(script.tokens, index[:, None], axis=1, mode="clip")[:, 0]
    right = sampling.uniform(keys, sampling.SYNTHETIC, positions) < script.acceptance
    wanted = jnp.where(right, known, jnp.where(known > 0, known - 1, 1))
    row = jnp.take(heads.embed, wanted // comm.n_shards, axis=0).astype(jnp.float32)
    best = jnp.full((len(wanted), 1), jnp.inf)
    floats = lax.bitcast_convert_type(jnp.concatenate([best, row], axis=1), jnp.int32)
    chosen = jnp.concatenate([floats[:, :1], wanted[:, None], floats[:, 1:]], axis=1)
    here = (wanted % comm.n_shards == comm.shard()) & (index < script.n_tokens)
    return jnp.where(here[:, None], chosen, packed)
