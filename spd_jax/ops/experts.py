"""The mixture-of-experts MLP: y_t = sum_k w_tk down_e(silu(gate_e x_t) * up_e x_t), e = id_tk.

Rows meet their experts in blocks, one expert a block, one block a step of a scan. A few tokens
make blocks of one row; many are sorted by expert, so that a block reads its weights for many rows.
X experts, K active per token, F expert width, D model width; matrices are [out, in].
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from spd_jax.ops.linear import linear

# Pairs per expert from which sorting pays: at 2 both ways take 22 ms on a busy CPU (X 32, D 1024,
# F 512, K 8, float32), at 1 `by_pair` takes 11 and `by_block` 19, at 3 they take 46 and 31.
FEW_PER_EXPERT = 2
MIN_ROWS, MAX_ROWS = 8, 64  # of a sorted block; at T 1024, 128 rows take 30 ms and 64 take 20


def route(logits: jax.Array, n_active: int, normalise: bool) -> tuple[jax.Array, jax.Array]:
    """Chooses each token's experts: the most probable, of equals those of the lowest id.

    Args:
      logits: [..., X] of the router.
      n_active: K.
      normalise: whether a token's weights are divided by their sum (HF's `norm_topk_prob`).

    Returns:
      float32 [..., K] weights and int32 [..., K] ids, the most probable first.
    """
    probs = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    weights, ids = lax.top_k(probs, n_active)
    if normalise:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, ids


def experts_mlp(
    x: jax.Array, gate_up: jax.Array, down: jax.Array, weights: jax.Array, ids: jax.Array
) -> jax.Array:
    """Sends each row through its experts, in the way that suits the number of pairs.

    Args:
      x: [T, D]; rows are independent, so padding may hold any finite value.
      gate_up: [X, 2F, D], the rows of gate before those of up.
      down: [X, D, F].
      weights: float32 [T, K] and ids: int32 [T, K], as `route` makes them.

    Returns:
      [T, D] in x's dtype, accumulated in float32. An expert that no row names is never read.
    """
    few = ids.size <= FEW_PER_EXPERT * gate_up.shape[0]
    return (by_pair if few else by_block)(x, gate_up, down, weights, ids)


def by_pair(
    x: jax.Array, gate_up: jax.Array, down: jax.Array, weights: jax.Array, ids: jax.Array
) -> jax.Array:
    """`experts_mlp` for a few tokens: reads one expert for each pair of a token and an expert."""
    rows = jnp.repeat(x, ids.shape[1], axis=0)[:, None]  # [T * K, 1, D]
    return _mix(_run(rows, ids.reshape(-1), gate_up, down), weights, x.dtype)


def by_block(
    x: jax.Array, gate_up: jax.Array, down: jax.Array, weights: jax.Array, ids: jax.Array
) -> jax.Array:
    """`experts_mlp` for many tokens: reads an expert for each block of the rows that name it.

    `lax.ragged_dot` is no substitute: on a CPU it multiplies every row by every expert, 96 ms
    where this takes 4 (X 64, K 8, D 256, F 128, T 64).
    """
    n_rows = _rows_of_a_block(ids.size, gate_up.shape[0])
    slots, experts = _arrange(ids.reshape(-1), gate_up.shape[0], n_rows)
    n_slots = experts.size * n_rows
    # Indices out of range are filled with zeros; all differ, as `unique_indices` promises.
    pairs = jnp.arange(ids.size, ids.size + n_slots).at[slots].set(jnp.arange(ids.size))
    rows = jnp.repeat(x, ids.shape[1], axis=0)
    rows = rows.at[pairs].get(mode="fill", fill_value=0, unique_indices=True)
    out = _run(rows.reshape(experts.size, n_rows, -1), experts, gate_up, down)
    out = out.reshape(n_slots, -1).at[slots].get(mode="promise_in_bounds", unique_indices=True)
    return _mix(out, weights, x.dtype)


def _rows_of_a_block(n_pairs: int, n_experts: int) -> int:
    """A power of two of about half the mean pairs of an expert, so that padding stays small."""
    half = n_pairs // (2 * n_experts)
    return min(max(MIN_ROWS, 1 << max(half.bit_length() - 1, 0)), MAX_ROWS)


def _arrange(ids: jax.Array, n_experts: int, n_rows: int) -> tuple[jax.Array, jax.Array]:
    """Gives each pair a slot, so that no block of n_rows slots holds pairs of two experts.

    Returns slots int [n_pairs] and the expert of each block, int [n_blocks]. There are as many
    blocks as any ids may need; those left over repeat the last expert in use.
    """
    n_used = min(n_experts, ids.size)
    n_blocks = (ids.size + n_used * (n_rows - 1)) // n_rows
    counts = jnp.bincount(ids, length=n_experts)
    blocks = -(-counts // n_rows)
    ends = jnp.cumsum(blocks)
    shift = (ends - blocks) * n_rows - (jnp.cumsum(counts) - counts)
    order = jnp.argsort(ids, stable=True)
    slots = jnp.zeros_like(ids).at[order].set(jnp.arange(ids.size) + shift[ids[order]])
    experts = jnp.sum(ends <= jnp.arange(n_blocks)[:, None], axis=1)
    return slots, jnp.minimum(experts, jnp.max(ids))


def _run(rows: jax.Array, experts: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """Sends rows [n_blocks, n_rows, D] through one expert a block; float32 of the same shape."""

    # Recomputed in the backward pass, which would else keep the weights of every step.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(_: None, block: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        x, expert = block
        gate, up = jnp.split(linear(x, _pick(gate_up, expert), jnp.float32), 2, axis=-1)
        hidden = (jax.nn.silu(gate) * up).astype(x.dtype)
        return None, linear(hidden, _pick(down, expert), jnp.float32)

    return lax.scan(step, None, (rows, experts))[1]


def _mix(out: jax.Array, weights: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Weighs the results of all pairs, T * K rows of D, into [T, D]."""
    return jnp.einsum("tk,tkd->td", weights, out.reshape(*weights.shape, -1)).astype(dtype)


@jax.custom_jvp
def _pick(stack: jax.Array, expert: jax.Array) -> jax.Array:
    """Returns stack[expert]."""
    # XLA's CPU backend (jaxlib 0.10.2) slices bfloat16 as float32, and converts the whole stack
    # ahead of the loop. The barrier keeps that in the step, where it fuses with the slice.
    stack, expert = lax.optimization_barrier((stack, expert))
    return lax.dynamic_index_in_dim(stack, expert, keepdims=False)


@_pick.defjvp
def _pick_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    # Without the barrier, whose transpose would add a whole stack of zeros in each step.
    return _pick(*primals), lax.dynamic_index_in_dim(tangents[0], primals[1], keepdims=False)
