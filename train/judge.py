"""All that a run finds out about a head on held-out rows: when each figure is taken.

Each evaluation scores the rows; the last one also at other numbers of stages; now and then a few
prompts are decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optax

from spd_jax.checks import ConfigError
from spd_jax.config import DraftConfig
from spd_jax.weights import LoadedTarget
from train.config import TrainConfig
from train.data import Row
from train.evaluate import Figures, at_stages, evaluate, make_eval_step
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
        n_layers = target.config.n_layers
        self._others = {str(n): at_stages(draft, n, n_layers) for n in config.eval_stages}
        self._config, self._target, self._target_params = config, target, target_params
        self._teacher, self._rows = teacher, rows
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

        After the last update also alpha_by_stages and tau_by_stages by `eval_stages`; in group
        "all", where it is time, decode: what a true decode gave.

        Args:
          params: the draft's; they are read and not kept.
          position: updates made.
          is_last: the run ends here.
        """
        dtype = self._target_params["embed"]["weight"].dtype  # as it will decode
        params = optax.tree.cast(params, dtype)
        others = self._others if is_last else {}
        steps = [
            make_eval_step(self._target.config, draft, devices=self._devices)
            for draft in others.values()
        ]
        figures, *found = evaluate(
            [self._eval_step, *steps],
            self._teacher,
            self._target_params,
            params,
            self._rows,
            self._config.sequence_len,
            self._config.batch_tokens,
        )
        for n_stages, at_others in zip(others, found, strict=True):
            for group, rates in at_others.items():
                for name in ("alpha", "tau"):
                    by_stages = figures[group].setdefault(f"{name}_by_stages", {})
                    by_stages[n_stages] = rates[name]
        if self._trial:
            number = position // self._config.eval_every
            if is_last or number % self._config.decode_every == 0:
                if self._devices.is_first:  # the others wait before the next update
                    figures["all"]["decode"] = self._trial(first_copy(params))
        return figures
