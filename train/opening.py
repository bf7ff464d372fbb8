"""How a run opens: a new one chooses its draft, one that goes on finds it in its record.

What its folder holds is looked at first: later it would cost the updates until then.

settings + target + rows -> settings, draft, head to start from; run.json is written.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from spd_jax.checks import ConfigError, from_fields
from spd_jax.commandline import say
from spd_jax.config import DraftConfig, refuse_v10
from spd_jax.models.draft import check_grows, check_pair, check_row_types
from spd_jax.processes import Processes
from spd_jax.weights import LoadedTarget, load_draft_file
from spd_jax.weights.files import one_line
from train.checkpoint import checkpoint_numbers
from train.config import TrainConfig
from train.data import Corpus
from train.metrics import NAME as METRICS_NAME
from train.record import NAME, read_record, recorded_start, write_record
from train.saver import BEST_NAME, has_other_files
from train.vocabulary import check_same_ids, run_draft_ids

FOLDERS = ("checkpoints", "heads", "tensorboard", "states")  # in a run's folder


def check_workdir(workdir: Path) -> None:
    """Raises ConfigError where a run in that folder would fail at its first save, or lose files."""
    if {*"[]"} & {*str(workdir.absolute())}:  # Orbax reads them as a pattern
        raise ConfigError(
            f"workdir must be a path without [ and ], got {workdir.absolute()}: its checkpoints "
            "could not be read again; name another place"
        )
    try:
        for path in (workdir / name for name in FOLDERS):
            if os.path.lexists(path) and not path.is_dir():
                raise ConfigError(f"{path}: must be a folder; move it away or give a new workdir")
            if path.is_dir() and not os.access(path, os.R_OK | os.W_OK | os.X_OK):
                raise ConfigError(
                    f"{path}: must be writable; change its mode or give a new workdir"
                )
        numbers, heads = checkpoint_numbers(workdir / "checkpoints"), workdir / "heads"
        ahead = [n for n in checkpoint_numbers(heads) if n > max(numbers, default=0)]
        for path in (heads / str(number) for number in ahead):
            if has_other_files(path):
                raise ConfigError(
                    f"{path}: holds files that are no head's, and the run is to write its head "
                    "there; move them away or give a new workdir"
                )
    except OSError as error:
        raise ConfigError(f"{workdir}: cannot look there ({one_line(error)})") from None


def check_begun(workdir: Path) -> None:
    """Raises ConfigError where an earlier run lost its checkpoints: its other files would follow.

    A run that was killed before its first checkpoint has none of them yet: its folder for them,
    and at most the one head that is written before the first.
    """
    heads = checkpoint_numbers(workdir / "heads")
    is_best, metrics = (workdir / BEST_NAME).exists(), workdir / METRICS_NAME
    is_logged = metrics.is_file() and metrics.stat().st_size > 0
    is_gone = not (workdir / "checkpoints").is_dir() and (heads or is_logged)
    if is_gone or is_best or len(heads) > 1:
        raise ConfigError(
            f"{workdir}: holds heads or metrics of an earlier run, whose checkpoints are gone; "
            f"give a new workdir, or remove heads, {METRICS_NAME} and {BEST_NAME} to start anew"
        )


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
        check_begun(workdir)
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


def open_together(
    config: TrainConfig, target: LoadedTarget, corpus: Corpus, processes: Processes
) -> tuple[TrainConfig, DraftConfig, tuple[DraftConfig, Any] | None]:
    """As `open_run`, which the first process does; the others take its settings and draft.

    Its folder needs no place on their disks, but the head to begin from does.
    """
    opened, start = None, None
    if processes.is_first:
        config, draft, start = open_run(config, target, corpus)
        fields = dataclasses.asdict(draft)
        opened = {"draft": fields, "from": config.start_from, "is_new": start is not None}
    opened = processes.gather(opened)[0]
    if not processes.is_first:
        draft = from_fields(DraftConfig, opened["draft"], "process 0")
        config = dataclasses.replace(config, start_from=opened["from"])
        start = read_start(config, target) if opened["is_new"] else None
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
