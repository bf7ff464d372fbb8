"""Flax modules of one decoder layer: thin holders of parameters around `ops`.

Caches are passed in read-only; a layer returns the key and value rows it made, and whoever owns
the cache writes them. Matrices are [out, in]; q, k and v are one matrix, gate and up another.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from spd_jax.config import TargetConfig
from spd_jax.ops.attention import attend
from spd_jax.ops.linear import linear
from spd_jax.ops.norms import rms_norm
from spd_jax.ops.rope import apply_rope, inverse_frequencies

Rows = dict[str, jax.Array]  # "k": [B, G, E, T], "v": [B, G, T, E]; a cache has S for T


class Weight(nn.Module):
    """Holds one [out, in] matrix, for callers that use parts of it."""

    n_out: int
    n_in: int

    @nn.compact
    def __call__(self, dtype: jnp.dtype) -> jax.Array:
        return self.param("weight", nn.initializers.normal(0.02), (self.n_out, self.n_in), dtype)


class Linear(nn.Module):
    """y = x W^T, W [out, in], no bias."""

    n_out: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.normal(0.02)
        return linear(x, self.param("weight", init, (self.n_out, x.shape[-1]), x.dtype))


class RMSNorm(nn.Module):
    """Scales by w after normalising the last axis."""

    eps: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        weight = self.param("weight", nn.initializers.ones, (x.shape[-1],), x.dtype)
        return rms_norm(x, weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with RoPE and, where the config says so, per-head q/k norms."""

    config: TargetConfig

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        mask: jax.Array,
        cache: Rows | None,
        cache_len: jax.Array | None,
        n_query: int,
    ) -> tuple[jax.Array, Rows]:
        c = self.config
        n_batch, n_rows, _ = x.shape
        n_q, n_kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
        weight = Weight(n_q + 2 * n_kv, x.shape[-1], name="qkv")(x.dtype)
        if n_query == n_rows:
            q, k, v = jnp.split(linear(x, weight), [n_q, n_q + n_kv], axis=-1)
        else:
            q = linear(x[:, n_rows - n_query :], weight[:n_q])
            k, v = jnp.split(linear(x, weight[n_q:]), 2, axis=-1)
        q = q.reshape(n_batch, n_query, c.n_heads, c.head_dim)
        k = k.reshape(n_batch, n_rows, c.n_kv_heads, c.head_dim)
        v = v.reshape(n_batch, n_rows, c.n_kv_heads, c.head_dim)
        if c.qk_norm:
            q = RMSNorm(c.norm_eps, name="q_norm")(q)
            k = RMSNorm(c.norm_eps, name="k_norm")(k)
        inv_freq = inverse_frequencies(c.head_dim, c.rope_theta, c.rope_scaling)
        q = apply_rope(q, positions[:, n_rows - n_query :], inv_freq)
        k = apply_rope(k, positions, inv_freq)
        rows = {"k": k.transpose(0, 2, 3, 1), "v": v.transpose(0, 2, 1, 3)}
        cached = (cache["k"], cache["v"], cache_len) if cache is not None else ()
        out = attend(q, rows["k"], rows["v"], mask, *cached)
        return Linear(x.shape[-1], name="o")(out), rows


class SwiGLU(nn.Module):
    """down(silu(gate x) * up x), with gate and up as one matrix."""

    d_ff: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(Linear(2 * self.d_ff, name="gate_up")(x), 2, axis=-1)
        return Linear(x.shape[-1], name="down")(nn.silu(gate) * up)


class DecoderLayer(nn.Module):
    """One pre-norm decoder layer.

    Args of `__call__`:
      x: [B, T, D] rows; positions: int [B, T]; mask: bool [B or 1, Q, T] among the new rows.
      cache, cache_len: read-only prefix of cache_len [B] positions that every query sees.
      n_query: Q, how many of the last rows are queries; None: all. The others are only seen.

    Returns:
      y [B, Q, D] and the new key and value rows.
    """

    config: TargetConfig

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        mask: jax.Array,
        cache: Rows | None = None,
        cache_len: jax.Array | None = None,
        n_query: int | None = None,
    ) -> tuple[jax.Array, Rows]:
        c = self.config
        n_query = n_query or x.shape[1]
        with jax.named_scope("attention"):
            normed = RMSNorm(c.norm_eps, name="attn_norm")(x)
            attention = Attention(c, name="attn")
            out, rows = attention(normed, positions, mask, cache, cache_len, n_query)
            x = x[:, x.shape[1] - n_query :] + out
        with jax.named_scope("mlp"):
            normed = RMSNorm(c.norm_eps, name="mlp_norm")(x)
            return x + SwiGLU(c.d_ff, name="mlp")(normed), rows
