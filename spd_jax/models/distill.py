"""Scoring a draft module against its target on whole sequences, teacher-forced.

target hidden states -> anchors -> PDM under the structural mask -> logits over the draft ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spd_jax.checks import ConfigError, as_ints
from spd_jax.config import (
    AnyDraftConfig,
    TargetConfig,
    V10DraftConfig,
)
from spd_jax.models import draft as pdm
from spd_jax.models import draft_v10
from spd_jax.models import target as model
from spd_jax.ops.linear import linear
from spd_jax.ops.losses import kl_divergence, masked_mean
from spd_jax.ops.sampling import argmax_lowest

IGNORED = -100  # a label that is not scored
Hidden = Sequence[jax.Array] | Mapping[int, jax.Array]  # [B, T, D] by hidden-state index


class Scores(NamedTuple):
    """The prediction made at each position but the last, [B, T-1]."""

    loss: jax.Array  # float32, temperature^2 * KL(target || draft) over the draft ids
    guess: jax.Array  # int32, the draft's choice, a full-vocabulary id
    best: jax.Array  # int32, the target's choice
    covered_mask: jax.Array  # bool, the target's choice is a draft id


def kept_states(target: TargetConfig, draft: AnyDraftConfig) -> tuple[int, ...]:
    """The hidden-state indices that scoring reads: the anchors, and L for the target's head."""
    return tuple(sorted({*draft.anchors, target.n_layers}))


def draft_outputs(
    target: TargetConfig,
    draft: AnyDraftConfig,
    params: dict,
    hidden: Hidden,
    segments: jax.Array,
    fill: jax.Array | int,
    mask_mode: str,
    **options: bool,
) -> jax.Array:
    """Returns the PDM's outputs [B, T, D] (before the norm) at a simulated fill.

    `segments` [B, T] and `options` are as in `draft.forward`.

    Raises:
      ConfigError: a static fill outside 1..N, or an unknown mask_mode.
    """
    if not isinstance(fill, jax.core.Tracer):
        (fill,) = as_ints("fill", [fill])
        if not 1 <= fill <= draft.n_stages:
            raise ConfigError(f"fill must be from 1 to n_stages {draft.n_stages}, got {fill}")
    if isinstance(draft, V10DraftConfig):
        return draft_v10.forward(target, draft, params, hidden, segments > 0, fill, mask_mode)
    features = jnp.stack([hidden[b] for b in draft.anchors], axis=2)  # [B, T, M, D]
    return pdm.forward(target, draft, params, features, segments, fill, mask_mode, **options)


def score_positions(
    target: TargetConfig,
    draft: AnyDraftConfig,
    target_params: dict,
    draft_params: dict,
    hidden: Hidden,
    best: jax.Array,
    valid_mask: jax.Array,
    *,
    fill: jax.Array | int,
    temperature: float = 1.0,
    mask_mode: str = "exact",
) -> Scores:
    """Runs the draft at a simulated fill and compares it with the target at every position.

    Args:
      hidden: the target's hidden states of `kept_states`; best: int [B, T], its choices.
      valid_mask: bool [B, T], False on padding.
    """
    out = draft_outputs(target, draft, draft_params, hidden, valid_mask, fill, mask_mode)
    student = pdm.logits(target, draft, draft_params, target_params, out[:, :-1])
    x = model.normed(target, target_params, hidden[target.n_layers][:, :-1])
    head, guess = model.head_weight(target_params), argmax_lowest(student)
    best = best[:, :-1]
    covered = jnp.ones(best.shape, bool)
    if draft.draft_ids is not None:
        ids = np.asarray(draft.draft_ids, np.int32)
        head, guess = head[ids], jnp.asarray(ids)[guess]
        covered = jnp.asarray(np.isin(np.arange(target.vocab_size), ids))[best]
    teacher = jax.lax.stop_gradient(linear(x, head, jnp.float32))
    loss = kl_divergence(teacher, student, temperature) * temperature**2
    return Scores(loss, guess, best, covered)


def summarise(scores: Scores, labels: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Reduces scores to the loss and its metrics; `labels` int [B, T].

    A position t is valid where the label at t+1 is not -100 and the target's choice is a draft
    id.

    Returns:
      The mean loss over valid positions, and accuracy (the draft's choice is the target's, on
      valid positions), coverage (share of labelled positions whose target choice is a draft id)
      and n_valid.
    """
    labelled = labels[:, 1:] != IGNORED
    valid = labelled & scores.covered_mask
    return masked_mean(scores.loss, valid), {
        "accuracy": masked_mean((scores.guess == scores.best).astype(jnp.float32), valid),
        "coverage": masked_mean(scores.covered_mask.astype(jnp.float32), labelled),
        "n_valid": jnp.sum(valid),
    }


def distillation_loss(
    target: TargetConfig,
    draft: AnyDraftConfig,
    target_params: dict,
    draft_params: dict,
    batch: dict[str, jax.Array],
    *,
    fill: jax.Array | int,
    temperature: float = 1.0,
    mask_mode: str = "exact",
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Runs the target and scores the draft on a batch; results as in `summarise`.

    `batch` holds input_ids, attention_mask and labels, int [B, T].
    """
    hidden = model.hidden_states(target, target_params, batch["input_ids"])
    hidden = jax.lax.stop_gradient(hidden)
    best = argmax_lowest(model.logits(target, target_params, hidden[-1]))
    scores = score_positions(
        target,
        draft,
        target_params,
        draft_params,
        hidden,
        best,
        batch["attention_mask"] > 0,
        fill=fill,
        temperature=temperature,
        mask_mode=mask_mode,
    )
    return summarise(scores, batch["labels"])
