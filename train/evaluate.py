"""Held-out figures of a draft at every fill, beside the 2-gram lookup on the same positions.

Scored are the ids that the target wrote, but the first of each answer: decoding has that one
from the prefill and never drafts it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spd_jax.config import DraftConfig, TargetConfig
from spd_jax.models.distill import IGNORED, score_positions
from spd_jax.ops.lookup import hits_by_position
from train.batches import ordered_batches
from train.config import TrainConfig
from train.data import Row
from train.teacher import Teacher, teacher_outputs

SUMS = ("loss", "n_covered", "agree_target", "agree_text")
EvalStep = Callable[[Any, Any, dict], dict[str, jax.Array]]


def make_eval_step(target: TargetConfig, draft: DraftConfig, **settings: Any) -> EvalStep:
    """Returns the compiled (target_params, draft_params, batch) -> sums [N, B] per fill and row.

    `settings` are those of `score_positions`.
    """

    @jax.jit
    def eval_step(target_params: Any, params: Any, batch: dict) -> dict[str, jax.Array]:
        written = batch["labels"] != IGNORED
        scored = written[:, 1:] & written[:, :-1]

        def at_fill(fill: jax.Array) -> dict[str, jax.Array]:
            scores = score_positions(
                target,
                draft,
                target_params,
                params,
                *teacher_outputs(target, draft, batch),
                fill=fill,
                **settings,
            )
            covered = scored & scores.covered_mask
            next_ids = batch["input_ids"][:, 1:]
            return {
                "loss": jnp.sum(jnp.where(covered, scores.loss, 0.0), axis=1),
                "n_covered": jnp.sum(covered, axis=1),
                "agree_target": jnp.sum((scores.guess == scores.best) & scored, axis=1),
                "agree_text": jnp.sum((scores.guess == next_ids) & scored, axis=1),
            }

        return jax.lax.map(at_fill, jnp.arange(1, draft.n_stages + 1))

    return eval_step


def lookup_counts(row: Row) -> tuple[int, int]:
    """Counts the scored ids that a 2-gram lookup names, and the scored ids."""
    scored = [False, *(row.scored_mask[1:] & row.scored_mask[:-1]).tolist()]
    hits = hits_by_position(row.ids.tolist())
    return sum(hit and use for hit, use in zip(hits, scored, strict=True)), sum(scored)


def evaluate(
    eval_step: EvalStep,
    teacher: Teacher,
    target_params: Any,
    params: Any,
    rows: Sequence[Row],
    config: TrainConfig,
) -> dict[str, dict[str, Any]]:
    """Scores held-out rows, all together ("all") and by the temperature they were written at.

    Returns:
      For each group: n_scored; loss, agree_target and agree_text as means over fills, the last
      two also per fill 1..N (`*_by_fill`); coverage; lookup.
    """
    totals: dict[str, dict[str, Any]] = {}
    for members, batch in ordered_batches(rows, config.sequence_len, config.batch_tokens):
        sums = jax.device_get(eval_step(target_params, params, teacher(batch)))
        for b, row in enumerate(members):
            hits, n_scored = lookup_counts(row)
            for group in ("all", f"T={row.temperature:g}"):
                total = totals.setdefault(group, {"lookup": 0, "n_scored": 0})
                total["lookup"] += hits
                total["n_scored"] += n_scored
                for name in SUMS:
                    total[name] = total.get(name, 0) + sums[name][:, b].astype(np.float64)
    return {group: _rates(total) for group, total in totals.items()}


def describe_figures(figures: dict[str, dict[str, Any]]) -> str:
    """Returns the figures of `evaluate` in one line."""
    return "; ".join(
        f"{group}: loss {r['loss']:.3f}, agrees with target {r['agree_target']:.3f}, with text "
        f"{r['agree_text']:.3f} (lookup {r['lookup']:.3f})"
        for group, r in figures.items()
    )


def _rates(total: dict[str, Any]) -> dict[str, Any]:
    n = max(total["n_scored"], 1)
    rates = {
        "n_scored": total["n_scored"],
        "loss": float((total["loss"] / np.maximum(total["n_covered"], 1)).mean()),
        "coverage": float(total["n_covered"].mean() / n),
        "lookup": total["lookup"] / n,
    }
    for name in ("agree_target", "agree_text"):
        rates[name] = float(total[name].mean() / n)
        rates[f"{name}_by_fill"] = (total[name] / n).tolist()
    return rates
