"""Scoring a draft module against its target on whole sequences, teacher-forced.

target hidden states -> anchors -> PDM -> loss over the draft ids at the scored positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spd_jax.checks import ConfigError, as_ints
from spd_jax.config import AnyDraftConfig, LossConfig, TargetConfig, V10DraftConfig
from spd_jax.models import draft as pdm
from spd_jax.models import draft_v10
from spd_jax.models import target as model
from spd_jax.ops.vocabulary import best_ids, vocabulary_loss

IGNORED = -100  # a label that is not scored
Hidden = Sequence[jax.Array] | Mapping[int, jax.Array]  # [B, T, D] by hidden-state index
KL = LossConfig()


class Scores(NamedTuple):
    """The prediction made at each position but the last, [B, T-1]; zeros where none is scored."""

    total: jax.Array  # float32 [], the sum of the losses where valid: what gradients come from
    loss: jax.Array  # float32, temperature^2 * the divergence
    guess: jax.Array  # int32, the draft's choice, a full-vocabulary id
    best: jax.Array  # int32, the target's choice
    scored_mask: jax.Array  # bool, the next token of this text has a label
    covered_mask: jax.Array  # bool, the target's choice is a draft id
    valid_mask: (
        jax.Array
    )  # bool, what is learnt from: scored and, but for losses that miss, covered


def kept_states(target: TargetConfig, draft: AnyDraftConfig) -> tuple[int, ...]:
    """The hidden-state indices that scoring reads: the anchors, and L for the target's head."""
    return tuple(sorted({*draft.anchors, target.n_layers}))


def needs_choices(draft: AnyDraftConfig) -> bool:
    """Whether it matters which id the target chooses: the draft may lack it."""
    return draft.draft_ids is not None


def scored_positions(labels: jax.Array, segments: jax.Array) -> jax.Array:
    """Returns bool [B, T-1]: the token at t+1 has a label, and t is of the same text."""
    same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    return same & (labels[:, 1:] != IGNORED)


def target_choices(
    target: TargetConfig, params: dict, x: jax.Array, scored_mask: jax.Array
) -> jax.Array:
    """Returns the target's choices int32 [B, T-1] from its last hidden states [B, T, D]."""
    rows = model.normed(target, params, x[:, :-1])
    best = best_ids(
        rows.reshape(-1, rows.shape[-1]), model.head_weight(params), scored_mask.reshape(-1)
    )
    return best.reshape(scored_mask.shape)


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
    best: jax.Array | None,
    segments: jax.Array,
    labels: jax.Array,
    *,
    fill: jax.Array | int,
    temperature: float = 1.0,
    mask_mode: str = "exact",
    loss: LossConfig = KL,
    **options: bool,
) -> Scores:
    """Runs the draft at a simulated fill and compares it with the target where labels follow.

    `options` are as in `draft.forward`, the other arguments as in `compare_outputs`.
    """
    out = draft_outputs(target, draft, draft_params, hidden, segments, fill, mask_mode, **options)
    return compare_outputs(
        target,
        draft,
        target_params,
        draft_params,
        hidden,
        best,
        segments,
        labels,
        out,
        temperature=temperature,
        loss=loss,
    )


def compare_outputs(
    target: TargetConfig,
    draft: AnyDraftConfig,
    target_params: dict,
    draft_params: dict,
    hidden: Hidden,
    best: jax.Array | None,
    segments: jax.Array,
    labels: jax.Array,
    out: jax.Array,
    *,
    temperature: float = 1.0,
    loss: LossConfig = KL,
) -> Scores:
    """Compares a draft's outputs with the target where labels follow.

    Args:
      hidden: the target's hidden states of `kept_states`.
      best: int [B, T-1], its choices where scored; not needed where the draft has all ids.
      segments: int [B, T], the text of each token, 0 on padding; labels: int [B, T].
      out: [B, T, D], of `draft_outputs`.
    """
    scored = scored_positions(labels, segments)
    head = jax.lax.stop_gradient(model.head_weight(target_params))
    covered, valid, columns = jnp.ones(scored.shape, bool), scored, None
    if draft.draft_ids is not None:
        ids = np.asarray(draft.draft_ids, np.int32)
        covered = jnp.asarray(np.isin(np.arange(target.vocab_size), ids))[best]
        misses = loss.outside == "miss" and loss.name != "ce"
        valid = scored if misses else scored & covered
        head, columns = (head, ids) if loss.outside == "miss" else (head[ids], None)

    def normed_rows(x: jax.Array) -> jax.Array:  # [B, T, D] -> [B * (T-1), D]
        x = model.normed(target, target_params, x[:, :-1])
        return x.reshape(-1, x.shape[-1])

    total, rows = vocabulary_loss(
        loss,
        draft.head == "own",
        normed_rows(out),
        pdm.head_weight(draft, draft_params, target_params),
        jax.lax.stop_gradient(normed_rows(hidden[target.n_layers])),
        head,
        columns,
        temperature,
        scored.reshape(-1),
        valid.reshape(-1).astype(jnp.float32),
    )
    losses, guess, named = (x.reshape(scored.shape) for x in rows)
    if draft.draft_ids is not None:
        guess = jnp.asarray(ids)[guess]
    best = named if draft.draft_ids is None else best
    return Scores(total, losses, guess, best, scored, covered, valid)


def count_scores(scores: Scores) -> dict[str, jax.Array]:
    """Returns sums: loss and n_right over n_valid positions, n_covered of n_scored."""
    valid = scores.valid_mask
    return {
        "loss": scores.total,
        "n_valid": jnp.sum(valid),
        "n_right": jnp.sum(valid & (scores.guess == scores.best)),
        "n_scored": jnp.sum(scores.scored_mask),
        "n_covered": jnp.sum(scores.scored_mask & scores.covered_mask),
    }


def mean_metrics(sums: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Reduces `count_scores`, of one batch or added up, to the loss and its metrics.

    Returns:
      The mean loss over valid positions, and accuracy (the draft's choice is the target's, on
      valid positions), coverage (share of scored positions whose target choice is a draft id) and
      n_valid.
    """
    n_valid = jnp.maximum(sums["n_valid"], 1)
    return sums["loss"] / n_valid, {
        "accuracy": sums["n_right"] / n_valid,
        "coverage": sums["n_covered"] / jnp.maximum(sums["n_scored"], 1),
        "n_valid": sums["n_valid"],
    }


def distillation_loss(
    target: TargetConfig,
    draft: AnyDraftConfig,
    target_params: dict,
    draft_params: dict,
    batch: dict[str, jax.Array],
    **settings: object,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Runs the target and scores the draft on a batch; results as of `mean_metrics`.

    `batch` holds input_ids, attention_mask (the text of each token, 0 on padding) and labels, int
    [B, T]; `settings` are those of `score_positions`.
    """
    segments, labels = batch["attention_mask"], batch["labels"]
    hidden = model.hidden_states(target, target_params, batch["input_ids"], segments)
    hidden = jax.lax.stop_gradient(hidden)
    scored = scored_positions(labels, segments)
    best = None
    if needs_choices(draft):
        best = target_choices(target, target_params, hidden[-1], scored)
    scores = score_positions(
        target, draft, target_params, draft_params, hidden, best, segments, labels, **settings
    )
    return mean_metrics(count_scores(scores))
