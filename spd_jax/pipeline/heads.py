"""The sharded heads: one collective finds, for each row, the best id and its embedding row.

Rows of the embedding, the target's head and the draft head live on shard (id mod R), so the
shard that wins also holds the winner's embedding. Values are compared first, then lowest id.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spd_jax.ops.linear import linear
from spd_jax.ops.norms import rms_norm
from spd_jax.pipeline.comm import Comm


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["final_scale", "embed", "target", "target_ids", "draft", "draft_ids"],
    meta_fields=["norm_eps"],
)
@dataclasses.dataclass(frozen=True)
class Heads:
    """One shard's rows; the whole vocabulary where there is one shard."""

    final_scale: jax.Array  # float32 [D], what the final norm multiplies by
    embed: jax.Array  # [ceil(V / R), D], row j is id j * R + shard
    target: jax.Array | None  # same layout; None: tied to `embed`
    target_ids: jax.Array  # int32 [ceil(V / R)], -1 where there is no such id
    draft: jax.Array | None  # [W', D] rows of the draft ids on this shard; None: as `target`
    draft_ids: jax.Array | None  # int32 [W'], ascending, -1 pads; None: as `target_ids`
    norm_eps: float

    def target_rows(self) -> tuple[jax.Array, jax.Array]:
        """The target's head and its ids."""
        return (self.embed if self.target is None else self.target), self.target_ids

    def draft_rows(self) -> tuple[jax.Array, jax.Array]:
        """The draft head and its ids."""
        return self.target_rows() if self.draft is None else (self.draft, self.draft_ids)


def shard_ids(ids: np.ndarray, n_shards: int) -> np.ndarray:
    """Returns int32 [R, n] of the ascending ids on each shard (id mod R), padded with -1."""
    parts = [ids[ids % n_shards == r] for r in range(n_shards)]
    table = np.full((n_shards, max(map(len, parts))), -1, np.int32)
    for row, part in zip(table, parts, strict=True):
        row[: len(part)] = part
    return table


def logits(heads: Heads, hidden: jax.Array, rows: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns the logits float32 [B, n] of hidden states [B, D]; -inf where there is no id."""
    normed = rms_norm(hidden, heads.final_scale, heads.norm_eps)
    return jnp.where(ids >= 0, linear(normed, rows, jnp.float32), -jnp.inf)


def pick(heads: Heads, comm: Comm, scores: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns int32 [B, 2 + D] (score, id, embedding row; floats bitcast) of this shard's best."""
    best = jnp.argmax(scores, axis=-1)  # the lowest index, so the lowest id
    value = jnp.take_along_axis(scores, best[:, None], axis=1)
    best_id = ids[best]
    row = jnp.take(heads.embed, jnp.maximum(best_id, 0) // comm.n_shards, axis=0)
    floats = jnp.concatenate([value, row.astype(jnp.float32)], axis=1)
    packed = lax.bitcast_convert_type(floats, jnp.int32)
    return jnp.concatenate([packed[:, :1], best_id[:, None], packed[:, 1:]], axis=1)


def choose(comm: Comm, packed: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Finds the winners over all shards of packed int32 [n, B, 2 + D]: one collective.

    Returns:
      ids int32 [n, B] and their embedding rows [n, B, D].
    """
    gathered = comm.gather_shards(packed)  # [R, n, B, 2 + D]
    values = lax.bitcast_convert_type(gathered[..., 0], jnp.float32)
    ids = gathered[..., 1]
    is_best = (values == jnp.max(values, axis=0)) & (ids >= 0)
    candidates = jnp.where(is_best, ids, jnp.iinfo(jnp.int32).max)
    winner = jnp.argmin(candidates, axis=0)[None]  # [1, n, B]
    rows = jnp.take_along_axis(gathered[..., 2:], winner[..., None], axis=0)[0]
    rows = lax.bitcast_convert_type(rows, jnp.float32).astype(dtype)
    return jnp.take_along_axis(ids, winner, axis=0)[0], rows


def embed_rows(heads: Heads, comm: Comm, input_ids: jax.Array) -> jax.Array:
    """Returns the embedding rows [..., D] of ids [...]: one collective."""
    here = input_ids % comm.n_shards == comm.shard()
    rows = jnp.take(heads.embed, input_ids // comm.n_shards, axis=0)
    return comm.sum_shards(jnp.where(here[..., None], rows, 0))
