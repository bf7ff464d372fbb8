"""The mixture-of-experts MLP against a loop over tokens and their experts in float64."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from spd_jax.ops.experts import by_block, by_pair, experts_mlp, route

WAYS = pytest.mark.parametrize("way", [by_pair, by_block])
# Names an instruction of compiled text, its result types and its operation.
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%\S+ = (\(.*?\)|\S+) ([\w-]+)\(", re.MULTILINE)


def naive(x, gate_up, down, weights, ids, hidden_dtype=np.float64):
    x, gate_up, down, weights = (np.asarray(a, np.float64) for a in (x, gate_up, down, weights))
    out = np.zeros_like(x)
    for t in range(len(x)):
        for weight, expert in zip(weights[t], np.asarray(ids)[t], strict=True):
            gate, up = np.split(gate_up[expert] @ x[t], 2)
            hidden = (gate / (1 + np.exp(-gate)) * up).astype(hidden_dtype)
            out[t] += weight * (down[expert] @ hidden.astype(np.float64))
    return out


def one_hot(x, gate_up, down, weights, ids):
    """Every token through every expert, weighed by what it gave to it."""
    gate, up = jnp.split(jnp.einsum("td,xfd->txf", x, gate_up), 2, axis=-1)
    out = jnp.einsum("txf,xdf->txd", jax.nn.silu(gate) * up, down)
    return jnp.einsum("tk,tkx,txd->td", weights, jax.nn.one_hot(ids, len(down)), out)


def make(n_experts, n_active, n_tokens, d=16, f=8, seed=0):
    """Arguments of `experts_mlp`, with results of about unit size."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n_tokens, d))
    gate_up = rng.standard_normal((n_experts, 2 * f, d)) * d**-0.5
    down = rng.standard_normal((n_experts, d, f)) * f**-0.5
    logits = rng.standard_normal((n_tokens, n_experts))
    weights, ids = route(jnp.asarray(logits, jnp.float32), n_active, normalise=True)
    return *(jnp.asarray(a, jnp.float32) for a in (x, gate_up, down)), weights, ids


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("n_active", [1, 2, 6])
def test_the_most_probable_experts_are_chosen_and_of_equals_the_lowest_id(n_active, normalise):
    logits = np.random.default_rng(0).integers(0, 3, (2, 5, 6))  # three values: ties everywhere
    weights, ids = route(jnp.asarray(logits, jnp.bfloat16), n_active, normalise)
    assert (weights.dtype, ids.dtype) == (jnp.float32, jnp.int32)
    want_ids = np.argsort(-logits, axis=-1, kind="stable")[..., :n_active]
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    want = np.take_along_axis(probs, want_ids, -1)
    np.testing.assert_array_equal(ids, want_ids)
    want = want / want.sum(-1, keepdims=True) if normalise else want
    np.testing.assert_allclose(weights, want, rtol=1e-6)


@WAYS
@pytest.mark.parametrize(
    ("n_experts", "n_active", "n_tokens"),
    [(4, 1, 1), (5, 5, 3), (64, 2, 3), (7, 2, 40), (3, 3, 40)],
)
def test_each_way_equals_the_loop_over_tokens_and_experts(way, n_experts, n_active, n_tokens):
    args = make(n_experts, n_active, n_tokens)
    np.testing.assert_allclose(jax.jit(way)(*args), naive(*args), rtol=1e-5, atol=1e-5)


@WAYS
def test_one_expert_takes_every_token_and_the_others_are_never_read(way):
    x, gate_up, down, weights, ids = make(4, 1, 40)
    ids = jnp.full_like(ids, 1)
    others = np.arange(4) != 1
    want = naive(x, gate_up, down, weights, ids)
    gate_up, down = (jnp.where(others[:, None, None], jnp.nan, a) for a in (gate_up, down))

    @jax.jit
    def run(*floats):
        out, vjp = jax.vjp(lambda *a: way(*a, ids), *floats)
        return out, vjp(jnp.ones_like(out))

    got, grads = run(x, gate_up, down, weights)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    for of_x_or_weights in (grads[0], grads[3]):
        assert np.isfinite(of_x_or_weights).all()
    for of_experts in grads[1:3]:
        np.testing.assert_array_equal(of_experts[others], 0)
        assert np.isfinite(of_experts[1]).all()


def test_few_pairs_are_taken_as_they_come_and_many_are_sorted():
    def sorts(n_tokens):
        return " sort[" in str(jax.make_jaxpr(experts_mlp)(*make(8, 2, n_tokens)))

    assert [sorts(n) for n in (1, 8, 9)] == [False, False, True]


@WAYS
def test_padding_rows_change_no_other_row(way):
    x, gate_up, down, weights, ids = make(4, 2, 40)
    want = naive(x, gate_up, down, weights, ids)[:30]
    x = x.at[30:].set(1e4)
    weights, ids = weights.at[30:].set(1e4), ids.at[30:].set(0)
    got = jax.jit(way)(x, gate_up, down, weights, ids)[:30]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@WAYS
def test_gradients_equal_those_of_the_one_hot_formulation(way):
    x, gate_up, down, _, ids = make(5, 2, 20)
    logits = jnp.asarray(np.random.default_rng(1).standard_normal((20, 2)), jnp.float32)

    def loss(mlp, x, gate_up, down, logits):
        out = mlp(x, gate_up, down, jax.nn.softmax(logits), ids)
        return jnp.sum(jnp.sin(out))

    got, want = (
        jax.jit(jax.grad(loss, (1, 2, 3, 4)), static_argnums=0)(mlp, x, gate_up, down, logits)
        for mlp in (way, one_hot)
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@WAYS
def test_bfloat16_is_accumulated_in_float32(way):
    args = make(3, 3, 40, d=256, f=128)
    args = (*(a.astype(jnp.bfloat16) for a in args[:3]), *args[3:])
    got = jax.jit(way)(*args)
    assert got.dtype == jnp.bfloat16
    # Only the hidden values and the result are rounded, so nearly all bits are the oracle's.
    want = naive(*args, hidden_dtype=jnp.bfloat16).astype(jnp.bfloat16)
    assert np.mean(np.asarray(got) != want) < 0.01


def in_decode_loop(mlp):
    """As a decode loop calls it: in a branch of a loop whose carry is the activation."""

    def run(n, x, gate_up, down, weights, ids):
        def body(state):
            i, x = state
            args = gate_up, down, weights, (ids + i) % len(down)
            return i + 1, lax.cond(i % 3 < 2, lambda: mlp(x, *args), lambda: -x)

        return lax.while_loop(lambda state: state[0] < n, body, (0, x))[1]

    return run


def large_results(text, size):
    """The operations of a compiled program that make an array of at least `size` elements."""
    passing = {"parameter", "get-tuple-element", "tuple", "while", "conditional"}
    found = set()
    for types, operation in INSTRUCTION.findall(text):
        shapes = re.findall(r"\w+\[([\d,]*)\]", types)
        sizes = [math.prod(int(n) for n in shape.split(",") if n) for shape in shapes]
        if max(sizes, default=0) >= size and operation not in passing:
            found.add(operation)
    return found


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_decode_loop_never_makes_an_array_as_large_as_all_experts(dtype):
    x, gate_up, down, weights, ids = make(32, 2, 1, d=64, f=32)
    args = (5, *(a.astype(dtype) for a in (x, gate_up, down)), weights, ids)
    program = jax.jit(in_decode_loop(experts_mlp)).lower(*args).compile()
    expert = (gate_up.nbytes + down.nbytes) // 32  # in float32, as some CPUs compute bfloat16
    assert program.memory_analysis().temp_size_in_bytes < 2 * expert
    if dtype == jnp.float32:  # in bfloat16 the text shows conversions that are never stored
        assert large_results(program.as_text(), down.size) == set()


def test_an_array_as_large_as_all_experts_would_be_seen():
    down = make(32, 2, 1)[2]
    text = jax.jit(lambda w: w.transpose(0, 2, 1)).lower(down).compile().as_text()
    assert large_results(text, down.size) & {"copy", "transpose", "fusion"}
    assert large_results(text, down.size + 1) == set()


@WAYS
def test_each_way_runs_in_loops_and_branches_of_a_sharded_program(way):
    mesh = jax.make_mesh((2,), ("rank",), axis_types=(AxisType.Auto,))
    x, gate_up, down, weights, ids = make(4, 2, 6)
    stacks = [jnp.stack([a, -a]) for a in (gate_up, down)]  # each rank has experts of its own

    def run(x, gate_up, down, weights, ids):
        y = lax.pcast(x, "rank", to="varying")

        def body(_, y):
            branches = [lambda: way(y, gate_up[0], down[0], weights, ids), lambda: jnp.tanh(y)]
            return y + lax.switch(lax.axis_index("rank"), branches)

        return lax.fori_loop(0, 2, body, way(y, gate_up[0], down[0], weights, ids))[None]

    rank, every = PartitionSpec("rank"), PartitionSpec()
    specs = (every, rank, rank, every, every)
    sharded = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=rank, check_vma=True)
    got = jax.jit(sharded)(x, *stacks, weights, ids)
    first = naive(x, gate_up, down, weights, ids)
    for _ in range(2):
        first = first + naive(first, gate_up, down, weights, ids)
    second = naive(x, -gate_up, -down, weights, ids)
    for _ in range(2):
        second = second + np.tanh(second)
    np.testing.assert_allclose(got, [first, second], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("normalise", [True, False])
def test_the_block_of_qwen3_moe_gives_the_same(normalise):
    torch = pytest.importorskip("torch")
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    x, gate_up, down, _, _ = make(6, 2, 10)
    router = np.random.default_rng(2).standard_normal((6, 16)).astype(np.float32)
    config = Qwen3MoeConfig(
        hidden_size=16,
        moe_intermediate_size=8,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=normalise,
    )
    block = Qwen3MoeSparseMoeBlock(config)
    names = {"gate.weight": router, "experts.gate_up_proj": gate_up, "experts.down_proj": down}
    block.load_state_dict({k: torch.from_numpy(np.array(v)) for k, v in names.items()})
    with torch.no_grad():
        want = block(torch.from_numpy(np.array(x))[None])[0].numpy()
    weights, ids = route(x @ router.T, 2, normalise)
    got = jax.jit(experts_mlp)(x, gate_up, down, weights, ids)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
