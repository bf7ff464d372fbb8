"""Draft against target at every position, from the target's kept hidden states.

The same figures as `spd_jax.models.distill.distillation_loss`, but the target does not run: its
hidden states and choices come with the batch, and its head is applied to the draft ids alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spd_jax.config import DraftConfig, TargetConfig
from spd_jax.models import draft as pdm
from spd_jax.models import target as model
from spd_jax.models.distill import draft_outputs
from spd_jax.ops.linear import linear
from spd_jax.ops.losses import kl_divergence
from spd_jax.ops.sampling import argmax_lowest


class Scores(NamedTuple):
    """The prediction made at each position but the last, [B, T-1]."""

    loss: jax.Array  # float32, temperature^2 * KL(target || draft) over the draft ids
    guess: jax.Array  # int32, the draft's choice, a full-vocabulary id
    best: jax.Array  # int32, the target's choice
    covered_mask: jax.Array  # bool, the target's choice is a draft id


def kept_states(target: TargetConfig, draft: DraftConfig) -> tuple[int, ...]:
    """Returns the hidden-state indices that training needs: the anchors, and L for the head."""
    last = () if draft.anchors[-1] == target.n_layers else (target.n_layers,)
    return (*draft.anchors, *last)


def score_positions(
    target: TargetConfig,
    draft: DraftConfig,
    target_params: Any,
    params: Any,
    batch: dict[str, jax.Array],
    *,
    fill: jax.Array | int,
    temperature: float,
    mask_mode: str,
) -> Scores:
    """Runs the draft at a simulated fill.

    `batch` holds attention_mask int [B, T], states [B, T, K, D] (`kept_states`) and best int
    [B, T], the target's choice at each position.
    """
    states = {b: batch["states"][:, :, k] for k, b in enumerate(kept_states(target, draft))}
    ids = np.arange(target.vocab_size) if draft.draft_ids is None else np.asarray(draft.draft_ids)
    valid_mask = batch["attention_mask"] > 0
    out = draft_outputs(target, draft, params, states, valid_mask, fill, mask_mode)
    student = pdm.logits(target, draft, params, target_params, out[:, :-1])
    x = model.normed(target, target_params, states[target.n_layers][:, :-1])
    teacher = linear(x, model.head_weight(target_params)[ids], jnp.float32)
    best = batch["best"][:, :-1]
    return Scores(
        loss=kl_divergence(teacher, student, temperature) * temperature**2,
        guess=jnp.asarray(ids, jnp.int32)[argmax_lowest(student)],
        best=best,
        covered_mask=jnp.asarray(np.isin(np.arange(target.vocab_size), ids))[best],
    )
