"""run.json, the record of a run: its settings, its draft (with the draft ids) and its data.

A resumed run takes the draft from here; it may not change what the parameters' shapes hang on.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from spd_jax.checks import ConfigError, from_fields
from spd_jax.config import DraftConfig
from spd_jax.weights.files import read_json, replace_file
from train.config import TrainConfig

NAME = "run.json"
ORDER_FIELDS = ("seed", "sequence_len", "batch_tokens", "packing")  # and the data: the batches
LOSS_FIELDS = ("steps", "epochs", "lr", "warmup_steps", "schedule", "clip_norm", "b2")
LOSS_FIELDS += ("weight_decay", "temperature", "loss", "outside", "tv_weight", "mask_mode")
LOSS_FIELDS += ("expected_alpha", "dtype")


def write_record(workdir: Path, config: TrainConfig, draft: DraftConfig, data_sha256: str) -> None:
    """Writes the record, replacing an earlier one.

    Raises:
      ConfigError: the disk refuses.
    """
    fields = {
        "config": dataclasses.asdict(config),
        "draft": dataclasses.asdict(draft),
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
    fields = read_json(workdir / NAME)
    for name in ("config", "draft"):
        if not isinstance(fields.get(name), dict):
            raise ConfigError(
                f"{workdir / NAME}: {name} must be an object, got {fields.get(name)!r:.60}; give a "
                "new workdir"
            )
    draft = from_fields(DraftConfig, fields["draft"], str(workdir / NAME))
    for field in dataclasses.fields(DraftConfig):
        before, now = getattr(draft, field.name), getattr(fresh, field.name)
        if field.name != "draft_ids" and before != now:
            raise ConfigError(
                f"the run in {workdir} trains a draft with {field.name} {before}, the settings "
                f"say {now}; change it back or give a new workdir"
            )
    n_ids = None if draft.draft_ids is None else len(draft.draft_ids)
    if config.draft_vocab is None and n_ids != config.draft_vocab_size:
        raise ConfigError(
            f"the run in {workdir} has draft_vocab_size {n_ids}, the settings say "
            f"{config.draft_vocab_size}; change it back or give a new workdir"
        )
    old, notes = fields["config"], []
    if fields.get("data_sha256") != data_sha256:
        notes.append("the training data differ from the run's so far; the new ones are used")
    began_from = old.get("start_from")
    if config.start_from not in (None, began_from):
        notes.append("start_from is for a new run and is ignored: this one has begun")
    config = dataclasses.replace(config, start_from=began_from)
    for name in ORDER_FIELDS + LOSS_FIELDS:
        before, now = old.get(name), getattr(config, name)
        if before != now:
            what = "batches come in another order" if name in ORDER_FIELDS else "this holds"
            notes.append(f"{name} was {before} and is {now}: {what} from here on")
    return config, draft, notes
