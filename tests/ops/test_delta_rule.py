"""The gated delta rule against a loop over tokens, sequences and heads in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from spd_jax.ops.delta_rule import delta_rule_chunked, delta_rule_step, l2_normalise

N_BATCH, N_HEADS, KEY_DIM, VALUE_DIM = 3, 2, 8, 6
LONGEST = 200

chunked = jax.jit(delta_rule_chunked, static_argnames="chunk")


@jax.jit
def stepped(q, k, v, g, beta, state, n_valid):
    """As `delta_rule_chunked`, one `delta_rule_step` per row."""

    def step(state, row):
        t, *row = row
        out, new = delta_rule_step(*row, state)
        return jnp.where((t < n_valid)[:, None, None, None], new, state), out

    rows = [jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta)]
    state, out = jax.lax.scan(step, state, (jnp.arange(q.shape[1]), *rows))
    return jnp.moveaxis(out, 0, 1), state


def naive(q, k, v, g, beta, state):
    """Returns the outputs [B, T, H, dv] and the states after 0..T rows [T + 1, B, H, dk, dv]."""
    q, k, v, g, beta, state = (x.astype(np.float64) for x in (q, k, v, g, beta, state))
    out, states = np.zeros(v.shape), np.stack([state] * (v.shape[1] + 1))
    for t in range(v.shape[1]):
        for b in range(v.shape[0]):
            for h in range(v.shape[2]):
                s = np.exp(g[b, t, h]) * states[t, b, h]
                update = beta[b, t, h] * (v[b, t, h] - s.T @ k[b, t, h])
                states[t + 1, b, h] = s + np.outer(k[b, t, h], update)
                out[b, t, h] = states[t + 1, b, h].T @ q[b, t, h]
    return out, states


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def make(n_rows, seed=0):
    """Inputs as a layer gives them, decays from none at all to complete in one row."""
    rng = np.random.default_rng(seed)
    lead = (N_BATCH, n_rows, N_HEADS)
    q = unit(rng.standard_normal((*lead, KEY_DIM))) * KEY_DIM**-0.5
    k = unit(rng.standard_normal((*lead, KEY_DIM)))
    v = rng.standard_normal((*lead, VALUE_DIM))
    g = -rng.choice([0, 0.01, 1, 50], lead, p=[0.2, 0.5, 0.2, 0.1])
    g[0, :, 0], g[1, :, 0] = 0, -50
    g[2, :, 0] = np.where(np.arange(n_rows) % 64 < 48, -50, -0.01)  # little after much
    beta = rng.random(lead)
    state = rng.standard_normal((N_BATCH, N_HEADS, KEY_DIM, VALUE_DIM))
    return [x.astype(np.float32) for x in (q, k, v, g, beta, state)]


def first(n_rows, inputs):
    return [x[:, :n_rows] for x in inputs[:-1]] + [inputs[-1]]


def on_device(*arrays):
    return [jnp.asarray(x) for x in arrays]


def spoil(inputs, n_valid):
    """The inputs with padding that no product survives."""
    spoilt = [x.copy() for x in inputs[:-1]]
    for x in spoilt:
        for b, n in enumerate(n_valid):
            x[b, n:] = np.nan if b != 1 else 1e30
    return [*spoilt, inputs[-1]]


@functools.cache
def expected():
    inputs = make(LONGEST)
    return inputs, *naive(*inputs)


def assert_equal_bits(got, want):
    np.testing.assert_array_equal(np.asarray(got).view(np.uint32), np.asarray(want).view(np.uint32))


def assert_close(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("n_rows", "chunk"),
    [(1, 64), (2, 64), (63, 64), (64, 64), (65, 64), (LONGEST, 64), (LONGEST, 16), (65, 1)],
)
def test_chunks_equal_the_loop_over_tokens(n_rows, chunk):
    inputs, want, states = expected()
    n_valid = np.full(N_BATCH, n_rows)
    out, state = chunked(*on_device(*first(n_rows, inputs), n_valid), chunk=chunk)
    assert_close(out, want[:, :n_rows])
    assert_close(state, states[n_rows])


def test_steps_equal_the_loop_over_tokens():
    inputs, want, states = expected()
    out, state = stepped(*on_device(*inputs, np.full(N_BATCH, LONGEST)))
    assert_close(out, want)
    assert_close(state, states[-1])


def test_a_repeated_key_stays_exact():
    # The powers of A then reach 1e18 while its inverse holds only 1 and -1.
    q, k, v, g, beta, state = make(64)
    k[:] = k[:, :1]
    inputs = [q, k, v, 0 * g, 1 + 0 * beta, state]
    want, states = naive(*inputs)
    out, state = chunked(*on_device(*inputs, np.full(N_BATCH, 64)))
    assert_close(out, want)
    assert_close(state, states[-1])


def test_the_state_after_a_split_continues_the_whole():
    inputs, want, states = expected()
    n_valid = np.full(N_BATCH, 65)
    _, state = chunked(*on_device(*first(65, inputs), n_valid))
    rest = [x[:, 65:130] for x in inputs[:-1]]
    out, state = chunked(*on_device(*rest), state, jnp.asarray(n_valid))
    assert_close(out, want[:, 65:130])
    assert_close(state, states[130])


@pytest.mark.parametrize("n_valid", [[0, 17, 64], [1, 65, 0]])
def test_padding_changes_neither_outputs_nor_state(n_valid):
    inputs = make(65)
    inputs[-1][:, 0, 0, 0] = -0.0  # a sum with 0 would lose the sign
    want, states = naive(*inputs)
    clean_out, clean_state = chunked(*on_device(*inputs, n_valid))
    out, state = chunked(*on_device(*spoil(inputs, n_valid), n_valid))
    assert np.isfinite(out).all()
    assert_equal_bits(state, clean_state)
    for b, n in enumerate(n_valid):
        assert_equal_bits(out[b, :n], clean_out[b, :n])
        assert_close(out[b, :n], want[b, :n])
        assert_close(state[b], states[n, b])
        if n == 0:
            assert_equal_bits(state[b], inputs[-1][b])


def test_bfloat16_rows_keep_a_float32_state():
    *rows, state = on_device(*first(65, expected()[0]))
    n_valid = jnp.full(N_BATCH, 65)
    narrow = [x.astype(jnp.bfloat16) for x in rows]
    out, last = chunked(*narrow, state, n_valid)
    want_out, want_last = chunked(*(x.astype(jnp.float32) for x in narrow), state, n_valid)
    assert out.dtype == last.dtype == jnp.float32
    assert_close(out, want_out)
    assert_close(last, want_last)
    out, last = jax.eval_shape(delta_rule_step, *(x[:, 0] for x in narrow), state)
    assert out.dtype == last.dtype == jnp.float32


def test_gradients_equal_those_through_the_steps_and_ignore_padding():
    inputs = first(65, expected()[0])
    n_valid = np.array([0, 17, 64])
    rng = np.random.default_rng(1)
    weight = rng.standard_normal(inputs[2].shape)
    state_weight = rng.standard_normal(inputs[-1].shape)
    valid = np.arange(65)[None] < n_valid[:, None]

    def gradient(run, inputs):
        def loss(*inputs):
            out, state = run(*inputs, jnp.asarray(n_valid))
            out = jnp.where(valid[..., None, None], out, 0)
            return jnp.sum(out * weight) + jnp.sum(state * state_weight)

        return jax.jit(jax.grad(loss, argnums=range(6)))(*on_device(*inputs))

    want = gradient(stepped, inputs)
    got = gradient(delta_rule_chunked, spoil(inputs, n_valid))
    for one, other in zip(got, want, strict=True):
        assert np.abs(other).max() > 0.1
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_runs_in_a_branch_of_a_loop_under_shard_map():
    inputs = [x[:2] for x in first(65, expected()[0])]
    n_valid = np.array([65, 30])
    mesh = jax.make_mesh((2,), ("rank",), axis_types=(jax.sharding.AxisType.Auto,))
    batch = PartitionSpec("rank")

    def twice_on_the_first_rank(*args):
        *rows, state, n_valid = args

        def again(_, state):
            return delta_rule_chunked(*rows, state, n_valid)[1]

        first_rank = jax.lax.axis_index("rank") == 0
        return jax.lax.cond(
            first_rank, lambda s: jax.lax.fori_loop(0, 2, again, s), lambda s: again(0, s), state
        )

    run = jax.shard_map(
        twice_on_the_first_rank, mesh=mesh, in_specs=batch, out_specs=batch, check_vma=True
    )
    state = jax.jit(run)(*on_device(*inputs, n_valid))
    once = naive(*inputs)[1]
    assert_close(state[0], naive(*inputs[:-1], once[65])[1][65, 0])
    assert_close(state[1], once[30, 1])


def test_a_chunk_that_is_no_power_of_two_is_refused():
    inputs = on_device(*first(2, expected()[0]), np.full(N_BATCH, 2))
    for chunk in (0, 48):
        with pytest.raises(ValueError, match=f"power of two, got {chunk}"):
            delta_rule_chunked(*inputs, chunk=chunk)


def test_l2_normalise_gives_float32_unit_vectors_and_zero_for_zero():
    x = jnp.array([[3, -4], [0, 0], [1e3, 0]], jnp.bfloat16)
    got = l2_normalise(x)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, [[0.6, -0.8], [0, 0], [1, 0]], rtol=1e-6)
    assert np.isfinite(jax.grad(lambda x: l2_normalise(x).sum())(x).astype(np.float32)).all()


def test_agrees_with_transformers():
    torch = pytest.importorskip("torch")
    peer = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    q, k, v, g, beta, state = make(65)
    raw_q, raw_k = 3 * q, 5 * k  # the peer normalises and scales
    args = [torch.from_numpy(x) for x in (raw_q, raw_k, v, g, beta)]
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    options["initial_state"] = torch.from_numpy(state)
    q = l2_normalise(jnp.asarray(raw_q)) * KEY_DIM**-0.5
    k = l2_normalise(jnp.asarray(raw_k))
    n_valid = np.full(N_BATCH, 65)
    out, last = chunked(q, k, *on_device(v, g, beta, state, n_valid))
    recurrent = peer.torch_recurrent_gated_delta_rule(*args, **options)
    in_chunks = peer.torch_chunk_gated_delta_rule(*args, **options)
    # The peer's chunks take decays from differences of running totals (up to -3000 here).
    for (peer_out, peer_last), tolerance in ((recurrent, 1e-5), (in_chunks, 1e-3)):
        np.testing.assert_allclose(out, peer_out.numpy(), rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(last, peer_last.numpy(), rtol=tolerance, atol=tolerance)
