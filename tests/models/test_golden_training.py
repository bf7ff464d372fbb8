"""The training forward of golden reference heads: masks, rows, outputs, losses, gradients."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spd_jax.config import AnyDraftConfig, PipelineConfig, V10DraftConfig
from spd_jax.models import distill, draft_v10, visibility
from spd_jax.models import draft as pdm
from spd_jax.models import target as model
from spd_jax.models.aggregate import replicate_sequence
from spd_jax.models.bundle import Target
from spd_jax.weights import keymaps, load_draft_file
from spd_jax.weights.leaves import Sizes, write_leaves

NEAR = {"rtol": 0, "atol": 1e-4}
HEADS = [f"{family}/n{n}" for family in ("llama", "qwen3", "qwen3_5") for n in (2, 4, 8)]
HEADS += ["qwen3/n4_draft_vocab192", "qwen3/n4_default_bound"]
V10_HEADS = ["qwen3/v10_n4"]
of_v10 = pytest.mark.parametrize("case", V10_HEADS, indirect=True)
of_v11 = pytest.mark.parametrize("case", HEADS, indirect=True)


@dataclasses.dataclass(frozen=True)
class Case:
    """One golden head beside its target, its batch and the numbers to reproduce."""

    target: Target
    draft: AnyDraftConfig
    params: dict
    want: Any  # train_forward.npz

    @property
    def fills(self) -> list[int]:
        return self.want["fills"].tolist()

    @property
    def batch(self) -> dict[str, jax.Array]:
        names = ("input_ids", "attention_mask", "labels")
        return {name: jnp.asarray(self.want[name]) for name in names}

    @property
    def valid_mask(self) -> np.ndarray:
        return self.want["attention_mask"] > 0

    @functools.cached_property
    def hidden(self) -> list[jax.Array]:
        ids = self.batch["input_ids"]
        return model.hidden_states(self.target.config, self.target.params, ids)

    @functools.cached_property
    def outputs(self):
        """fill -> draft outputs [B, T, D] before the norm, compiled once."""
        args = (self.target.config, self.draft, self.params, self.hidden)
        valid_mask = jnp.asarray(self.valid_mask)
        return jax.jit(lambda fill: distill.draft_outputs(*args, valid_mask, fill, "reference"))

    @functools.cached_property
    def loss(self):
        """(draft params, fill, temperature) -> (loss, metrics), compiled once."""

        def loss(params, fill, temperature):
            args = (self.target.config, self.draft, self.target.params, params, self.batch)
            options = {"temperature": temperature, "mask_mode": "reference"}
            return distill.distillation_loss(*args, fill=fill, **options)

        return jax.jit(loss)

    @functools.cached_property
    def grad(self):
        """(draft params, fill) -> gradient of the loss at temperature 1, compiled once."""
        return jax.jit(jax.grad(lambda params, fill: self.loss(params, fill, 1.0)[0]))

    def named(self, tree: dict) -> dict[str, np.ndarray]:
        """Splits a draft's tree into the reference's parameter names."""
        is_v10 = isinstance(self.draft, V10DraftConfig)
        config = (draft_v10 if is_v10 else pdm).layer_config(self.target.config, self.draft)
        sizes = keymaps.target_sizes(config) | {"W": tree["lm_head"]["weight"].shape[0]}
        if is_v10:
            return dict(name_v10(tree, sizes))
        names = (keymaps.REFERENCE_PROJ, keymaps.REFERENCE_LAYER_PREFIX)
        return dict(keymaps.write_draft(self.draft, tree, *names, sizes))


def name_v10(tree: dict, sizes: Sizes) -> Iterator[tuple[str, np.ndarray]]:
    """Names the arrays of a version 10 head."""
    *stages, newest = tree["projs"]
    named = {f"stage_projs.{i}": node for i, node in enumerate(stages)} | {"g0_proj": newest}
    for layer, nodes in enumerate(tree["memory"]):
        named |= {f"fixed_stage_per_layer_projs.{layer}.{i}": n for i, n in enumerate(nodes)}
    named["lm_head"] = tree["lm_head"]
    yield from ((f"{name}.weight", np.asarray(node["weight"])) for name, node in named.items())
    for i, layer in enumerate(tree["layers"]):
        leaves = keymaps.dense_leaves(qk_norm=True)
        yield from write_leaves(layer, leaves, f"spec_layers.{i}.", sizes)


@pytest.fixture(scope="module", params=HEADS + V10_HEADS)
def case(request, golden, golden_target) -> Case:
    folder = golden / request.param
    target = golden_target(folder.parent.name)
    draft, params, _ = load_draft_file(folder)
    pdm.check_pair(target.config, draft)
    params = jax.tree.map(jnp.asarray, params)
    want = np.load(folder / "train_forward.npz")
    assert f"n{draft.n_stages}" in folder.name.split("_")
    assert isinstance(draft, V10DraftConfig) == (request.param in V10_HEADS)
    assert want["fills"].tolist() == list(range(1, draft.n_stages + 1))
    return Case(target, draft, params, want)


@of_v11
def test_depths_and_types_are_the_references(case):
    pipeline = PipelineConfig(case.target.config.n_layers, case.draft.n_stages)
    anchors = case.draft.anchors
    assert anchors == tuple(case.want["aggr_feature_bound"])
    assert pipeline.row_types(anchors) == tuple(case.want["stage_depth_to_aggr_idx"])
    assert pipeline.min_depths(anchors) == tuple(case.want["aggr_to_min_depth"])


@of_v11
def test_structural_masks_are_exactly_the_references(case):
    pipeline = PipelineConfig(case.target.config.n_layers, case.draft.n_stages)
    n_tokens = case.valid_mask.shape[1]
    for fill in case.fills:
        mask = visibility.structural_mask(pipeline, case.draft.anchors, n_tokens, fill, "reference")
        np.testing.assert_array_equal(mask, case.want[f"structural_mask_fill{fill}"])


@of_v11
def test_teacher_states_are_the_references(case):
    valid = case.valid_mask
    for index in case.draft.anchors:
        want = case.want[f"teacher_hs_{index}"]
        np.testing.assert_allclose(case.hidden[index][valid], want[valid], **NEAR)


@of_v11
def test_fused_rows_are_the_references(case):
    features = jnp.stack([case.hidden[b] for b in case.draft.anchors], axis=2)
    rows = replicate_sequence(
        case.params["projs"], features, visibility.all_blocks(case.draft.anchors)
    )
    valid = np.tile(case.valid_mask, (1, len(case.draft.anchors)))
    np.testing.assert_allclose(rows[valid], case.want["spec_hidden"][valid], **NEAR)


@of_v10
def test_depth_masks_are_exactly_the_references(case):
    mask = draft_v10.depth_mask(case.draft.n_stages, jnp.asarray(case.valid_mask))
    for fill in case.fills:
        np.testing.assert_array_equal(mask, case.want[f"full_mask_fill{fill}"])


@of_v10
def test_memory_rows_of_the_last_layer_are_the_references(case):
    """The reference projects in place, so that its rows are recorded as the last layer has them."""
    valid = np.tile(case.valid_mask, (1, case.draft.n_stages + 1))
    stored = [fill for fill in case.fills if f"spec_hidden_fill{fill}" in case.want]
    assert {1, case.draft.n_stages} <= set(stored)
    for fill in stored:
        rows = draft_v10.replicate_sequence(case.draft, case.params["projs"], case.hidden, fill)
        *memory, newest = rows
        for projs in case.params["memory"]:
            memory = draft_v10.project_memory(memory, projs)
        got, want = jnp.concatenate([*memory, newest], 1), case.want[f"spec_hidden_fill{fill}"]
        np.testing.assert_allclose(got[valid], want[valid], err_msg=f"fill {fill}", **NEAR)


def test_outputs_norms_and_logits_are_the_references(case):
    config, valid, params = case.target.config, case.valid_mask, case.params
    stored = [fill for fill in case.fills if f"g0_fill{fill}" in case.want]
    assert {1, case.draft.n_stages} <= set(stored)
    for fill in stored:
        out = case.outputs(fill)
        got = {
            f"g0_fill{fill}": out,
            f"g0_normed_fill{fill}": model.normed(config, case.target.params, out),
            f"spec_logits_fill{fill}": pdm.logits(
                config, case.draft, params, case.target.params, out
            ),
        }
        for name in got.keys() & set(case.want):
            want = case.want[name]
            np.testing.assert_allclose(got[name][valid], want[valid], err_msg=name, **NEAR)


def test_losses_and_accuracies_are_the_references(case):
    for i, fill in enumerate(case.fills):
        loss, metrics = case.loss(case.params, fill, 1.0)
        loss_2, _ = case.loss(case.params, fill, 2.0)
        got = [loss, loss_2, metrics["accuracy"]]
        want = [case.want[name][i] for name in ("loss", "loss_temperature2", "acc")]
        np.testing.assert_allclose(got, want, err_msg=f"fill {fill}", **NEAR)


def test_gradient_norms_are_the_references(case):
    names = case.want["param_names"].tolist()
    n_zeros = 0
    for fill, want in zip(case.fills, case.want["grad_norms"], strict=True):
        grads = case.named(case.grad(case.params, fill))
        assert sorted(grads) == sorted(names)
        got = np.array([np.linalg.norm(grads[name].astype(np.float64)) for name in names])
        np.testing.assert_array_equal(got == 0, want == 0, err_msg=f"fill {fill}")
        np.testing.assert_allclose(got, want, rtol=1e-3, err_msg=f"fill {fill}")
        n_zeros += np.sum(want == 0)
    assert n_zeros > 0  # row types that a fill leaves out


def test_the_loss_after_one_gradient_step_is_the_references(case):
    fill = case.draft.n_stages
    grad = case.grad(case.params, fill)
    stepped = jax.tree.map(lambda p, g: p - 0.01 * g, case.params, grad)
    loss, _ = case.loss(stepped, fill, 1.0)
    np.testing.assert_allclose(loss, case.want["loss_after_sgd_lr0.01_filln"], **NEAR)
