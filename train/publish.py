"""The head directories of a run: what `--draft` takes, with its card, beside each checkpoint."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from spd_jax.config import DraftConfig, TargetConfig
from spd_jax.models.bundle import Trained
from spd_jax.weights.heads import save_head
from train.card import Origin, model_card
from train.config import TrainConfig
from train.data import Corpus


def save_run_head(
    directory: Path,
    position: int,
    config: TrainConfig,
    draft: DraftConfig,
    target: TargetConfig,
    params: Any,
    judged: tuple[int, dict[str, Any]] | None,
    corpora: tuple[Corpus | None, Corpus | None] = (None, None),
) -> None:
    """Writes directory/<position> in bfloat16.

    Args:
      judged: the last held-out figures, and after how many updates they were taken.
      corpora: what was trained on, and what was held out.
    Raises:
      ConfigError: the disk refuses.
    """
    card = model_card(position, config, draft, judged, Origin(target, *corpora, command_line()))
    trained = Trained(config.thinking, config.sequence_len)
    path, params = directory / str(position), jax.device_get(params)
    save_head(path, draft, target, params, card, trained=trained)


def command_line(argv: Sequence[str] | None = None) -> str | None:
    """Returns the command that started this process; None where that was not the trainer."""
    argv = list(sys.orig_argv if argv is None else argv)
    module = ["-m", "train.pdm"]
    starts = [i for i in range(len(argv)) if argv[i : i + 2] == module]
    return shlex.join(["python", *argv[starts[0] :]]) if starts else None
