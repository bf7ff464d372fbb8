"""One training step: a simulated fill, the distillation loss, its gradient, an AdamW update.

The target's parameters are an argument, not a constant of the program; the state is donated.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spd_jax.config import DraftConfig, TargetConfig
from spd_jax.models.distill import count_scores, mean_metrics, score_positions
from train.teacher import teacher_outputs


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "opt_state", "step", "skipped", "key"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a run carries from step to step; batch number step + skipped comes next."""

    params: Any  # the draft's parameter tree, run dtype, updated by each step
    opt_state: Any  # optax state of the same shapes, updated by each step
    step: jax.Array  # int32 [], updates made
    skipped: jax.Array  # int32 [], batches that had no valid position
    key: jax.Array  # PRNG key [], constant: the key of a batch is folded in from its number

    @property
    def position(self) -> int:
        """Batches read so far."""
        return int(jax.device_get(self.step)) + int(jax.device_get(self.skipped))


TrainStep = Callable[[TrainState, Any, dict], tuple[TrainState, dict[str, jax.Array]]]


def init_state(params: Any, optimizer: optax.GradientTransformation, key: jax.Array) -> TrainState:
    """Returns the state before the first step."""
    # Two buffers, not one array twice: the step donates both.
    zeros = jnp.zeros((), jnp.int32), jnp.array(0, jnp.int32)
    return TrainState(params, optimizer.init(params), *zeros, key)


def draw_fill(key: jax.Array, n_stages: int, expected_alpha: float | None = None) -> jax.Array:
    """Draws the simulated tokens in flight, int32 [] in 1..N.

    With `expected_alpha`, as decoding meets them: a run of accepted drafts begins at fill 1 and
    each acceptance adds one, so of the drafts that are verified alpha^(f-1) are made at fill f or
    above. Without, N half of the time, else uniform from 1..N-1.
    """
    if expected_alpha is not None:
        reached = expected_alpha ** jnp.arange(1, n_stages)  # at fill f+1 or above
        return 1 + jnp.sum(jax.random.uniform(key) < reached, dtype=jnp.int32)
    full_key, fill_key = jax.random.split(key)
    fill = jax.random.randint(fill_key, (), 1, n_stages)
    return jnp.where(jax.random.bernoulli(full_key), n_stages, fill)


def make_loss(
    target: TargetConfig, draft: DraftConfig, **settings: Any
) -> Callable[..., tuple[jax.Array, dict[str, jax.Array]]]:
    """Returns (draft params, target params, batch, fill) -> (loss, metrics) at a static fill.

    `settings` are those of `score_positions`.
    """

    def loss_fn(params: Any, target_params: Any, batch: dict, fill: int) -> Any:
        outputs = teacher_outputs(target, draft, batch)
        scores = score_positions(
            target, draft, target_params, params, *outputs, fill=fill, **settings
        )
        return mean_metrics(count_scores(scores))

    return loss_fn


def make_train_step(
    target: TargetConfig,
    draft: DraftConfig,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    *,
    expected_alpha: float | None = None,
    **settings: Any,
) -> TrainStep:
    """Returns the compiled step (state, target_params, batch) -> (state, metrics).

    `schedule` is only reported; `batch` is one of `data.training_batches` with the outputs of
    `teacher.Teacher`; `settings` are those of `score_positions`.

    A batch without a valid position changes nothing but the count of such batches.
    """

    loss_fn = make_loss(target, draft, **settings)
    # One branch a fill: the row types that play no part at it are left out.
    at_fill = [
        jax.value_and_grad(functools.partial(loss_fn, fill=fill), has_aux=True)
        for fill in range(1, draft.n_stages + 1)
    ]

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: TrainState, target_params: Any, batch: dict) -> Any:
        key = jax.random.fold_in(state.key, state.step + state.skipped)
        fill = draw_fill(key, draft.n_stages, expected_alpha)
        (loss, metrics), grads = jax.lax.switch(
            fill - 1, at_fill, state.params, target_params, batch
        )

        def update() -> TrainState:
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            return dataclasses.replace(
                state, params=params, opt_state=opt_state, step=state.step + 1
            )

        def skip() -> TrainState:
            return dataclasses.replace(state, skipped=state.skipped + 1)

        lr = schedule(state.step)
        state = jax.lax.cond(metrics["n_valid"] > 0, update, skip)
        return state, {
            "loss": loss,
            "lr": jnp.asarray(lr),
            "grad_norm": optax.tree.norm(grads),
            "fill": fill,
            **metrics,
        }

    return train_step
