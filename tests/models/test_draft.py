"""The draft module: training sees what decoding sees; where it starts; which pairs are refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spd_jax.checks import ConfigError
from spd_jax.config import DraftConfig, PipelineConfig
from spd_jax.models import distill
from spd_jax.models import draft as pdm
from spd_jax.models import target as model
from spd_jax.models.aggregate import make_row, normalise

N_TOKENS = 9
UNEVEN = (1, 2, 1, 2)
ONE_LAYER = {
    "a type for two depths": DraftConfig((0, 3, 6), n_stages=3, n_layers=1),
    "one type": DraftConfig((0,), n_stages=2, n_layers=1),
    "a type per depth": DraftConfig((0, 2, 4, 6), n_stages=3, n_layers=1, feature_norm="none"),
    "uneven stages": DraftConfig((0, 2, 5), n_stages=4, n_layers=1, stage_layers=UNEVEN),
    "a stage per layer": DraftConfig((0, 1, 4, 6), n_stages=6, n_layers=1, qk_norm=True),
}
TYPE_PER_DEPTH = {
    "two layers": DraftConfig((0, 2, 4, 6), n_stages=3, n_layers=2),
    "three layers": DraftConfig((0, 3, 6), n_stages=2, n_layers=3, d_ff=40),
    "uneven stages": DraftConfig(
        (0, 1, 3, 4, 6), n_stages=4, stage_layers=UNEVEN, qk_norm=True, feature_norm="none"
    ),
}
EXACT = [*ONE_LAYER.items(), *TYPE_PER_DEPTH.items()]


@pytest.fixture(scope="module")
def target(make_target):
    return make_target()


@pytest.fixture(scope="module")
def hidden(target):
    ids = np.random.default_rng(0).integers(0, 64, (1, N_TOKENS))
    return model.hidden_states(target.config, target.params, ids)


@pytest.fixture(scope="module")
def make_params(target):
    """DraftConfig -> random parameters, large enough that every row matters."""

    def make(draft: DraftConfig) -> dict:
        rng = np.random.default_rng(1)
        params = pdm.init_params(target.config, draft, target.params, jax.random.key(0))

        def draw(leaf):
            noise = rng.standard_normal(leaf.shape).astype(np.float32)
            return 1 + 0.2 * noise if leaf.ndim == 1 else noise * leaf.shape[1] ** -0.5

        return jax.tree.map(draw, params)

    return make


def decoded(naive, target, draft, params, hidden, newest: int, fill: int) -> np.ndarray:
    """The PDM's output [D] in a decode cycle: `fill` tokens in flight, `newest` a position.

    Rows in flight have the type of their depth; those before them are complete and permanent.
    """
    stages = PipelineConfig(target.config.n_layers, draft.n_stages, draft.stage_layers)
    type_at, rows = stages.row_types(draft.anchors), []
    for position in range(newest + 1):
        depth = newest - position
        row_type = type_at[depth] if depth < fill else len(draft.anchors) - 1
        anchors = [np.asarray(hidden[b][0, position], float) for b in draft.anchors[: row_type + 1]]
        if draft.feature_norm == "rms":
            anchors = [naive.norm(h, 1.0, target.config.norm_eps) for h in anchors]
        rows.append(params["projs"][row_type]["weight"] @ np.concatenate(anchors))
    config = pdm.layer_config(target.config, draft)
    mask = np.tril(np.ones((newest + 1, newest + 1), bool))
    positions = np.arange(newest + 1)
    return naive.layers(config, params["layers"], np.array(rows), positions, mask)[-1][-1]


def worst_difference(naive, target, hidden, draft, params, mode="exact") -> dict[int, float]:
    """fill -> largest difference of training and decoding over positions and features."""
    everywhere, worst = jnp.ones((1, N_TOKENS), bool), {}
    args = (target.config, draft, params, hidden, everywhere)
    trained = jax.jit(lambda fill: distill.draft_outputs(*args, fill, mode)[0], static_argnums=0)
    for fill in range(1, draft.n_stages + 1):
        want = [
            decoded(naive, target, draft, params, hidden, newest, fill)
            for newest in range(N_TOKENS)
        ]
        worst[fill] = float(np.abs(trained(fill) - np.array(want)).max())
    return worst


@pytest.mark.parametrize("draft", [d for _, d in EXACT], ids=[name for name, _ in EXACT])
def test_training_sees_what_decoding_sees_at_every_fill(naive, target, hidden, make_params, draft):
    worst = worst_difference(naive, target, hidden, draft, make_params(draft))
    assert max(worst.values()) < 1e-4, worst


def test_the_published_mask_differs_from_decoding_below_full_fill(
    naive, target, hidden, make_params
):
    draft = TYPE_PER_DEPTH["two layers"]
    worst = worst_difference(naive, target, hidden, draft, make_params(draft), "reference")
    assert worst[3] < 1e-4 and worst[2] > 1e-2, worst


def test_two_layers_with_fewer_types_differ_from_decoding(naive, target, hidden, make_params):
    draft = DraftConfig((0, 3, 6), n_stages=3, n_layers=2)
    worst = worst_difference(naive, target, hidden, draft, make_params(draft))
    assert worst[3] > 1e-3, worst


def test_padding_changes_nothing(target, make_params):
    draft = TYPE_PER_DEPTH["two layers"]
    params = make_params(draft)
    ids = np.random.default_rng(2).integers(0, 64, (2, N_TOKENS))
    lengths = [N_TOKENS, 6]
    valid_mask = jnp.arange(N_TOKENS) < jnp.array(lengths)[:, None]

    def outputs(ids, valid_mask):
        hidden = model.hidden_states(target.config, target.params, ids)
        args = (target.config, draft, params, hidden, valid_mask)
        return distill.draft_outputs(*args, 2, "exact")

    together = outputs(ids, valid_mask)
    assert np.isfinite(together).all()
    for b, n in enumerate(lengths):
        alone = outputs(ids[b : b + 1, :n], jnp.ones((1, n), bool))
        np.testing.assert_allclose(together[b, :n], alone[0], rtol=1e-5, atol=1e-5)


def test_a_masked_token_is_never_seen(target, hidden, make_params):
    draft = TYPE_PER_DEPTH["two layers"]
    params, mask = make_params(draft), np.ones((1, N_TOKENS), bool)

    def outputs(hidden):
        args = (target.config, draft, params, hidden, jnp.asarray(mask))
        return np.asarray(distill.draft_outputs(*args, 2, "exact"))[0]

    changed = [h.at[:, 3].multiply(-1) for h in hidden]
    assert np.abs(outputs(changed) - outputs(hidden))[4:].max() > 1e-2
    mask[0, 3] = False
    kept = [0, 1, 2, *range(4, N_TOKENS)]
    np.testing.assert_array_equal(outputs(changed)[kept], outputs(hidden)[kept])


def test_a_traced_fill_computes_every_row_type_and_the_same(target, hidden, make_params):
    draft = TYPE_PER_DEPTH["two layers"]
    everywhere = jnp.ones((1, N_TOKENS), bool)
    args = (target.config, draft, make_params(draft), hidden, everywhere)
    traced = jax.jit(lambda fill: distill.draft_outputs(*args, fill, "exact"))
    for fill in (1, 2, 3):
        np.testing.assert_allclose(
            traced(fill), distill.draft_outputs(*args, fill, "exact"), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize(
    ("draft", "mode"),
    [
        (ONE_LAYER["one type"], "exact"),
        (ONE_LAYER["a type for two depths"], "reference"),
        (ONE_LAYER["a stage per layer"], "exact"),
        (TYPE_PER_DEPTH["two layers"], "reference"),
        (TYPE_PER_DEPTH["uneven stages"], "exact"),
    ],
    ids=str,
)
def test_attention_by_depth_is_that_under_the_mask(target, make_params, draft, mode):
    """At every fill, static and traced, packed and padded, with and without rematerialisation."""
    params = make_params(draft)
    hidden = model.hidden_states(target.config, target.params, np.arange(2 * 17).reshape(2, 17))
    segments = jnp.asarray([[1] * 17, [1] * 4 + [2] + [3] * 10 + [0] * 2])
    args = (target.config, draft)

    def run(params, fill, **options):
        out = distill.draft_outputs(*args, params, hidden, segments, fill, mode, **options)
        out = jnp.where(segments[..., None] > 0, out, 0)
        return jnp.sum(jnp.sin(out)), out

    grad = jax.jit(
        jax.grad(run, has_aux=True), static_argnums=1, static_argnames=("dense", "remat")
    )
    traced = jax.jit(lambda fill: run(params, fill)[1])
    for fill in range(1, draft.n_stages + 1):
        want = grad(params, fill, dense=True)
        same = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)
        jax.tree.map(same, grad(params, fill), want)
        same(traced(fill), want[1])
    jax.tree.map(same, grad(params, fill, remat=True), want)


@pytest.mark.parametrize("fill", [0, 4, -1, np.int64(0), jnp.int32(9)])
def test_an_impossible_fill_is_refused(target, hidden, make_params, fill):
    draft = TYPE_PER_DEPTH["two layers"]
    args = (target.config, draft, make_params(draft), hidden, jnp.ones((1, N_TOKENS), bool))
    with pytest.raises(ConfigError, match=f"from 1 to n_stages 3, got {int(fill)}"):
        distill.draft_outputs(*args, fill, "exact")


def assert_equal(a, b) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_layers_begin_as_copies_of_the_targets_last(target):
    draft = DraftConfig((0, 6), n_stages=2, n_layers=2)
    params = pdm.init_params(target.config, draft, target.params, jax.random.key(0))
    assert_equal(params["layers"], target.params["layers"][-2:])
    ours = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)}
    theirs = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(target.params)}
    assert not ours & theirs  # a trainer may donate its own


def test_what_does_not_fit_begins_anew(target):
    draft = DraftConfig((0, 6), n_stages=2, n_layers=1, d_ff=40, qk_norm=True)
    (layer,) = pdm.init_params(target.config, draft, target.params, jax.random.key(0))["layers"]
    source = target.params["layers"][-1]
    for name in ("qkv", "o"):
        assert_equal(layer["attn"][name], source["attn"][name])
    assert_equal(
        [layer["mixer_norm"], layer["mlp_norm"]], [source["mixer_norm"], source["mlp_norm"]]
    )
    np.testing.assert_array_equal(layer["attn"]["q_norm"]["weight"], np.ones(8))
    assert layer["mlp"]["gate_up"]["weight"].shape == (80, 32)
    assert layer["mlp"]["down"]["weight"].shape == (32, 40)


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_begins_as_the_targets_rows(config, make_target, tied):
    target = make_target(dataclasses.replace(config, tied_embeddings=tied))
    rows = target.params["embed" if tied else "lm_head"]["weight"]
    for ids in (None, (0, 5, 63)):
        draft = DraftConfig((0, 6), n_stages=2, n_layers=1, draft_ids=ids)
        params = pdm.init_params(target.config, draft, target.params, jax.random.key(0))
        want = rows if ids is None else rows[np.array(ids)]
        np.testing.assert_array_equal(params["lm_head"]["weight"], want)
        frozen = dataclasses.replace(draft, head="target")
        params = pdm.init_params(target.config, frozen, target.params, jax.random.key(0))
        assert params.keys() == {"projs", "layers"}
        np.testing.assert_array_equal(pdm.head_weight(frozen, params, target.params), want)


@pytest.mark.parametrize("feature_norm", ["rms", "none"])
def test_a_row_begins_near_its_deepest_anchor(target, hidden, feature_norm):
    draft = DraftConfig((0, 2, 4, 6), n_stages=3, n_layers=2, feature_norm=feature_norm)
    params = pdm.init_params(target.config, draft, target.params, jax.random.key(0))
    anchors = jnp.stack([hidden[b][0] for b in draft.anchors], axis=1)  # [T, M, D]
    features = normalise(draft, anchors, target.config.norm_eps)
    for i in range(4):
        row, own = make_row(params["projs"], features, i), anchors[:, i]
        lengths = jnp.linalg.norm(row, axis=-1), jnp.linalg.norm(own, axis=-1)
        assert (jnp.sum(row * own, axis=-1) / (lengths[0] * lengths[1]) > 0.9).all()
        assert 0.6 < jnp.median(lengths[0] / lengths[1]) < 1.6  # one scale for all tokens
        assert (row != own).any()  # noise, so that equal rows do not learn alike


@pytest.mark.parametrize("fill", [1, 2, 3])
def test_a_grown_draft_begins_as_the_smaller_one(target, hidden, make_params, fill):
    small = DraftConfig((0, 2, 4, 6), n_stages=3, n_layers=1, draft_ids=(3, 5, 9, 60))
    large = dataclasses.replace(small, n_layers=3, draft_ids=(5, 60))
    trained = make_params(small)
    fresh = pdm.init_params(target.config, large, target.params, jax.random.key(0))
    grown = pdm.grow_params(target.config, large, fresh, target.params, small, trained)
    everywhere = jnp.ones((1, N_TOKENS), bool)
    args = (hidden, everywhere, fill, "exact")
    want = distill.draft_outputs(target.config, small, trained, *args)
    got = distill.draft_outputs(target.config, large, grown, *args)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    head, old = grown["lm_head"]["weight"], trained["lm_head"]["weight"]
    np.testing.assert_array_equal(head, old[jnp.array([1, 3])])  # ids 5 and 60


def test_a_draft_of_another_kind_cannot_be_grown_from(target):
    small = DraftConfig((0, 2, 4, 6), n_stages=3, n_layers=2, draft_ids=(3, 5, 9, 60))
    for change, line in [
        ({"draft_ids": (3, 8)}, "among the 4 of .*, 1 of 2 are not; set .* to at most 4"),
        ({"draft_ids": None}, "among the 4 of .*, 60 of 64 are not"),
        ({"anchors": (0, 3, 6)}, r"anchors must be .* \(0, 2, 4, 6\), got \(0, 3, 6\)"),
        ({"head": "target"}, "head must be .* own, got target"),
        ({"n_layers": 1}, "n_layers must be at least 2, .* got 1"),
    ]:
        large = dataclasses.replace(small, **change)
        with pytest.raises(ConfigError, match=line):
            pdm.check_grows(target.config, large, small)


def test_a_head_for_another_target_is_refused(config):
    pdm.check_pair(config, DraftConfig((0, 6), n_stages=2, draft_ids=(1, 63)))
    with pytest.raises(ConfigError, match="must not exceed the target's 6 layers, got 7"):
        pdm.check_pair(config, DraftConfig((0, 7), n_stages=2))
    with pytest.raises(ConfigError, match="below the target's vocab_size 64, got 64"):
        pdm.check_pair(config, DraftConfig((0, 6), n_stages=2, draft_ids=(1, 64)))
    with pytest.raises(ConfigError, match="must not exceed the target's 6, got 7"):
        pdm.check_pair(config, DraftConfig((0, 6), n_stages=2, n_layers=7))
