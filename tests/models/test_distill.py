"""The distillation loss against its definition, and what gets no gradient."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spd_jax.config import DraftConfig
from spd_jax.models import distill
from spd_jax.models import draft as pdm
from spd_jax.models import target as model

IDS = tuple(range(0, 64, 2))
DRAFT = DraftConfig((0, 3, 6), n_stages=3, n_layers=1, draft_ids=IDS)
LENGTHS = (24, 15, 6)


@pytest.fixture(scope="module")
def target(make_target):
    return make_target()


@pytest.fixture(scope="module")
def batch() -> dict[str, np.ndarray]:
    """Right-padded rows; of row 0 the first four labels are not scored."""
    rng = np.random.default_rng(0)
    valid = np.arange(24) < np.array(LENGTHS)[:, None]
    ids = np.where(valid, rng.integers(0, 64, (3, 24)), 0)
    labels = np.where(valid, ids, -100)
    labels[0, :4] = -100
    return {"input_ids": ids, "attention_mask": valid.astype(int), "labels": labels}


def init(target, draft):
    return pdm.init_params(target.config, draft, target.params, jax.random.key(0))


def loss(target, draft, target_params, draft_params, batch, **options):
    args = (target.config, draft, target_params, draft_params)
    return distill.distillation_loss(*args, batch, fill=2, **options)


def log_softmax(x):
    x = x.astype(np.float64) - x.max()
    return x - np.log(np.exp(x).sum())


@pytest.mark.parametrize("draft_ids", [None, IDS], ids=["all ids", "some ids"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_loss_and_metrics_are_their_definition(naive, target, batch, draft_ids, temperature):
    draft = dataclasses.replace(DRAFT, draft_ids=draft_ids)
    params, ids = init(target, draft), np.array(draft_ids or range(64))
    hidden = model.hidden_states(target.config, target.params, batch["input_ids"])
    valid_mask = jnp.asarray(batch["attention_mask"] > 0)
    args = (target.config, draft, params, hidden, valid_mask)
    out = distill.draft_outputs(*args, 2, "exact")
    student = pdm.logits(target.config, draft, params, target.params, out)
    losses, right, covered = [], [], []
    for b, n in enumerate(LENGTHS):
        teacher = naive.logits(target.config, target.params, batch["input_ids"][b, :n])
        for t in range(n - 1):
            if batch["labels"][b, t + 1] == -100:
                continue
            best = teacher[t].argmax()
            covered.append(best in ids)
            if best in ids:
                p = log_softmax(teacher[t][ids] / temperature)
                q = log_softmax(np.asarray(student[b, t]) / temperature)
                losses.append(np.sum(np.exp(p) * (p - q)) * temperature**2)
                right.append(ids[student[b, t].argmax()] == best)
    assert len(losses) > 5 and any(right) and not all(right)
    assert all(covered) == (draft_ids is None)
    got, metrics = loss(target, draft, target.params, params, batch, temperature=temperature)
    np.testing.assert_allclose(got, np.mean(losses), rtol=1e-4)
    np.testing.assert_allclose(metrics["accuracy"], np.mean(right), rtol=1e-6)
    np.testing.assert_allclose(metrics["coverage"], np.mean(covered), rtol=1e-6)
    assert metrics["n_valid"] == len(losses)


def test_a_batch_without_a_scored_position_has_no_loss_and_no_gradient(target, batch):
    params = init(target, DRAFT)
    nothing = batch | {"labels": np.full((3, 24), -100)}
    value, metrics = loss(target, DRAFT, target.params, params, nothing)
    assert value == metrics["n_valid"] == metrics["accuracy"] == metrics["coverage"] == 0
    grads = jax.grad(lambda p: loss(target, DRAFT, target.params, p, nothing)[0])(params)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("head", ["target", "own"])
def test_the_targets_layers_and_heads_get_no_gradient(config, make_target, batch, head, tied):
    target = make_target(dataclasses.replace(config, tied_embeddings=tied))
    draft = dataclasses.replace(DRAFT, head=head)
    params = init(target, draft)
    grad = jax.grad(lambda t, d: loss(target, draft, t, d, batch)[0], (0, 1))
    of_target, of_draft = grad(target.params, params)
    assert all((leaf != 0).any() for leaf in jax.tree.leaves(of_draft["layers"]))
    assert ("lm_head" in of_draft) == (head == "own")
    frozen = {k: v for k, v in of_target.items() if k != "final_norm"}
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(frozen))


def test_padding_before_tokens_changes_nothing(target, batch):
    """Of a target without delta-nets; those are refused, and so are packed texts there."""
    params = init(target, DRAFT)
    moved = {name: np.roll(x, 3, axis=1) for name, x in batch.items()}
    n = min(LENGTHS)
    assert n < 21
    rows = {name: x[LENGTHS.index(n) : LENGTHS.index(n) + 1] for name, x in batch.items()}
    moved = {name: x[LENGTHS.index(n) : LENGTHS.index(n) + 1] for name, x in moved.items()}
    want = loss(target, DRAFT, target.params, params, rows)
    got = loss(target, DRAFT, target.params, params, moved)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    assert got[1]["n_valid"] == want[1]["n_valid"]


def test_packed_texts_score_as_each_in_its_row(target, batch):
    params = init(target, DRAFT)
    sums = np.zeros(2)
    for b, n in enumerate(LENGTHS):
        row = {name: x[b : b + 1, :n] for name, x in batch.items()}
        value, metrics = loss(target, DRAFT, target.params, params, row)
        sums += np.asarray([value * metrics["n_valid"], metrics["n_valid"]])
    packed = {
        name: np.concatenate([batch[name][b, :n] * (b + 1 if name == "attention_mask" else 1)
                              for b, n in enumerate(LENGTHS)])[None]
        for name in batch
    }  # fmt: skip
    value, metrics = loss(target, DRAFT, target.params, params, packed)
    assert metrics["n_valid"] == sums[1]
    np.testing.assert_allclose(value, sums[0] / sums[1], rtol=1e-5)
