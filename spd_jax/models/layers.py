"""Flax modules of one decoder layer: thin holders of parameters around `ops`.

A layer is a mixer (full attention or a gated delta-net) and an MLP (dense or experts). Caches are
passed in read-only; a layer returns the rows it made, and whoever owns the cache writes them.
Matrices are [out, in]; what multiplies the same input is one matrix.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from spd_jax.config import LayerKind, TargetConfig
from spd_jax.models.cache import Rows, last_state
from spd_jax.ops.attention import attend
from spd_jax.ops.conv1d import causal_conv
from spd_jax.ops.delta_rule import delta_rule_chunked, delta_rule_step, l2_normalise
from spd_jax.ops.experts import experts_mlp, route
from spd_jax.ops.linear import linear
from spd_jax.ops.norms import rms_norm
from spd_jax.ops.rope import Rotation, apply_rope

INIT = nn.initializers.normal(0.02)
Mask = jax.Array | Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class Weight(nn.Module):
    """Holds one array, for callers that use it in other ways than `Linear` does."""

    shape: tuple[int, ...]

    @nn.compact
    def __call__(self, dtype: jnp.dtype) -> jax.Array:
        return self.param("weight", INIT, self.shape, dtype)


class Linear(nn.Module):
    """y = x W^T, W [out, in], no bias."""

    n_out: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linear(x, self.param("weight", INIT, (self.n_out, x.shape[-1]), x.dtype))


class RMSNorm(nn.Module):
    """Scales by w, or by 1 + w, after normalising the last axis."""

    eps: float
    offset: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.zeros if self.offset else nn.initializers.ones
        weight = self.param("weight", init, (x.shape[-1],), x.dtype)
        return rms_norm(x, norm_scale(weight, self.offset), self.eps)


def norm_scale(weight: jax.Array, offset: bool) -> jax.Array:
    """Returns what a norm of this weight multiplies by, in float32."""
    return weight.astype(jnp.float32) + (1 if offset else 0)


class Attention(nn.Module):
    """Grouped-query attention with RoPE and, where the config says so, q/k norms and a gate."""

    config: TargetConfig

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        turn: Rotation,
        mask: Mask,
        cache: Rows | None,
        cache_len: jax.Array | None,
        n_query: int,
    ) -> tuple[jax.Array, Rows]:
        c = self.config
        n_batch, n_rows, _ = x.shape
        per_head = c.head_dim * (2 if c.attn_gate else 1)  # a query, and behind it its gate
        n_q, n_kv = c.n_heads * per_head, c.n_kv_heads * c.head_dim
        weight = Weight((n_q + 2 * n_kv, x.shape[-1]), name="qkv")(x.dtype)
        if n_query == n_rows:
            q, k, v = jnp.split(linear(x, weight), [n_q, n_q + n_kv], axis=-1)
        else:
            q = linear(x[:, n_rows - n_query :], weight[:n_q])
            k, v = jnp.split(linear(x, weight[n_q:]), 2, axis=-1)
        q, gate = jnp.split(q.reshape(n_batch, n_query, c.n_heads, per_head), [c.head_dim], axis=-1)
        k = k.reshape(n_batch, n_rows, c.n_kv_heads, c.head_dim)
        v = v.reshape(n_batch, n_rows, c.n_kv_heads, c.head_dim)
        if c.qk_norm:
            q = RMSNorm(c.norm_eps, c.norm_offset, name="q_norm")(q)
            k = RMSNorm(c.norm_eps, c.norm_offset, name="k_norm")(k)
        q, k = apply_rope(q, turn.last(n_query)), apply_rope(k, turn)
        rows = {"k": k.transpose(0, 2, 3, 1), "v": v.transpose(0, 2, 1, 3)}
        if callable(mask):
            out = mask(q, k, v)
        else:
            cached = (cache["k"], cache["v"], cache_len) if cache is not None else ()
            out = attend(q, rows["k"], rows["v"], mask, *cached)
        if c.attn_gate:
            gate = nn.sigmoid(gate.astype(jnp.float32)).reshape(out.shape)
            out = (out * gate).astype(x.dtype)
        return Linear(x.shape[-1], name="o")(out), rows


class DeltaNet(nn.Module):
    """A gated delta-net (arXiv 2412.06464): causal convolution, delta rule, gated norm."""

    config: TargetConfig

    @nn.compact
    def __call__(
        self, x: jax.Array, cache: Rows | None, cache_len: jax.Array | None, n_valid: jax.Array
    ) -> tuple[jax.Array, Rows]:
        d = self.config.delta
        n_batch, n_rows, width = x.shape
        parts = (d.n_channels, d.n_values, d.n_value_heads, d.n_value_heads)
        mixed = linear(x, Weight((sum(parts), width), name="in_proj")(x.dtype))
        qkv, z, b, a = jnp.split(mixed, [sum(parts[:i]) for i in (1, 2, 3)], axis=-1)
        if cache is None:
            conv = jnp.zeros((n_batch, d.n_channels, d.conv_width - 1), x.dtype)
            state = jnp.zeros((n_batch, d.n_value_heads, d.key_dim, d.value_dim), jnp.float32)
        else:
            conv, state = last_state(cache, cache_len)
        kernel = Weight((d.n_channels, 1, d.conv_width), name="conv")(x.dtype)
        qkv, conv = causal_conv(qkv, kernel[:, 0], conv, n_valid)
        q, k, v = jnp.split(nn.silu(qkv), [d.n_keys, 2 * d.n_keys], axis=-1)
        per_key = d.n_value_heads // d.n_key_heads
        q, k = (
            jnp.repeat(l2_normalise(y.reshape(n_batch, n_rows, d.n_key_heads, -1)), per_key, axis=2)
            for y in (q, k)
        )
        q = q * d.key_dim**-0.5
        v = v.reshape(n_batch, n_rows, d.n_value_heads, d.value_dim).astype(jnp.float32)
        rate = self.param("A_log", nn.initializers.zeros, (d.n_value_heads,), x.dtype)
        bias = self.param("dt_bias", nn.initializers.ones, (d.n_value_heads,), x.dtype)
        rate, bias, a, b = (y.astype(jnp.float32) for y in (rate, bias, a, b))
        log_decay, beta = -jnp.exp(rate) * nn.softplus(a + bias), nn.sigmoid(b)
        if n_rows == 1:
            step = (y[:, 0] for y in (q, k, v, log_decay, beta))
            out, new = delta_rule_step(*step, state)
            out, state = out[:, None], jnp.where((n_valid > 0)[:, None, None, None], new, state)
        else:
            out, state = delta_rule_chunked(q, k, v, log_decay, beta, state, n_valid)
        out = RMSNorm(self.config.norm_eps, name="norm")(out.astype(x.dtype))
        gate = nn.silu(z.astype(jnp.float32)).reshape(out.shape)
        out = (out * gate).astype(x.dtype).reshape(n_batch, n_rows, d.n_values)
        return Linear(width, name="out")(out), {"conv": conv, "state": state}


class SwiGLU(nn.Module):
    """down(silu(gate x) * up x), with gate and up as one matrix."""

    d_ff: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(Linear(2 * self.d_ff, name="gate_up")(x), 2, axis=-1)
        return Linear(x.shape[-1], name="down")(nn.silu(gate) * up)


class Experts(nn.Module):
    """A weighted sum of the SwiGLUs that each token is routed to and, gated, of a shared one."""

    config: TargetConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c, width = self.config.experts, x.shape[-1]
        tokens = x.reshape(-1, width)
        router = Weight((c.n_experts, width), name="router")(x.dtype)
        gate_up = Weight((c.n_experts, 2 * c.d_ff, width), name="gate_up")(x.dtype)
        down = Weight((c.n_experts, width, c.d_ff), name="down")(x.dtype)
        chosen = route(linear(tokens, router, jnp.float32), c.n_active, c.normalise)
        out = experts_mlp(tokens, gate_up, down, *chosen)
        if c.shared_d_ff is not None:
            shared = SwiGLU(c.shared_d_ff, name="shared")(tokens)
            gate = Linear(1, name="shared_gate")(tokens).astype(jnp.float32)
            out = out + (nn.sigmoid(gate) * shared).astype(x.dtype)
        return out.reshape(x.shape)


class DecoderLayer(nn.Module):
    """One pre-norm decoder layer.

    Args of `__call__`:
      x: [B, T, D] rows; turn: of their positions, as `target.rotation` gives it.
      mask: bool [B or 1, Q, T] among the new rows, or a function that attends without one:
        (q [B, Q, H, E], k and v [B, T, G, E]) -> [B, Q, H * E].
      cache, cache_len: read-only, what cache_len [B] earlier rows left; every query sees them.
      n_valid: int [B], how many of the rows exist, where padding follows; None: all. Attention
        needs no such thing: rows that exist never look at padding behind them.
      n_query: Q, how many of the last rows are queries; None: all. The others are only seen.

    Returns:
      y [B, Q, D] and what the rows leave: keys and values, or the state after them.
    """

    config: TargetConfig
    kind: LayerKind

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        turn: Rotation,
        mask: Mask,
        cache: Rows | None = None,
        cache_len: jax.Array | None = None,
        n_valid: jax.Array | None = None,
        n_query: int | None = None,
    ) -> tuple[jax.Array, Rows]:
        c = self.config
        n_query = n_query or x.shape[1]
        normed = RMSNorm(c.norm_eps, c.norm_offset, name="mixer_norm")(x)
        if self.kind.mixer == "attention":
            with jax.named_scope("attention"):
                attention = Attention(c, name="attn")
                out, rows = attention(normed, turn, mask, cache, cache_len, n_query)
        else:
            with jax.named_scope("delta"):
                n_valid = jnp.full(x.shape[0], x.shape[1]) if n_valid is None else n_valid
                out, rows = DeltaNet(c, name="delta")(normed, cache, cache_len, n_valid)
        x = x[:, x.shape[1] - n_query :] + out
        with jax.named_scope("mlp"):
            normed = RMSNorm(c.norm_eps, c.norm_offset, name="mlp_norm")(x)
            dense = self.kind.mlp == "dense"
            mlp = SwiGLU(c.d_ff, name="mlp") if dense else Experts(c, name="experts")
            return x + mlp(normed), rows
