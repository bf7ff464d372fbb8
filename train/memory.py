"""What the trainer holds in memory, counted on shapes: its programs, traced and not run."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
from jax.extend.core import Literal

from spd_jax.config import DraftConfig, TargetConfig
from spd_jax.ops.vocabulary import chunk_rows
from spd_jax.pipeline.sizes import n_bytes
from train.batches import make_batch
from train.config import TrainConfig
from train.optimizer import learning_rate, make_average, make_optimizer
from train.parallel import is_cut, target_ends
from train.step import init_state, make_loss, make_train_step
from train.teacher import run_target

LOGITS_AT_ONCE = 4  # of a chunk: the target's and the draft's, their exponentials, the gradient


@dataclasses.dataclass(frozen=True)
class TrainerBytes:
    """Bytes on each of the trainer's devices in a step on the longest rows."""

    target: int  # frozen weights, in the run dtype; of a cut target its part, and what is together
    draft: int  # weights, float32
    optimizer: int  # its state, float32
    average: int  # of the draft's weights, float32; 0 where none is kept
    batch: int  # ids, labels, and the hidden states that the target made of them
    logits: int  # float32, of a chunk of positions: the largest array of the target's pass
    gradients: int  # float32, of one batch, and those summed up where several make an update
    backward: int  # what the loss keeps for its gradient at fill N, before the compiler fuses: the
    # draft's weights in the run dtype too, where that is not float32; and a chunk's logits

    @property
    def fixed(self) -> int:
        """What no smaller batch saves."""
        return self.target + self.draft + self.optimizer + self.average + self.gradients

    @property
    def total(self) -> int:
        """The larger of the target's pass and the draft's, and what is there in both."""
        passes = self.logits, self.gradients + self.backward
        weights = self.target + self.draft + self.optimizer + self.average
        return weights + self.batch + max(passes)


def count_trainer(
    config: TrainConfig,
    target: TargetConfig,
    draft: DraftConfig,
    target_params: Any,
    draft_params: Any,
    device_memory: float | None = None,
) -> TrainerBytes:
    """Traces the target's pass and the training step on parameter trees of shapes.

    Args:
      draft_params: in any dtype; the trainer keeps them in float32.
      device_memory: bytes of a device, for `cut_target` None; None: unknown.
    Raises:
      ConfigError: the settings do not fit each other.
    """
    n_steps = config.steps or 1000  # as many steps as there may be: no shape hangs on it
    schedule = learning_rate(config, n_steps)
    optimizer, average = make_optimizer(config, schedule), make_average(config)
    key = jax.random.key(config.seed)
    init = functools.partial(init_state, optimizer=optimizer, key=key, average=average)
    state = jax.eval_shape(lambda params: init(params), draft_params)

    batch = _longest_batch(config)
    outputs = functools.partial(run_target, target, draft)
    inputs = (batch[name] for name in ("input_ids", "attention_mask", "labels"))
    states, best = jax.eval_shape(outputs, target_params, *inputs)
    batch |= {"states": states, "best": best}
    step = make_train_step(
        target,
        draft,
        optimizer,
        schedule,
        average=average,
        expected_alpha=config.expected_alpha,
        **config.scoring,
    )
    jax.eval_shape(step, state, target_params, [batch] * min(config.accumulate, 2))
    loss = make_loss(target, draft, **config.scoring)
    n_ids = target.vocab_size if draft.draft_ids is None else len(draft.draft_ids)

    def chunk_bytes(n_logits: int) -> int:
        return 4 * n_logits * chunk_rows(best.size, n_logits)

    return TrainerBytes(
        target=_target_bytes(config, target_params, device_memory),
        draft=n_bytes(state.params),
        optimizer=n_bytes(state.opt_state),
        average=n_bytes(state.average),
        batch=n_bytes(batch),
        logits=chunk_bytes(target.vocab_size),
        gradients=n_bytes(state.params) * min(config.accumulate, 2),
        backward=LOGITS_AT_ONCE * chunk_bytes(n_ids)
        + _kept_bytes(
            functools.partial(loss, fill=draft.n_stages), state.params, target_params, batch
        ),
    )


def rows_per_device(config: TrainConfig) -> int:
    """Returns how many of the longest rows a device has of a batch."""
    return -(-(config.batch_tokens // config.sequence_len) // (config.devices or 1))


def _target_bytes(config: TrainConfig, params: Any, device_memory: float | None) -> int:
    n_devices = config.devices or 1
    if not is_cut(config.cut_target, n_devices, params, device_memory):
        return n_bytes(params)
    layers = [n_bytes(layer) for layer in params["layers"]]
    return n_bytes(params) // n_devices + max(layers) + n_bytes(target_ends(params))


def _longest_batch(config: TrainConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of a device's part of a batch of rows of sequence_len tokens."""
    one_row = make_batch([], 1, config.sequence_len)
    del one_row["row_numbers"]  # stays on the host
    shape = (rows_per_device(config), config.sequence_len)
    return {name: jax.ShapeDtypeStruct(shape, x.dtype) for name, x in one_row.items()}


def _kept_bytes(loss: Any, params: Any, *others: Any) -> int:
    """Bytes of what the forward pass of a loss leaves for the backward pass, arguments aside."""

    def forward(params: Any, *others: Any) -> Any:
        return jax.vjp(lambda params: loss(params, *others), params, has_aux=True)[1]

    traced = jax.make_jaxpr(forward)(params, *others).jaxpr
    given = {id(var) for var in traced.invars}
    kept = {id(var): var.aval for var in traced.outvars if not isinstance(var, Literal)}
    return sum(
        math.prod(aval.shape) * aval.dtype.itemsize
        for var, aval in kept.items()
        if var not in given
    )
