"""AdamW behind a global-norm clip, a warmed-up learning rate that falls, an average of the weights.

Weights, moments and average are float32, whatever the draft computes in: at bfloat16's eight bits
an update of a thousandth is rounded away, and so is a moment that moves by (1 - b2).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from train.config import TrainConfig


def learning_rate(config: TrainConfig, n_steps: int) -> optax.Schedule:
    """Returns the learning rate as a function of the update number.

    It rises linearly over `warmup_steps` (at most half of the run) to `lr`, then falls by
    `schedule` to `lr_final * lr` at update n_steps.
    """
    warmup = min(config.warmup_steps, max(1, n_steps // 2))
    left = max(1, n_steps - warmup)
    fall = (
        optax.linear_schedule(config.lr, config.lr * config.lr_final, left)
        if config.schedule == "linear"
        else optax.cosine_decay_schedule(config.lr, left, alpha=config.lr_final)
    )
    if warmup == 0:
        return fall
    # The first update has number 0: it should already move.
    rise = optax.linear_schedule(config.lr / warmup, config.lr, warmup - 1)
    return optax.join_schedules([rise, fall], [warmup])


def make_optimizer(config: TrainConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Returns the update rule of a run (arXiv 1711.05101).

    Gradients g are scaled down to the global norm `clip_norm`; moments m and v are their averages
    and those of their squares with decays `b1` and `b2`, unbiased; a weight w moves by
    -lr * (m / (sqrt(v) + eps) + weight_decay * w), the last term as `decayed` says.
    """
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            schedule,
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=functools.partial(decayed, head=config.decay_head),
        ),
    )


def decayed(params: Any, head: bool) -> Any:
    """Returns True for each leaf that weight decay reaches: matrices, the head's if `head`."""

    def is_decayed(path: tuple, leaf: jax.Array) -> bool:
        return leaf.ndim >= 2 and (head or path[0].key != "lm_head")

    return jax.tree_util.tree_map_with_path(is_decayed, params)


def make_average(config: TrainConfig) -> optax.GradientTransformation | None:
    """Returns the running average of the weights, sum of ema^(t-i) w_i; None where none is kept."""
    if config.ema is None:
        return None
    return optax.ema(config.ema, debias=True, accumulator_dtype=jnp.float32)


@functools.partial(jax.jit, static_argnums=2)
def read_average(params: Any, state: optax.EmaState, decay: float) -> Any:
    """Returns the average over all updates so far, its weights summing to one.

    Args:
      params: what to return before the first update.
    """
    return jax.lax.cond(
        state.count > 0,
        lambda: optax.tree.bias_correction(state.ema, decay, state.count),
        lambda: params,
    )
