"""How a run opens: a new one chooses its draft, one that goes on finds it in its record.

settings + target + rows -> settings, draft, head to start from; run.json is written.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from spd_jax.checks import ConfigError
from spd_jax.commandline import say
from spd_jax.config import DraftConfig, refuse_v10
from spd_jax.models.draft import check_grows, check_pair, check_row_types
from spd_jax.weights import LoadedTarget, load_draft_file
from train.checkpoint import checkpoint_numbers
from train.config import TrainConfig
from train.data import Corpus
from train.record import NAME, read_record, recorded_start, write_record
from train.vocabulary import check_same_ids, run_draft_ids


def open_run(
    config: TrainConfig, target: LoadedTarget, corpus: Corpus
) -> tuple[TrainConfig, DraftConfig, tuple[DraftConfig, Any] | None]:
    """Returns the settings, the draft to train and the head to begin from, and records the run.

    A run that is in `workdir` already goes on with its draft, from its last checkpoint.
    """
    workdir, start = Path(config.workdir), None
    draft = config.draft_config(target.config, None, target.sha256)
    if checkpoint_numbers(workdir / "checkpoints"):
        config, draft, notes = read_record(workdir, config, draft, corpus.sha256)
        for note in notes:
            say(f"note: {note}")
        check_same_ids(config, draft, target)
    else:
        if (workdir / NAME).exists():
            say(f"note: the run in {workdir} has no checkpoint; it starts anew")
            began_from = recorded_start(workdir)
            if config.start_from is None and began_from is not None:
                say(f"note: it starts from {began_from}, as before; give a new workdir if not")
                config = dataclasses.replace(config, start_from=began_from)
        start = None if config.start_from is None else read_start(config, target)
        among = None if start is None else start[0].draft_ids
        ids, mass = run_draft_ids(config, corpus.rows, target, among)
        if ids is not None:
            say(f"{len(ids)} draft ids cover {mass:.2%} of the scored training ids")
            draft = dataclasses.replace(draft, draft_ids=ids)
    check_pair(target.config, draft)
    if start is not None:
        check_grows(target.config, draft, start[0])
    check_row_types(target.config, draft)
    write_record(workdir, config, draft, corpus.sha256)
    return config, draft, start


def read_start(config: TrainConfig, target: LoadedTarget) -> tuple[DraftConfig, Any]:
    """Returns the config and the parameters of the head to start from.

    Raises:
      ConfigError: it belongs to another target, or no run can go on from its kind.
    """
    draft, params, _ = load_draft_file(config.start_from, "float32")
    refuse_v10(draft, f"start_from {config.start_from}", "trained further")
    if draft.target_sha256 != target.sha256:
        raise ConfigError(
            f"start_from {config.start_from} belongs to the target with sha256 "
            f"{draft.target_sha256}, {config.target} has {target.sha256}; give a head of this "
            "target"
        )
    return draft, params
