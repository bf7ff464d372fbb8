"""Drawing ids: filters over shards against plain sorting, noise, and independence of neighbours."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from scipy import stats

from spd_jax.config import SamplingConfig
from spd_jax.ops import sampling as ops
from spd_jax.ops.sampling import GREEDY, argmax_lowest, plan
from tests.distribution import warp

LOGITS = np.array([0.3, -1.0, 2.0, 0.1, 1.2, -0.4, 0.9, -1.2], np.float32)
CHI_SQUARE = {3: 16.3, 7: 24.3}  # degrees of freedom -> exceeded once in a thousand


def keys(n: int, seed: int = 0) -> jax.Array:
    return jax.random.split(jax.random.key(seed), n)


def chi_square(ids: np.ndarray, probabilities: np.ndarray) -> float:
    want = len(ids) * probabilities
    counts = np.bincount(ids, minlength=len(want))
    return float(np.sum((counts - want) ** 2 / want))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def test_greedy_takes_the_lowest_of_tied_ids():
    logits = jnp.array([[1.0, 3.0, 3.0, 0.0], [-1.0, -1.0, -1.0, -1.0], [0.0, 0.0, 2.0, 1.0]])
    got = sample(logits, keys(3), jnp.arange(3), SamplingConfig())
    assert got.tolist() == argmax_lowest(logits).tolist() == [1, 0, 2] and got.dtype == jnp.int32


def sharded_log_probabilities(
    logits: np.ndarray, sampling: SamplingConfig, n_shards: int = 1
) -> np.ndarray:
    """The filtered log-probabilities [B, V] of logits whose id i lies on shard i mod R."""
    n_batch, size = logits.shape
    method, knobs = plan(sampling, size)
    n_rows = -(-size // n_shards)
    ids = np.arange(n_rows * n_shards).reshape(n_rows, n_shards).T
    padded = np.full((n_batch, n_rows * n_shards), -np.inf, np.float32)
    padded[:, :size] = logits
    scores = jnp.asarray(padded.reshape(n_batch, n_rows, n_shards).transpose(2, 0, 1))
    ids = jnp.asarray(np.where(ids < size, ids, -1), jnp.int32)

    def on_shard(knobs, scores, ids):
        gather = lambda part: lax.all_gather(part, "shard")  # noqa: E731
        (cut,), _ = ops.find_cuts([(scores, ids)], method, knobs, gather)
        return ops.log_probabilities(scores, ids, cut, knobs)

    over_shards = jax.vmap(on_shard, in_axes=(None, 0, 0), axis_name="shard")
    found = jax.jit(over_shards)(knobs, scores, ids)
    return np.asarray(found).transpose(1, 2, 0).reshape(n_batch, -1)[:, :size]


@pytest.fixture(scope="module")
def vectors(golden):
    with np.load(golden / "sampling" / "sampling.npz") as found:
        return dict(found)


def golden_settings(vectors) -> list[SamplingConfig]:
    return [SamplingConfig(t, int(k), p) for t, k, p in vectors["settings"]]


@pytest.mark.parametrize("n_shards", [1, 3])
def test_warped_probabilities_are_those_of_the_reference(vectors, n_shards):
    cells = 0
    for s, sampling in enumerate(golden_settings(vectors)):
        for name in ("p", "q"):
            got = np.exp(sharded_log_probabilities(vectors[f"{name}_logits"], sampling, n_shards))
            for pair, (mine, theirs) in enumerate(
                zip(got, vectors[f"{name}_probs"][s], strict=True)
            ):
                if (s, pair, name) != (4, 4, "p"):  # there its sort kept another of two tied ids
                    np.testing.assert_allclose(mine, theirs, atol=1e-6)
                    cells += 1
    assert cells == 11 * 6 * 2 - 1


def test_draft_probabilities_lie_at_their_ids(vectors):
    got = np.exp(sharded_log_probabilities(vectors["draft_logits"][None], SamplingConfig(1.0)))[0]
    np.testing.assert_allclose(got.sum(), 1, atol=1e-6)
    full = np.zeros(64)
    full[vectors["draft_ids"]] = vectors["draft_probs"]
    np.testing.assert_allclose(vectors["draft_q_full"], full, atol=1e-6)


def test_acceptance_and_residual_are_those_of_the_reference(vectors):
    for s, pair in itertools.product(range(11), range(6)):
        p, q = (vectors[f"{name}_probs"][s, pair] for name in ("p", "q"))
        scores = ops.residual_scores(jnp.log(p)[None], jnp.asarray(q)[None])[0]
        got = np.asarray(jax.nn.softmax(scores))
        np.testing.assert_allclose(got, vectors["residual"][s, pair], atol=1e-6)
        overlap = np.minimum(p, q).sum()
        np.testing.assert_allclose(overlap, vectors["total_accept_prob"][s, pair], atol=1e-6)


def test_where_the_residual_is_empty_the_target_decides():
    p = jnp.array([[0.5, 0.0, 0.25, 0.25]])
    got = jax.nn.softmax(ops.residual_scores(jnp.log(p), p))
    np.testing.assert_allclose(got, p, atol=1e-3)


FILTERED = [
    SamplingConfig(0.7, top_k=1),
    SamplingConfig(1.0, top_k=5),
    SamplingConfig(1.3, top_k=64),
    SamplingConfig(1.0, top_k=65),
    SamplingConfig(1.0, top_k=299),
    SamplingConfig(1.0, top_p=0.01),
    SamplingConfig(1.0, top_p=0.9),
    SamplingConfig(5.0, top_p=0.999),  # reaches beyond the candidates
    SamplingConfig(0.8, top_k=20, top_p=0.95),
    SamplingConfig(2.0, top_k=200, top_p=0.5),
]


@pytest.mark.parametrize("sampling", FILTERED, ids=str)
@pytest.mark.parametrize("n_shards", [1, 4, 7])
@pytest.mark.parametrize("kind", ["distinct", "tied"])
def test_filters_over_shards_keep_what_sorting_keeps(sampling, n_shards, kind):
    logits = 2 * np.random.default_rng(1).standard_normal((5, 300)).astype(np.float32)
    if kind == "tied":
        logits = np.round(logits)
    got = sharded_log_probabilities(logits, sampling, n_shards)
    want = np.stack([warp(row, sampling) for row in logits])
    np.testing.assert_array_equal(got > -np.inf, want > 0)
    np.testing.assert_allclose(np.exp(got), want, atol=2e-6)


def test_ties_that_a_shard_does_not_send_are_found():
    """More ids than candidates have the k-th value: all of them stay."""
    sampling, logits = SamplingConfig(1.0, top_k=3), np.zeros((2, 300), np.float32)
    logits[0, 7], logits[1] = 1.0, np.arange(300)
    assert plan(sampling, 300)[0].n_candidates < 100
    for n_shards in (1, 3):
        got = sharded_log_probabilities(logits, sampling, n_shards) > -np.inf
        assert got[0].all() and np.flatnonzero(got[1]).tolist() == [297, 298, 299]


def test_ids_that_were_not_sent_count_in_the_normaliser_of_top_p():
    """All but one id are tied at the k-th value: with all of them two ids stay, not one."""
    logits = np.zeros((1, 300), np.float32)
    logits[0, 5] = 1.0
    sampling = SamplingConfig(1.0, top_k=3, top_p=0.0095)
    for n_shards in (1, 2):
        got = sharded_log_probabilities(logits, sampling, n_shards)[0]
        assert np.flatnonzero(got > -np.inf).tolist() == [0, 5]
        np.testing.assert_allclose(np.exp(got), warp(logits[0], sampling), atol=2e-6)


def test_all_ids_are_sent_only_where_a_row_needs_it():
    """And the rows that do not need it keep their cut to the last bit."""
    rng, sent = np.random.default_rng(3), []
    logits = rng.standard_normal((3, 1000)).astype(np.float32)
    logits[1:] = 0  # nothing but ties
    method, knobs = plan(SamplingConfig(1.0, top_p=0.6), 1000)
    ids = jnp.arange(1000, dtype=jnp.int32)

    def gather(part):
        jax.debug.callback(lambda: sent.append(part.shape[1]))
        return part[None]

    @jax.jit
    def cut(logits, needed):
        return ops.find_cuts([(logits, ids)], method, knobs, gather, [needed])[0][0]

    def run(*rows):
        sent.clear()
        found = jax.block_until_ready(cut(logits, jnp.array(rows)))
        jax.effects_barrier()
        return found, len(sent)

    few, n_few = run(True, False, False)
    all_rows, n_all = run(True, True, False)
    assert (n_few, n_all) == (1, 2)
    for a, b in zip(few, all_rows, strict=True):
        np.testing.assert_array_equal(a[0], b[0])
    assert int(all_rows.last[1]) == 599 and float(all_rows.log_total[1]) == pytest.approx(
        np.log(600)
    )


def test_values_change_no_method_but_powers_of_two_of_top_k_do():
    methods = [
        plan(SamplingConfig(t, k, p), 50000)[0]
        for t, k, p in [(0.3, 3, 0.5), (2.0, 64, 1.0), (1.0, 50, 0.9)]
    ]
    assert len(set(methods)) == 1
    assert plan(SamplingConfig(1.0, 65), 50000)[0] != methods[0]
    assert plan(SamplingConfig(1.0, 500, verifier="coupled"), 400)[0] == ops.Method("coupled")
    assert plan(SamplingConfig(0.0, 5, 0.5), 100)[0] == GREEDY


def test_noise_belongs_to_the_id_whatever_else_is_drawn():
    positions, ids = jnp.array([4, 9]), jnp.arange(50, dtype=jnp.int32)
    whole = ops.gumbel(keys(2), ops.COUPLED, positions, ids)
    part = ops.gumbel(keys(2)[1:], ops.COUPLED, positions[1:], ids[3::7])
    np.testing.assert_array_equal(part[0], whole[1, 3::7])


def test_noise_is_gumbel_also_where_it_is_largest():
    noise = ops.gumbel(keys(20), ops.DRAFT, jnp.arange(20), jnp.arange(20000, dtype=jnp.int32))
    noise = np.asarray(noise).ravel()
    assert np.isfinite(noise).all()
    assert stats.kstest(noise, stats.gumbel_r.cdf).pvalue > 1e-3
    largest = noise[noise > 7]  # of 400,000 about 365 are
    assert 290 < len(largest) < 440 and len(set(largest.tolist())) == len(largest)
    assert stats.kstest(largest - 7, stats.expon.cdf).pvalue > 1e-3


def test_streams_positions_and_keys_are_independent():
    ids = jnp.arange(4000, dtype=jnp.int32)
    draws = [
        ops.gumbel(keys(3)[key : key + 1], stream, jnp.array([position]), ids)[0]
        for key, stream, position in itertools.product(range(3), range(4), (0, 1))
    ]
    correlations = np.corrcoef(np.stack(draws))
    others = correlations[~np.eye(len(draws), dtype=bool)]
    assert np.abs(others).max() < 5 / np.sqrt(len(ids))
    u = ops.uniform(jnp.repeat(keys(1), 20000), ops.ACCEPT, jnp.arange(20000))
    assert stats.kstest(np.asarray(u), stats.uniform.cdf).pvalue > 1e-3


def sample(logits, keys, positions, sampling: SamplingConfig):
    return ops.sample(logits, keys, positions, *plan(sampling, logits.shape[-1]))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_tempered_distribution(temperature):
    n = 20000
    logits = jnp.tile(LOGITS, (n, 1))
    sampling = SamplingConfig(temperature=temperature)
    want = softmax(LOGITS / temperature)
    by_key = sample(logits, keys(n), jnp.full(n, 5), sampling)
    assert chi_square(np.asarray(by_key), want) < CHI_SQUARE[7]
    by_position = sample(logits, keys(1)[jnp.zeros(n, int)], jnp.arange(n), sampling)
    assert chi_square(np.asarray(by_position), want) < CHI_SQUARE[7]
    other = sample(logits, keys(n), jnp.full(n, 5), SamplingConfig(temperature=3 * temperature))
    assert chi_square(np.asarray(other), want) > 10 * CHI_SQUARE[7]


def test_draws_follow_the_top_k_distribution():
    n, top = 20000, np.sort(np.argsort(-LOGITS)[:4])
    got = sample(jnp.tile(LOGITS, (n, 1)), keys(n), jnp.zeros(n, int), SamplingConfig(1.0, top_k=4))
    assert set(got.tolist()) == set(top.tolist())
    among = np.searchsorted(top, got)
    assert chi_square(among, softmax(LOGITS[top])) < CHI_SQUARE[3]


def test_a_draw_depends_on_its_key_position_and_logits_alone():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.standard_normal((6, 40)), jnp.float32)
    positions, sampling = jnp.array([3, 3, 7, 100, 0, 8]), SamplingConfig(temperature=1.5)
    together = sample(logits, keys(6), positions, sampling).tolist()
    for b, id_ in enumerate(together):
        one = slice(b, b + 1)
        assert sample(logits[one], keys(6)[one], positions[one], sampling).tolist() == [id_]
    order = jnp.array([4, 2, 5, 0, 1, 3])
    moved = sample(logits[order], keys(6)[order], positions[order], sampling).tolist()
    assert moved == [together[b] for b in order.tolist()]


def test_keys_and_positions_give_different_draws():
    n, sampling = 200, SamplingConfig(temperature=1.0)
    flat = jnp.zeros((n, 1000))
    by_position = sample(flat, keys(1)[jnp.zeros(n, int)], jnp.arange(n), sampling)
    by_key = sample(flat, keys(n), jnp.zeros(n, int), sampling)
    assert len(set(by_position.tolist())) > 150 and len(set(by_key.tolist())) > 150
