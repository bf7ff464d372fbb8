"""One training step: simulated fills, the distillation loss, its gradient, an AdamW update.

    batch -> cast weights -> loss summed over its positions -> gradient   (once a batch)
    sum of gradients / sum of positions -> clip -> AdamW -> average       (once a step)

The target's parameters are an argument, not a constant of the program; the state is donated.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spd_jax.config import DraftConfig, TargetConfig
from spd_jax.models.distill import count_scores, mean_metrics, score_positions
from train.parallel import (
    BY_ROW,
    WHOLE,
    Devices,
    gather,
    one_device,
    sum_over_devices,
    target_ends,
)
from train.teacher import teacher_outputs


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "opt_state", "average", "step", "skipped", "key"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a run carries from step to step."""

    params: Any  # the draft's parameter tree, float32, updated by each step
    opt_state: Any  # optax state of the same shapes, float32, updated by each step
    average: optax.EmaState | None  # of the parameters, float32, updated by each step; None: none
    step: jax.Array  # int32 [], updates made
    skipped: jax.Array  # int32 [], updates not made: none of their batches had a valid position
    key: jax.Array  # PRNG key [], constant: the key of a batch is folded in from its number

    @property
    def position(self) -> int:
        """Updates made or skipped: with k batches in each, batch k * position comes next."""
        return int(jax.device_get(self.step)) + int(jax.device_get(self.skipped))


class Sums(NamedTuple):
    """What the batches of an update add up to."""

    grads: Any  # float32, of the sum of the losses of all valid positions
    counts: dict[str, jax.Array]  # of `count_scores`
    fill: jax.Array  # int32 [], of the simulated fills
    n_batches: jax.Array  # int32 []


def init_state(
    params: Any,
    optimizer: optax.GradientTransformation,
    key: jax.Array,
    average: optax.GradientTransformation | None = None,
) -> TrainState:
    """Returns the state before the first step; parameters of any dtype become float32."""
    params = optax.tree.cast(params, jnp.float32)
    averaged = None if average is None else average.init(params)
    # Two buffers, not one array twice: the step donates both.
    zeros = jnp.zeros((), jnp.int32), jnp.array(0, jnp.int32)
    return TrainState(params, optimizer.init(params), averaged, *zeros, key)


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
    """Returns (draft params, target params, batch, fill) -> (sum of the losses, `count_scores`).

    The fill is static. The draft computes in the target's dtype; gradients arrive in that of its
    parameters. Of the target nothing is used but its ends. `settings` are those of
    `score_positions`.
    """

    def loss_fn(params: Any, target_params: Any, batch: dict, fill: int) -> Any:
        params = optax.tree.cast(params, target_params["embed"]["weight"].dtype)
        outputs = teacher_outputs(target, draft, batch)
        scores = score_positions(
            target, draft, target_params, params, *outputs, fill=fill, **settings
        )
        return scores.total, count_scores(scores)

    return loss_fn


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """The compiled programs of a step."""

    gradients: Callable[..., Sums]  # (state, number within the update, target's ends, batch)
    add: Callable[[Sums, Sums], Sums]  # the first is donated
    update: Callable[[TrainState, Sums], tuple[TrainState, dict]]  # the state is donated
    devices: Devices

    def __call__(
        self, state: TrainState, target_params: Any, batches: dict | Iterable[dict]
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Makes one update from a batch, or from several, each read when it is needed.

        A batch is one of `data.training_batches` with the outputs of `teacher.Teacher`. Their
        gradient is that of the mean over the valid positions of all of them, as if they were one.
        Where there is none, nothing changes but the count of such updates.

        Returns:
          The new state, and of this update: loss, accuracy, coverage, n_valid, fill (the mean of
          those simulated), grad_norm (before the clip), lr, and the root mean square of the
          weights that it ends with (weights_rms): all else is of the weights before.
        """
        total, ends = None, target_ends(target_params)
        for j, batch in enumerate([batches] if isinstance(batches, dict) else batches):
            number = jax.device_put(np.int32(j))  # said aloud: a run forbids silent transfers
            sums = self.devices.in_turn(self.gradients(state, number, ends, batch))
            total = sums if total is None else self.add(total, sums)
        return self.update(state, total)


def make_train_step(
    target: TargetConfig,
    draft: DraftConfig,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    *,
    average: optax.GradientTransformation | None = None,
    expected_alpha: float | None = None,
    devices: Devices | None = None,
    **settings: Any,
) -> TrainStep:
    """Returns the step of a run; `schedule` is only reported.

    The rows of a batch are over `devices` (None: one), and so are the target's parameters where
    these cut them; the state is whole on each.

    A fill is drawn for each batch, by a key that is folded from the number of the update and that
    of the batch within it. `settings` are those of `score_positions`.
    """
    loss = make_loss(target, draft, **settings)
    # One branch a fill: the row types that play no part at it are left out.
    at_fill = [
        jax.value_and_grad(functools.partial(loss, fill=fill), has_aux=True)
        for fill in range(1, draft.n_stages + 1)
    ]
    devices = devices or one_device()
    return TrainStep(
        _make_gradients(at_fill, expected_alpha, devices),
        jax.jit(lambda total, sums: jax.tree.map(jnp.add, total, sums), donate_argnums=0),
        _make_update(optimizer, schedule, average),
        devices,
    )


def _make_gradients(
    at_fill: Sequence[Callable], expected_alpha: float | None, devices: Devices
) -> Callable[..., Sums]:
    """Returns the program of one batch, at a fill that it draws.

    Args:
      at_fill: (params, target's ends, batch) -> ((loss, counts), gradient), by fill from 1.
    """

    @jax.jit
    def gradients(state: TrainState, number: jax.Array, ends: dict, batch: dict) -> Sums:
        key = jax.random.fold_in(state.key, state.step + state.skipped)
        fill = draw_fill(jax.random.fold_in(key, number), len(at_fill), expected_alpha)
        specs = devices.target_specs(ends)

        def work(params: Any, fill: jax.Array, ends: dict, batch: dict) -> Any:
            (_, counts), grads = jax.lax.switch(
                fill - 1, at_fill, params, gather(ends, specs), batch
            )
            return sum_over_devices((grads, counts))

        over_devices = devices.by_rows(work, (WHOLE, WHOLE, specs, BY_ROW), WHOLE)
        grads, counts = over_devices(state.params, fill, ends, batch)
        return Sums(grads, counts, fill, jnp.ones((), jnp.int32))

    return gradients


def _make_update(
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    average: optax.GradientTransformation | None,
) -> Callable[[TrainState, Sums], tuple[TrainState, dict]]:
    """Returns the program that ends a step: it moves the parameters, or counts that it did not."""

    @functools.partial(jax.jit, donate_argnums=0)
    def update(state: TrainState, sums: Sums) -> Any:
        n_valid = sums.counts["n_valid"]
        n = jnp.maximum(n_valid, 1)

        def move() -> TrainState:
            grads = jax.tree.map(lambda leaf: leaf / n, sums.grads)  # here: fused, never stored
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            averaged = None if average is None else average.update(params, state.average)[1]
            return dataclasses.replace(
                state,
                params=params,
                opt_state=opt_state,
                average=averaged,
                step=state.step + 1,
            )

        def skip() -> TrainState:
            return dataclasses.replace(state, skipped=state.skipped + 1)

        lr = schedule(state.step)
        state = jax.lax.cond(n_valid > 0, move, skip)
        loss, metrics = mean_metrics(sums.counts)
        return state, {
            "loss": loss,
            "fill": sums.fill / sums.n_batches,
            "grad_norm": optax.tree.norm(sums.grads) / n,
            "lr": jnp.asarray(lr),
            "weights_rms": optax.tree.norm(state.params) / optax.tree.size(state.params) ** 0.5,
            **metrics,
        }

    return update
