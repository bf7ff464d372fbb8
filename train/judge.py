"""All that a run finds out about a head on held-out rows: when each figure is taken.

Each evaluation scores the rows; the last one also at other numbers of stages; now and then a few
prompts are decoded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import optax

from spd_jax.checks import ConfigError
from spd_jax.config import DraftConfig, PipelineConfig
from spd_jax.weights import LoadedTarget
from train.config import TrainConfig
from train.data import Row
from train.evaluate import EvalStep, Figures, evaluate, make_eval_step
from train.parallel import Devices, first_copy, one_device
from train.teacher import Teacher
from train.trial import Trial


class Judge:
    """Turns draft parameters into held-out figures by group of rows."""

    def __init__(
        self,
        config: TrainConfig,
        target: LoadedTarget,
        target_params: Any,  # on the devices
        draft: DraftConfig,
        teacher: Teacher,
        rows: Sequence[Row],
        devices: Devices | None = None,
    ) -> None:
        """Prepares what is compiled once.

        Raises:
          ConfigError: eval_stages or decode_tokens do not fit the target, or a decode its cut.
        """
        for n in config.eval_stages:
            PipelineConfig(target.config.n_layers, n)  # for its error, before hours of training
        self._config, self._target, self._target_params = config, target, target_params
        self._draft, self._teacher, self._rows = draft, teacher, rows
        self._devices = devices or one_device()
        self._eval_step = make_eval_step(
            target.config, draft, config.scoring["loss"], config.temperature, self._devices
        )
        self._trial = None
        if config.decode_every:
            if self._devices.cuts_target:
                raise ConfigError(
                    "decode_every needs the whole target on a device, and it is cut over "
                    f"{self._devices.n}; set decode_every 0 or cut_target False"
                )
            self._trial = Trial(
                target,
                first_copy(target_params),
                draft,
                rows,
                config.decode_rows,
                config.decode_tokens,
            )

    def __call__(self, params: Any, position: int, is_last: bool) -> Figures:
        """Returns the figures of `evaluate`.

        After the last batch also alpha_by_stages and tau_by_stages by `eval_stages`; in group
        "all", where it is time, decode: what a true decode gave.

        Args:
          params: the draft's; they are read and not kept.
          position: batches trained on.
          is_last: the run ends here.
        """
        dtype = self._target_params["embed"]["weight"].dtype  # as it will decode
        params = optax.tree.cast(params, dtype)
        figures = self._evaluate(self._eval_step, params)
        if is_last:
            for n in self._config.eval_stages:
                self._add_stages(figures, params, n)
        if self._trial:
            number = position // self._config.eval_every
            if is_last or number % self._config.decode_every == 0:
                figures["all"]["decode"] = self._trial(first_copy(params))
        return figures

    def _evaluate(self, eval_step: EvalStep, params: Any) -> Figures:
        return evaluate(
            eval_step, self._teacher, self._target_params, params, self._rows, self._config
        )

    def _add_stages(self, figures: Figures, params: Any, n_stages: int) -> None:
        """Adds what the head accepts at another number of stages: its depth map is recomputed."""
        other = dataclasses.replace(self._draft, n_stages=n_stages, stage_layers=None)
        eval_step = make_eval_step(self._target.config, other, devices=self._devices)
        for group, rates in self._evaluate(eval_step, params).items():
            for name in ("alpha", "tau"):
                by_stages = figures[group].setdefault(f"{name}_by_stages", {})
                by_stages[str(n_stages)] = rates[name]
