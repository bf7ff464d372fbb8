"""The public functions: pairs that do not belong together, gradients, tracing."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spd_jax
from spd_jax.checks import ConfigError
from spd_jax.program import Program
from spd_jax.weights.heads import save_head
from tests.random_models import full_config, make_draft, make_target

BATCH = {
    "input_ids": jnp.arange(12).reshape(2, 6),
    "attention_mask": jnp.ones((2, 6), jnp.int32),
    "labels": jnp.arange(12).reshape(2, 6),
}


@pytest.fixture(scope="module")
def pair():
    target = make_target()
    return target, make_draft(target, full_config(4, 2), "random")


def test_gradients_reach_the_draft_and_not_the_target(pair):
    target, draft = pair
    loss = lambda t, d: spd_jax.pdm_loss(t, d, BATCH, fill=2)[0]  # noqa: E731
    for_target, for_draft = jax.jit(jax.grad(loss, argnums=(0, 1)))(target, draft)
    assert isinstance(for_draft, spd_jax.Draft) and isinstance(for_target, spd_jax.Target)
    assert all(float(jnp.abs(g).max()) == 0 for g in jax.tree.leaves(for_target.params))
    assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(for_draft.params["projs"][0]))


def test_both_pass_through_jit(pair):
    target, draft = pair
    same_target, same_draft = jax.jit(lambda *both: both)(target, draft)
    assert same_target.config == target.config and same_draft.config == draft.config
    jax.tree.map(np.testing.assert_array_equal, same_target.params, target.params)


def test_host_loops_refuse_to_be_traced(pair):
    target, draft = pair
    for call in (lambda t: spd_jax.generate(t, [1]), lambda t: spd_jax.decode(t, draft, [1])):
        with pytest.raises(ConfigError, match="cannot be traced"):
            jax.jit(lambda t, call=call: call(t).tokens)(target)


def test_target_logits_scores_every_position(pair):
    target, _ = pair
    logits, hidden = spd_jax.target_logits(target, [1, 2, 3], hidden_states=True)
    assert logits.shape == (3, 97) and hidden.shape == (5, 3, 32)
    assert logits.dtype == jnp.float32
    np.testing.assert_array_equal(spd_jax.target_logits(target, [1, 2, 3]), logits)
    np.testing.assert_array_equal(hidden[0], target.params["embed"]["weight"][jnp.arange(1, 4)])
    with pytest.raises(ConfigError, match="from 0 to 96"):
        spd_jax.target_logits(target, [1, 97])
    with pytest.raises(ConfigError, match="at most 1024"):
        spd_jax.target_logits(target, [1] * 1025)


def test_predictions_for_several_fills_are_those_of_each(pair):
    target, draft = pair
    ids = list(range(10, 18))
    many = spd_jax.draft_predictions(target, draft, ids, fill=[1, 2])
    assert many.shape == (2, 8)
    for row, fill in zip(many, (1, 2), strict=True):
        alone = spd_jax.draft_predictions(target, draft, ids, fill=fill)
        np.testing.assert_array_equal(row, alone)
    with pytest.raises(ConfigError, match="from 1 to n_stages 2, got 3"):
        spd_jax.draft_predictions(target, draft, ids, fill=3)
    assert spd_jax.draft_predictions(target, draft, ids, fill=3, n_stages=4).shape == (8,)


def test_scores_of_what_cannot_be_are_errors(pair):
    bad = {**BATCH, "labels": np.full_like(BATCH["labels"], 10**6)}
    with pytest.raises(ConfigError, match="labels: token ids .* got 1000000"):
        spd_jax.pdm_loss(*pair, bad, fill=1)
    for changes, words in [
        ({"labels": np.zeros((2, 5), int)}, r"one shape \[B, T\], got .*labels \(2, 5\)"),
        ({name: value[0] for name, value in BATCH.items()}, r"got input_ids \(6,\)"),
        ({name: np.zeros((1, 5000), int) for name in BATCH}, "at most .* got 5000; cut them"),
    ]:
        with pytest.raises(ConfigError, match=words):
            spd_jax.pdm_loss(*pair, {**BATCH, **changes}, fill=1)
    del bad["labels"]
    with pytest.raises(ConfigError, match="labels none"):
        spd_jax.pdm_loss(*pair, bad, fill=1)
    for fill in (2.0, True):
        with pytest.raises(ConfigError, match="each of fill must be an integer"):
            spd_jax.pdm_loss(*pair, BATCH, fill=fill)
    for temperature in (0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="temperature must be a number above 0"):
            spd_jax.pdm_loss(*pair, BATCH, fill=1, temperature=temperature)
    with pytest.raises(ConfigError, match="got an empty one"):
        spd_jax.draft_predictions(*pair, [1, 2], fill=[])


def test_a_fill_beyond_the_stages_is_an_error(pair):
    with pytest.raises(ConfigError, match="fill must be from 1 to n_stages 2, got 0"):
        spd_jax.pdm_loss(*pair, BATCH, fill=0)
    with pytest.raises(ConfigError, match="mask_mode"):
        spd_jax.pdm_loss(*pair, BATCH, fill=1, mask_mode="roughly")


def with_config(draft, **changes):
    return dataclasses.replace(draft, config=dataclasses.replace(draft.config, **changes))


def test_a_draft_of_another_target_is_refused(pair):
    target, draft = pair
    known = dataclasses.replace(target, sha256="a" * 64)
    own, foreign = (with_config(draft, target_sha256=c * 64) for c in "ab")
    decode = lambda d: spd_jax.decode(known, d, [1], max_new_tokens=1, mesh="virtual")  # noqa: E731
    assert decode(own).cycles == 0
    with pytest.raises(ConfigError, match="sha256 bbbbbbbbbbbb"):
        decode(foreign)
    with pytest.raises(ConfigError, match="sha256"):
        spd_jax.pdm_loss(known, foreign, BATCH, fill=1)
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), draft)
    with pytest.raises(ConfigError, match="expected width 32 in float32"):
        decode(narrow)
    with pytest.raises(ConfigError, match="anchors must not exceed"):
        decode(with_config(draft, anchors=(0, 9)))
    rows = draft.params["lm_head"]["weight"]
    wide = draft.params | {"lm_head": {"weight": jnp.concatenate([rows, rows[:3]])}}
    with pytest.raises(ConfigError, match=f"a head of {len(rows)} ids, got one of"):
        decode(dataclasses.replace(draft, params=wide))


def test_a_saved_head_loads_for_its_own_target_only(pair, tmp_path):
    target, draft = pair
    known = dataclasses.replace(target, sha256="a" * 64)
    config = dataclasses.replace(draft.config, target_sha256="a" * 64)
    save_head(tmp_path / "head", config, target.config, jax.device_get(draft.params), "card")
    loaded = spd_jax.load_draft(tmp_path / "head", known)
    assert loaded.config == config
    with pytest.raises(ConfigError, match="sha256"):
        spd_jax.load_draft(tmp_path / "head", dataclasses.replace(target, sha256="c" * 64))
    with pytest.raises(ConfigError, match="n_layers 4"):
        spd_jax.load_draft(tmp_path / "head", make_target(8))
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="notes.txt' is no draft head; give a directory"):
        spd_jax.load_draft(tmp_path / "notes.txt", target)
    with pytest.raises(ConfigError, match="is not there"):
        spd_jax.load_draft(tmp_path / "nothing", known)


@pytest.fixture(scope="module")
def v10_pair(golden):
    target = spd_jax.load_target(golden / "qwen3" / "target")
    return target, spd_jax.load_draft(golden / "qwen3" / "v10_n4" / "head.safetensors", target)


def test_a_v10_head_is_scored(golden, v10_pair):
    want = np.load(golden / "qwen3" / "v10_n4" / "train_forward.npz")
    batch = {name: want[name] for name in BATCH}
    for fill, loss in zip(want["fills"], want["loss"], strict=True):
        got, _ = spd_jax.pdm_loss(*v10_pair, batch, fill=fill)
        np.testing.assert_allclose(got, loss, rtol=0, atol=1e-4)


def test_a_v10_head_does_nothing_but_score(v10_pair, monkeypatch):
    target, draft = v10_pair

    def compile_nothing(*args, **kwargs):
        raise AssertionError("compiled")

    monkeypatch.setattr(Program, "compile", compile_nothing)
    for use in (
        lambda: spd_jax.decode(target, draft, [1, 2, 3]),
        lambda: spd_jax.decode(target, draft, [1, 2, 3], n_stages=2, mesh="virtual"),
        lambda: spd_jax.draft_predictions(target, draft, [1, 2, 3], fill=1),
        lambda: spd_jax.init_draft(target, draft.config, jax.random.key(0)),
    ):
        with pytest.raises(
            ConfigError, match="a v10 head .* use a v11 head, or train one"
        ) as error:
            use()
        assert "\n" not in str(error.value)


def test_a_v10_head_of_a_deeper_target_is_refused(golden, v10_pair, tmp_path):
    target, draft = v10_pair
    shutil.copytree(golden / "qwen3" / "v10_n4", tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "head_config.json").read_text())
    config["shallow_hidden_layer_indices"][0][-1] = target.config.n_layers + 1
    (tmp_path / "head_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="anchors must not exceed the target's 8 layers, got 9"):
        spd_jax.load_draft(tmp_path / "head.safetensors", target)
    with pytest.raises(ConfigError, match="made for a target with"):
        spd_jax.load_draft(golden / "qwen3" / "v10_n4", make_target(8))


def test_no_head_is_shipped_for_an_unknown_target(pair):
    with pytest.raises(ConfigError, match="no draft head is shipped for random target"):
        spd_jax.load_draft(None, pair[0])


def test_rows_whose_texts_cannot_be_kept_apart_are_refused(golden, pair, v10_pair):
    hybrid = spd_jax.load_target(golden / "qwen3_5" / "target")
    gated = hybrid, spd_jax.load_draft(golden / "qwen3_5" / "n2", hybrid)
    ids = np.arange(12).reshape(2, 6)
    packed, padded_left, padded_right = (
        {"input_ids": ids, "labels": ids, "attention_mask": np.array([row, [1] * 6])}
        for row in ([1, 1, 1, 2, 2, 0], [0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0])
    )
    for refused in (gated, v10_pair):
        with pytest.raises(ConfigError, match="several texts in a row, and .* give each text a"):
            spd_jax.pdm_loss(*refused, packed, fill=1)
    with pytest.raises(ConfigError, match="padding before tokens, .* pad rows on the right"):
        spd_jax.pdm_loss(*gated, padded_left, fill=1)
    n_valid = [
        spd_jax.pdm_loss(*one, batch, fill=1)[1]["n_valid"]
        for one, batch in [(pair, packed), (pair, padded_left), (gated, padded_right)]
    ]
    assert min(n_valid) > 0


@pytest.mark.parametrize("loss", [None, "kl"])
def test_a_loss_is_a_loss_config(pair, loss):
    batch = dict.fromkeys(("input_ids", "labels", "attention_mask"), np.ones((1, 4), int))
    with pytest.raises(ConfigError, match="loss must be a LossConfig"):
        spd_jax.pdm_loss(*pair, batch, fill=1, loss=loss)
