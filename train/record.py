"""run.json, the record of a run: its settings, its draft (with the draft ids) and its data.

A resumed run takes the draft from here; it may not change what the parameters' shapes or the
average of the weights hang on. A digest tells whether the draft was edited.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from spd_jax.checks import ConfigError, from_fields
from spd_jax.config import DraftConfig
from spd_jax.weights.files import read_json, replace_file
from train.config import TrainConfig

NAME = "run.json"
VERSION = 2  # 1 had no digest, and checkpoints without notes
# These and the data set the batches.
ORDER_FIELDS = ("seed", "sequence_len", "batch_tokens", "accumulate", "packing")
LOSS_FIELDS = ("steps", "epochs", "lr", "warmup_steps", "schedule", "lr_final", "clip_norm")
LOSS_FIELDS += ("b1", "b2", "eps", "weight_decay", "decay_head", "temperature", "loss", "outside")
LOSS_FIELDS += ("tv_weight", "mask_mode", "expected_alpha", "dtype")


def write_record(workdir: Path, config: TrainConfig, draft: DraftConfig, data_sha256: str) -> None:
    """Writes the record, replacing an earlier one.

    Raises:
      ConfigError: the disk refuses.
    """
    drafted = dataclasses.asdict(draft)
    fields = {
        "version": VERSION,
        "config": dataclasses.asdict(config),
        "draft": drafted,
        "draft_sha256": _digest(drafted),
        "data_sha256": data_sha256,
    }
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        replace_file(workdir / NAME, json.dumps(fields).encode())
    except OSError as error:
        raise ConfigError(f"{workdir}: cannot write there ({error}); change workdir") from None


def read_record(
    workdir: Path, config: TrainConfig, fresh: DraftConfig, data_sha256: str
) -> tuple[TrainConfig, DraftConfig, list[str]]:
    """Reads the record of a run to resume.

    Args:
      workdir: of the run.
      config: the settings now.
      fresh: the draft a new run would train, its ids aside.
      data_sha256: of the data now.
    Returns:
      The settings now with the head that the run began from, its draft, and lines about what else
      differs.
    Raises:
      ConfigError: the settings ask for another draft than the record's.
    """
    fields = _read_fields(workdir)
    draft, old = from_fields(DraftConfig, fields["draft"], str(workdir / NAME)), fields["config"]
    _check_draft(workdir, draft, fresh)
    _check_settings(workdir, config, old, draft)
    notes = _changes(config, old)
    if fields.get("data_sha256") != data_sha256:
        notes.insert(0, "the training data differ from the run's so far; the new ones are used")
    return dataclasses.replace(config, start_from=old.get("start_from")), draft, notes


def _read_fields(workdir: Path) -> dict[str, Any]:
    """Returns the record as it was written, or raises ConfigError."""
    try:
        if not (workdir / NAME).exists():
            raise ConfigError(f"{workdir / NAME}: no such file")
        fields = read_json(workdir / NAME)
    except ConfigError as error:
        raise ConfigError(
            f"{error}: the checkpoints in {workdir} are of no use without it; put it back from a "
            "backup, or give a new workdir"
        ) from None
    if fields.get("version") != VERSION:
        raise ConfigError(
            f"{workdir / NAME}: must be of version {VERSION}, got {fields.get('version')!r:.60}: "
            "its checkpoints lack what a run now needs; give a new workdir"
        )
    for name in ("config", "draft"):
        if not isinstance(fields.get(name), dict):
            raise ConfigError(
                f"{workdir / NAME}: {name} must be an object, got {fields.get(name)!r:.60}; give a "
                "new workdir"
            )
    if _digest(fields["draft"]) != fields.get("draft_sha256"):
        raise ConfigError(
            f"{workdir / NAME}: its draft is not the one this run trains (draft_sha256 differs); "
            "put the file back as it was, or give a new workdir"
        )
    return fields


def _check_draft(workdir: Path, draft: DraftConfig, fresh: DraftConfig) -> None:
    for field in dataclasses.fields(DraftConfig):
        before, now = getattr(draft, field.name), getattr(fresh, field.name)
        if field.name != "draft_ids" and before != now:
            raise ConfigError(
                f"the run in {workdir} trains a draft with {field.name} {before}, the settings "
                f"say {now}; change it back or give a new workdir"
            )


def _check_settings(
    workdir: Path, config: TrainConfig, old: dict[str, Any], draft: DraftConfig
) -> None:
    n_ids = None if draft.draft_ids is None else len(draft.draft_ids)
    if config.draft_vocab is None and n_ids != config.draft_vocab_size:
        name, before = "draft_vocab_size", n_ids
        if old.get("draft_vocab") is not None:
            name, before = "draft_vocab", old["draft_vocab"]
        raise ConfigError(
            f"the run in {workdir} has {name} {before}, the settings say {getattr(config, name)}; "
            "change it back or give a new workdir"
        )
    if config.ema != old.get("ema"):
        raise ConfigError(
            f"the run in {workdir} has ema {old.get('ema')}, the settings say {config.ema}; change "
            "it back or give a new workdir"
        )


def _changes(config: TrainConfig, old: dict[str, Any]) -> list[str]:
    """Returns lines about settings that differ from the record's and may."""
    notes = []
    if config.start_from not in (None, old.get("start_from")):
        notes.append("start_from is for a new run and is ignored: this one has begun")
    for name in ORDER_FIELDS + LOSS_FIELDS:
        before, now = old.get(name), getattr(config, name)
        if before != now:
            what = "batches come in another order" if name in ORDER_FIELDS else "this holds"
            notes.append(f"{name} was {before} and is {now}: {what} from here on")
    return notes


def recorded_start(workdir: Path) -> str | None:
    """Returns the head that a run without a checkpoint was to begin from; None: from no head."""
    try:
        config = read_json(workdir / NAME).get("config")
    except ConfigError as error:
        raise ConfigError(f"{error}; remove it to start anew, or give a new workdir") from None
    start = config.get("start_from") if isinstance(config, dict) else None
    return start if isinstance(start, str) else None


def _digest(draft: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(draft, sort_keys=True).encode()).hexdigest()
