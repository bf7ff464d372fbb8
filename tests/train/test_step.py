"""The step: it learns, it skips what has nothing to learn from, and it never recompiles."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spd_jax.models.distill import count_scores, mean_metrics, score_positions
from spd_jax.models.draft import init_params
from train.batches import make_batch
from train.config import TrainConfig
from train.optimizer import (
    decayed,
    learning_rate,
    make_average,
    make_optimizer,
    read_average,
)
from train.parallel import one_device
from train.step import draw_fill, init_state, make_train_step
from train.teacher import Teacher, teacher_outputs

CONFIG = TrainConfig(lr=3e-3, warmup_steps=2)


def make_parts(small, optimizer=None, average=None, expected_alpha=None):
    """A state and the step for it."""
    schedule = learning_rate(CONFIG, 1000)
    optimizer = make_optimizer(CONFIG, schedule) if optimizer is None else optimizer
    params = init_params(small.target, small.draft, small.target_params, jax.random.key(1))
    state = init_state(params, optimizer, jax.random.key(2), average)
    more = {"average": average, "expected_alpha": expected_alpha}
    return state, make_train_step(small.target, small.draft, optimizer, schedule, **more)


@pytest.fixture(scope="module")
def parts(small):
    """The parts of `small`, compiled once: a state to copy, since each step donates its own."""
    return make_parts(small)


@pytest.fixture
def state(parts):
    return jax.tree.map(jnp.copy, parts[0])


@pytest.fixture
def train_step(parts):
    return parts[1]


def taught(small, corpus, rows):
    teacher = Teacher(small.target, small.draft, small.target_params, corpus)
    return teacher(make_batch(rows, n_rows=4, length=24))


def leaves(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def test_the_loss_falls_on_a_batch_seen_again(small, corpus, state, train_step):
    batch = taught(small, corpus, corpus.rows[:4])
    losses, accuracies = [], []
    for _ in range(80):
        state, metrics = train_step(state, small.target_params, batch)
        losses.append(float(metrics["loss"]))
        accuracies.append(float(metrics["accuracy"]))
    assert np.mean(losses[-10:]) < 0.25 * np.mean(losses[:3])
    assert np.mean(accuracies[-10:]) > 0.9
    assert int(state.step) == 80 and int(state.skipped) == 0


def test_a_batch_without_a_valid_position_changes_only_the_count(small, corpus, state, train_step):
    batch = taught(small, corpus, corpus.rows[:4])
    state, _ = train_step(state, small.target_params, batch)
    before = leaves((state.params, state.opt_state, state.step))
    nothing = {**batch, "labels": np.full_like(batch["labels"], -100)}
    state, metrics = train_step(state, small.target_params, nothing)
    assert int(metrics["n_valid"]) == 0 and float(metrics["loss"]) == 0
    after = leaves((state.params, state.opt_state, state.step))
    assert all((a == b).all() for a, b in zip(before, after, strict=True))
    assert (int(state.step), int(state.skipped), state.position) == (1, 1, 2)


def test_a_target_choice_outside_the_draft_ids_is_not_learnt_from(small, corpus):
    # The ids that the target never chooses on these rows: nothing is covered.
    batch = taught(small, corpus, corpus.rows[:4])
    never = sorted(set(range(small.target.vocab_size)) - set(np.ravel(batch["best"]).tolist()))
    draft = dataclasses.replace(small.draft, draft_ids=tuple(never))
    state, train_step = make_parts(dataclasses.replace(small, draft=draft))
    state, metrics = train_step(state, small.target_params, batch)
    assert int(metrics["n_valid"]) == 0 and float(metrics["coverage"]) == 0
    assert int(state.skipped) == 1


@pytest.mark.parametrize("n_stages", [2, 5])
def test_the_fill_is_full_half_of_the_time_and_else_uniform(n_stages):
    keys = jax.random.split(jax.random.key(0), 8000)
    fills = np.asarray(jax.vmap(lambda key: draw_fill(key, n_stages))(keys))
    share = np.bincount(fills, minlength=n_stages + 1) / len(fills)
    assert share[0] == 0 and len(share) == n_stages + 1
    np.testing.assert_allclose(share[n_stages], 0.5, atol=0.025)  # 4 standard deviations
    np.testing.assert_allclose(share[1:n_stages], 0.5 / (n_stages - 1), atol=0.025)


def test_the_fill_follows_runs_of_accepted_drafts():
    keys = jax.random.split(jax.random.key(0), 8000)
    fills = np.asarray(jax.vmap(lambda key: draw_fill(key, 4, 0.6))(keys))
    share = np.bincount(fills, minlength=5) / len(fills)
    np.testing.assert_allclose(share, [0, 0.4, 0.6 * 0.4, 0.36 * 0.4, 0.6**3], atol=0.025)


def test_a_step_at_a_fill_is_the_gradient_over_all_row_types(small, corpus):
    """Leaving out row types that play no part changes neither the loss nor any gradient."""
    batch = taught(small, corpus, corpus.rows[:4])
    draft = dataclasses.replace(small.draft, n_layers=2)
    params = init_params(small.target, draft, small.target_params, jax.random.key(1))
    kept = teacher_outputs(small.target, draft, batch)

    def loss(params, fill):
        scores = score_positions(small.target, draft, small.target_params, params, *kept, fill=fill)
        return mean_metrics(count_scores(scores))[0]

    for fill in (1, 2, 3):
        got = jax.jit(jax.value_and_grad(lambda p, fill=fill: loss(p, fill)))(params)
        want = jax.jit(jax.value_and_grad(loss))(params, jnp.asarray(fill))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


def test_a_steps_loss_is_that_of_its_fill(small, corpus, state, train_step):
    """Under the guard that a run sets: nothing is sent to the device from inside the step."""
    batch = taught(small, corpus, corpus.rows[:4])
    kept = teacher_outputs(small.target, small.draft, batch)
    seen = set()
    with jax.transfer_guard_host_to_device("disallow"):
        for _ in range(12):
            params = jax.device_get(state.params)
            state, metrics = train_step(state, small.target_params, batch)
            fill = int(metrics["fill"])
            with jax.transfer_guard_host_to_device("allow"):
                scores = score_positions(
                    small.target, small.draft, small.target_params, params, *kept, fill=fill
                )
                want = mean_metrics(count_scores(scores))[0]
            assert float(metrics["loss"]) == pytest.approx(float(want), rel=1e-4)
            seen.add(fill)
    assert len(seen) > 1


def test_steps_draw_different_fills_without_recompiling(small, corpus, state, train_step):
    batch = taught(small, corpus, corpus.rows[:4])
    state = one_device().put_whole(state)  # as a run begins
    fills, n_compiled = [], []
    for _ in range(20):
        state, metrics = train_step(state, small.target_params, batch)
        fills.append(int(metrics["fill"]))
        n_compiled.append(train_step.gradients._cache_size() + train_step.update._cache_size())
    assert set(fills) == {1, 2, 3}
    assert n_compiled[0] == n_compiled[-1]


def test_an_update_of_several_batches_is_that_of_one_large_batch(small, corpus):
    """The mean over all positions: batches of unequal counts do not weigh the same."""
    large = taught(small, corpus, corpus.rows[:4])
    parts = [taught(small, corpus, corpus.rows[:1]), taught(small, corpus, corpus.rows[1:4])]
    always_full = {"expected_alpha": 1 - 1e-12}
    results = []
    for batches in (large, parts):
        state, train_step = make_parts(small, optax.sgd(0.1), **always_full)
        before = leaves(state.params)
        results.append(train_step(state, small.target_params, batches))
    (one, of_one), (several, of_several) = results
    for a, b, start in zip(leaves(one.params), leaves(several.params), before, strict=True):
        assert np.linalg.norm(a - b) <= 1e-6 * np.linalg.norm(a)
        assert np.linalg.norm(a - start) > 1e-5 * np.linalg.norm(a)
    assert int(of_several["n_valid"]) == int(of_one["n_valid"])
    for name in ("loss", "accuracy", "coverage", "grad_norm", "fill"):
        assert float(of_several[name]) == pytest.approx(float(of_one[name]), rel=1e-5)
    assert several.position == 1
    counts = [int(np.sum(part["labels"] != -100)) for part in parts]
    assert counts[0] * 2 < counts[1]


def test_each_batch_of_an_update_has_its_own_fill(small, corpus, state, train_step):
    batch = taught(small, corpus, corpus.rows[:4])
    fills = []
    for _ in range(12):
        state, metrics = train_step(state, small.target_params, iter([batch, batch]))
        fills.append(float(metrics["fill"]))
    assert any(fill % 1 for fill in fills)


def test_an_update_is_skipped_only_where_no_batch_has_a_valid_position(
    small, corpus, state, train_step
):
    batch = taught(small, corpus, corpus.rows[:4])
    nothing = {**batch, "labels": np.full_like(batch["labels"], -100)}
    state, metrics = train_step(state, small.target_params, [nothing, batch])
    assert int(metrics["n_valid"]) > 0 and (int(state.step), int(state.skipped)) == (1, 0)
    state, metrics = train_step(state, small.target_params, [nothing, nothing])
    assert int(metrics["n_valid"]) == 0 and (int(state.step), int(state.skipped)) == (1, 1)


def test_weights_and_moments_are_float32_where_the_draft_computes_in_bfloat16(small, corpus):
    """An update too small for bfloat16 is kept; the loss is that of the rounded weights."""
    half = dataclasses.replace(
        small, target_params=optax.tree.cast(small.target_params, "bfloat16")
    )
    batch = taught(half, corpus, corpus.rows[:4])
    assert batch["states"].dtype == jnp.bfloat16
    state, train_step = make_parts(half, optax.adam(1e-6), optax.ema(0.9), 1 - 1e-12)
    before = jax.device_get(state.params)
    rounded = optax.tree.cast(state.params, jnp.bfloat16)
    kept = teacher_outputs(half.target, half.draft, batch)
    scores = score_positions(
        half.target, half.draft, half.target_params, rounded, *kept, fill=half.draft.n_stages
    )
    want = float(mean_metrics(count_scores(scores))[0])
    state, metrics = train_step(state, half.target_params, batch)
    assert float(metrics["loss"]) == pytest.approx(want, rel=1e-3)
    kinds = {leaf.dtype for leaf in leaves((state.params, state.opt_state, state.average))}
    assert kinds == {np.dtype(np.float32), np.dtype(np.int32)}
    n_moved = n_hidden = 0
    for a, b in zip(leaves(before), leaves(state.params), strict=True):
        n_moved += np.sum(a != b)
        n_hidden += np.sum((a != b) & (a.astype(jnp.bfloat16) == b.astype(jnp.bfloat16)))
    assert n_hidden > 0.9 * n_moved > 0


def test_the_average_weighs_updates_by_the_decay(small, corpus):
    decay = 0.7
    config = dataclasses.replace(CONFIG, ema=decay)
    state, train_step = make_parts(small, average=make_average(config))
    start = leaves(state.params)
    for a, b in zip(leaves(read_average(state.params, state.average, decay)), start, strict=True):
        np.testing.assert_array_equal(a, b)  # before the first update
    batch, seen = taught(small, corpus, corpus.rows[:4]), []
    for _ in range(4):
        state, _ = train_step(state, small.target_params, batch)
        seen.append(leaves(jax.tree.map(jnp.copy, state.params)))
    got = leaves(read_average(state.params, state.average, decay))
    weights = decay ** np.arange(3, -1, -1.0)
    for leaf, *each in zip(got, *seen, strict=True):
        np.testing.assert_allclose(
            leaf, np.average(each, axis=0, weights=weights), rtol=1e-5, atol=1e-6
        )
    assert make_average(CONFIG) is None


def test_weight_decay_reaches_the_head_only_if_asked():
    params = {"lm_head": {"weight": np.ones((2, 2))}, "projs": [{"weight": np.ones((2, 2))}]}
    params["layers"] = [{"norm": {"weight": np.ones(2)}}]
    for head in (True, False):
        got = decayed(params, head)
        assert got["lm_head"]["weight"] is head
        assert got["projs"][0]["weight"] and not got["layers"][0]["norm"]["weight"]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_learning_rate_falls_to_its_floor(schedule):
    config = TrainConfig(lr=2.0, warmup_steps=4, schedule=schedule, lr_final=0.25)
    rates = [float(learning_rate(config, 24)(i)) for i in range(30)]
    assert max(rates) == 2.0 and min(rates[4:]) == pytest.approx(0.5)
    assert rates[24:] == pytest.approx([0.5] * 6)


def test_adamw_takes_its_settings():
    config = TrainConfig(b1=0.5, b2=0.75, eps=1.0, warmup_steps=0, clip_norm=1e9)
    optimizer, params = make_optimizer(config, lambda _: 1.0), {"w": np.zeros(1, np.float32)}
    gradient = {"w": np.full(1, 3.0, np.float32)}
    updates, state = optimizer.update(gradient, optimizer.init(params), params)
    np.testing.assert_allclose(updates["w"], -3 / (3 + 1.0))  # unbiased moments, eps beside
    np.testing.assert_allclose(optax.tree.get(state, "mu")["w"], 1.5)
    np.testing.assert_allclose(optax.tree.get(state, "nu")["w"], 9 / 4)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_learning_rate_rises_then_falls_to_zero(schedule):
    config = TrainConfig(lr=1.0, warmup_steps=4, schedule=schedule)
    rates = [float(learning_rate(config, 24)(i)) for i in range(25)]
    np.testing.assert_allclose(rates[:5], [0.25, 0.5, 0.75, 1.0, 1.0], rtol=1e-6)
    assert all(a > b for a, b in zip(rates[4:], rates[5:], strict=False))
    assert rates[14] == pytest.approx(0.5) and rates[24] == pytest.approx(0, abs=1e-6)


def test_the_first_learning_rate_moves_and_short_runs_warm_up_less():
    for warmup in (0, 1, 50):
        config = TrainConfig(lr=1.0, warmup_steps=warmup)
        rates = [float(learning_rate(config, 6)(i)) for i in range(6)]
        assert rates[0] > 0 and max(rates) == 1.0


def test_weight_decay_leaves_norms_alone_and_gradients_are_clipped():
    config = TrainConfig(lr=1.0, warmup_steps=0, weight_decay=0.5, clip_norm=1e-3)
    optimizer = make_optimizer(config, lambda _: 1.0)
    params = {"matrix": np.ones((2, 2), np.float32), "norm": np.ones(2, np.float32)}
    zeros = jax.tree.map(np.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    np.testing.assert_allclose(updates["matrix"], -0.5)
    np.testing.assert_allclose(updates["norm"], 0.0)
    large = jax.tree.map(lambda leaf: 100 * leaf, params)
    _, state = optimizer.update(large, optimizer.init(params), params)
    mean = optax.tree.get(state, "mu")  # a tenth of the first gradient, as Adam saw it
    assert float(optax.tree.norm(mean)) == pytest.approx(0.1 * config.clip_norm, rel=1e-5)
