"""Scoring a draft module against its target on whole sequences, teacher-forced.

target hidden states -> anchors -> PDM under the structural mask -> logits over the draft ids.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from spd_jax.config import ConfigError, DraftConfig, PipelineConfig, TargetConfig
from spd_jax.models import draft as pdm
from spd_jax.models import target as model
from spd_jax.ops.losses import kl_divergence, masked_mean
from spd_jax.ops.sampling import argmax_lowest

IGNORED = -100  # a label that is not scored


def anchor_features(draft: DraftConfig, hidden: list[jax.Array]) -> jax.Array:
    """Stacks the anchors of L+1 hidden states [B, T, D] into [B, T, M, D]."""
    return jnp.stack([hidden[b] for b in draft.anchors], axis=2)


def draft_outputs(
    target: TargetConfig,
    draft: DraftConfig,
    params: dict,
    hidden: list[jax.Array],
    valid_mask: jax.Array,
    fill: jax.Array | int,
    mask_mode: str,
) -> jax.Array:
    """Returns the PDM's outputs [B, T, D] (before the norm) at a simulated fill."""
    pipeline = PipelineConfig(target.n_layers, draft.n_stages, draft.stage_layers)
    if isinstance(fill, int) and not 1 <= fill <= draft.n_stages:
        raise ConfigError(f"fill must be from 1 to n_stages {draft.n_stages}, got {fill}")
    n_tokens = hidden[0].shape[1]
    mask = pdm.structural_mask(pipeline, draft.anchors, n_tokens, fill, mask_mode)
    return pdm.forward(target, draft, params, anchor_features(draft, hidden), valid_mask, mask)


def draft_logits(
    target: TargetConfig,
    draft: DraftConfig,
    target_params: dict,
    draft_params: dict,
    hidden: list[jax.Array],
    valid_mask: jax.Array,
    fill: jax.Array | int,
    mask_mode: str,
) -> jax.Array:
    """Returns the draft's float32 logits [B, T, W] for what follows each position."""
    out = draft_outputs(target, draft, draft_params, hidden, valid_mask, fill, mask_mode)
    return pdm.logits(target, draft, draft_params, target_params, out)


def distillation_loss(
    target: TargetConfig,
    draft: DraftConfig,
    target_params: dict,
    draft_params: dict,
    batch: dict[str, jax.Array],
    *,
    fill: jax.Array | int,
    temperature: float = 1.0,
    mask_mode: str = "exact",
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """KL(target || draft) over the draft ids, mean over valid positions, times temperature^2.

    A position t is valid where the label at t+1 is not -100 and the target's argmax is a draft
    id. `batch` holds input_ids, attention_mask and labels, int [B, T].

    Returns:
      The loss and metrics: accuracy (the draft's argmax is the target's, on valid positions),
      coverage (share of labelled positions whose target argmax is a draft id), n_valid.
    """
    hidden = model.hidden_states(target, target_params, batch["input_ids"])
    hidden = jax.lax.stop_gradient(hidden)
    valid_mask = batch["attention_mask"] > 0
    out = draft_outputs(target, draft, draft_params, hidden, valid_mask, fill, mask_mode)
    teacher = jax.lax.stop_gradient(model.logits(target, target_params, hidden[-1][:, :-1]))
    student = pdm.logits(target, draft, draft_params, target_params, out[:, :-1])
    best = argmax_lowest(teacher)  # [B, T-1]
    labelled = (batch["labels"][:, 1:] != IGNORED) & valid_mask[:, :-1]
    guess = argmax_lowest(student)
    covered = jnp.ones_like(labelled)
    if draft.draft_ids is not None:
        ids = np.asarray(draft.draft_ids)
        covered = jnp.asarray(np.isin(np.arange(target.vocab_size), ids))[best]
        teacher, guess = jnp.take(teacher, ids, axis=-1), jnp.asarray(ids, jnp.int32)[guess]
    valid = labelled & covered
    loss = masked_mean(kl_divergence(teacher, student, temperature), valid) * temperature**2
    metrics = {
        "accuracy": masked_mean((guess == best).astype(jnp.float32), valid),
        "coverage": masked_mean(covered.astype(jnp.float32), labelled),
        "n_valid": jnp.sum(valid),
    }
    return loss, metrics
