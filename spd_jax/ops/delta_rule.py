"""The gated delta rule (Yang et al. 2024, arXiv 2412.06464): a step, and chunks of many tokens.

Per head, with a state S [dk, dv] that maps keys to values:
S <- exp(g) S;  u = beta (v - S^T k);  S <- S + k u^T;  out = S^T q, with g <= 0.
Shape comments: J chunks of C rows.
"""

import functools

import jax
import jax.numpy as jnp

# The state is what a model remembers, so it is float32 in fact: by default a float32 product is
# rounded to TF32 on a GPU and to bfloat16 on a TPU. The layer's projections cost far more.
_product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def l2_normalise(x: jax.Array, eps: float = 1e-6) -> jax.Array:
    """Returns x / sqrt(sum(x^2) + eps) over the last axis, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + eps)


def delta_rule_step(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Reads and updates the state with one token.

    Args:
      q: [B, H, dk], scaled and normalised, as k is.
      k: [B, H, dk].
      v: [B, H, dv].
      g: [B, H], at most 0.
      beta: [B, H].
      state: float32 [B, H, dk, dv].

    Returns:
      float32 [B, H, dv], and the new state.
    """
    q, k, v, g, beta = (x.astype(jnp.float32) for x in (q, k, v, g, beta))
    decay = jnp.exp(g)[..., None]
    # S^T k and S^T q of the old state in one pass: on a CPU twice as fast as reading the new state
    # for the output. A product and sum written elementwise is up to 40 times slower there.
    both = _product("bhik,bhkv->bhiv", jnp.stack([k, q], axis=2), state)
    kept, read = both[:, :, 0], both[:, :, 1]
    update = beta[..., None] * (v - decay * kept)
    out = decay * read + jnp.sum(q * k, axis=-1, keepdims=True) * update
    return out, decay[..., None] * state + k[..., :, None] * update[..., None, :]


def delta_rule_chunked(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    n_valid: jax.Array,
    chunk: int = 64,
) -> tuple[jax.Array, jax.Array]:
    """Runs T tokens of each sequence, as `delta_rule_step` does one by one.

    The updates u of a chunk solve (I + A) u = beta (v - exp(g_1 + .. + g_i) S^T k), where A_ij =
    beta_i exp(g_{j+1} + .. + g_i) k_i . k_j for j < i (the paper's WY form). All that does not
    need S is computed for all chunks at once; a scan carries S through them.

    Args:
      q: [B, T, H, dk], scaled and normalised, as k is.
      k: [B, T, H, dk].
      v: [B, T, H, dv].
      g: [B, T, H], at most 0.
      beta: [B, T, H].
      state: float32 [B, H, dk, dv]; under shard_map it varies over the mesh as the rows do.
      n_valid: int [B], 0..T: the rows after it are padding, which may hold anything.
      chunk: rows of a chunk, a power of two.

    Returns:
      float32 [B, T, H, dv], zero at padding; and the state after row n_valid - 1, which is the
      one given where n_valid is 0.

    Raises:
      ValueError: chunk is not a power of two.
    """
    if chunk < 1 or chunk & (chunk - 1):
        raise ValueError(f"chunk must be a power of two, got {chunk}")
    n_batch, n_rows, n_heads, _ = q.shape
    chunk = min(chunk, 1 << (n_rows - 1).bit_length())
    valid = jnp.arange(n_rows)[None] < n_valid[:, None]
    q, k, v, g, beta = (_split_rows(x, valid, chunk) for x in (q, k, v, g, beta))

    from_start = jnp.exp(jnp.cumsum(g, axis=-1))[..., None]  # [J, B, H, C, 1]
    decay = _decay_between_rows(g)  # [J, B, H, C, C]
    k_beta = k * beta[..., None]
    inverse = _unit_lower_inverse(jnp.tril(_product("...ik,...jk->...ij", k_beta, k) * decay, -1))
    written = _product("...ij,...jv->...iv", inverse, v * beta[..., None])
    erased = _product("...ij,...jk->...ik", inverse, k_beta * from_start)
    scores = _product("...ik,...jk->...ij", q, k) * decay
    to_end = decay[..., -1, :, None]
    chunks = (scores, q * from_start, k * to_end, written, erased, from_start[..., -1:, :])

    def run_chunk(carry, rows):
        scores, queries, keys, written, erased, whole_decay = rows
        update = written - _product("...ik,...kv->...iv", erased, carry)
        out = _product("...ik,...kv->...iv", queries, carry)
        out = out + _product("...ij,...jv->...iv", scores, update)
        return whole_decay * carry + _product("...ik,...iv->...kv", keys, update), out

    last, out = jax.lax.scan(run_chunk, state, chunks)
    # An update of 0 turns -0 into +0, so a sequence of padding alone takes its state from here.
    last = jnp.where((n_valid > 0)[:, None, None, None], last, state)
    out = jnp.moveaxis(out, (0, 2), (1, 3))  # [B, J, C, H, dv]
    return out.reshape(n_batch, -1, n_heads, v.shape[-1])[:, :n_rows], last


def _split_rows(x: jax.Array, valid: jax.Array, chunk: int) -> jax.Array:
    """Rows [B, T, H, ...] to float32 [J, B, H, C, ...], padding set to zero.

    A zero row neither decays the state (g = 0) nor writes to it (beta = 0).
    """
    x = jnp.where(jnp.expand_dims(valid, range(2, x.ndim)), x, 0).astype(jnp.float32)
    n_missing = -x.shape[1] % chunk
    x = jnp.pad(x, [(0, n_missing if axis == 1 else 0) for axis in range(x.ndim)])
    x = x.reshape(x.shape[0], -1, chunk, *x.shape[2:])  # [B, J, C, H, ...]
    return jnp.moveaxis(x, (1, 3), (0, 2))


def _decay_between_rows(g: jax.Array) -> jax.Array:
    """[..., C] to [..., C, C]: exp(g_{j+1} + .. + g_i) at row i, column j <= i, else 0.

    Each sum is taken of its own terms. A difference of running totals would lose the small decays
    that follow large ones: at a total of -3000 float32 resolves 2e-4.
    """
    upto = jnp.tril(jnp.ones((g.shape[-1], g.shape[-1]), jnp.float32))
    terms = g[..., :, None] * jnp.tril(upto, -1)
    return jnp.exp(_product("il,...lj->...ij", upto, terms)) * upto


def _unit_lower_inverse(a: jax.Array) -> jax.Array:
    """Inverse of I + a, for a [..., C, C] zero on and above the diagonal, C a power of two.

    Inverts the diagonal blocks of size 1, 2, 4, ...: [[X, 0], [L, Y]] has the inverse
    [[X', 0], [-Y' L X', Y']]. As exact as forward substitution (the series I - a + a^2 - ..
    cancels catastrophically where keys repeat), and all products. A triangular solve is no faster
    on an idle CPU, where it goes to a BLAS with threads of its own: two to eight times slower on
    a busy one.
    """
    n_rows, lead = a.shape[-1], a.shape[:-2]
    inverse = jnp.ones_like(a, shape=(*lead, n_rows, 1, 1))
    size = 1
    while size < n_rows:
        n_pairs = n_rows // (2 * size)
        below = a.reshape(*lead, n_pairs, 2, size, n_pairs, 2, size)[..., :, 1, :, :, 0, :]
        below = jnp.moveaxis(jnp.diagonal(below, axis1=-4, axis2=-2), -1, -3)
        inverse = inverse.reshape(*lead, n_pairs, 2, size, size)
        upper, lower = inverse[..., 0, :, :], inverse[..., 1, :, :]
        corner = -_product(
            "...ij,...jk->...ik", lower, _product("...ij,...jk->...ik", below, upper)
        )
        upper = jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1)
        inverse = jnp.concatenate([upper, jnp.concatenate([corner, lower], axis=-1)], axis=-2)
        size *= 2
    return inverse[..., 0, :, :]
