"""AdamW behind a global-norm clip, with a warmed-up learning rate that falls to zero."""

from __future__ import annotations

from typing import Any

import jax
import optax

from train.config import TrainConfig


def learning_rate(config: TrainConfig, n_steps: int) -> optax.Schedule:
    """Returns the learning rate as a function of the update number."""
    warmup = min(config.warmup_steps, max(1, n_steps // 2))
    left = max(1, n_steps - warmup)
    fall = (
        optax.linear_schedule(config.lr, 0.0, left)
        if config.schedule == "linear"
        else optax.cosine_decay_schedule(config.lr, left)
    )
    if warmup == 0:
        return fall
    # The first update has number 0: it should already move.
    rise = optax.linear_schedule(config.lr / warmup, config.lr, warmup - 1)
    return optax.join_schedules([rise, fall], [warmup])


def make_optimizer(config: TrainConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Returns the update rule of a run."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            schedule,
            b1=0.9,
            b2=config.b2,
            weight_decay=config.weight_decay,
            mask=_matrices,
        ),
    )


def _matrices(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)
