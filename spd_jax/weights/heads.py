"""Our published head directories: config.json + model.safetensors + README.md (model card)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from spd_jax.checks import ConfigError, from_fields, suggest
from spd_jax.config import DraftConfig, PipelineConfig, TargetConfig, refuse_v10
from spd_jax.models.bundle import Trained
from spd_jax.models.draft import mlp_width
from spd_jax.weights import keymaps
from spd_jax.weights.directories import whole_directory
from spd_jax.weights.files import one_line, read_json
from spd_jax.weights.lazy import LazyArray
from spd_jax.weights.loaded import run_dtype
from spd_jax.weights.tensors import TensorFile

FORMAT, VERSION = "spd_jax.pdm", 1
CONFIG_NAME, TENSORS_NAME, CARD_NAME = "config.json", "model.safetensors", "README.md"
HEAD_FILES = {CONFIG_NAME, TENSORS_NAME, CARD_NAME}
TARGET_FACTS = ("model_type", "attn_gate")
TARGET_SIZES = ("d_model", "vocab_size", "n_heads", "n_kv_heads", "head_dim", "d_ff", "n_layers")


def save_head(
    directory: str | Path,
    config: DraftConfig,
    target: TargetConfig,
    params: dict[str, Any],
    card: str,
    dtype: str = "bfloat16",
    trained: Trained | None = None,
) -> None:
    """Writes a head directory, replacing one that is there.

    Args:
      directory: its path; the parent is made where it lacks.
      config: the draft's settings.
      target: the geometry of the target it belongs to.
      params: the draft's parameter tree.
      card: the model card's text (Markdown).
      dtype: of the stored weights.
      trained: how it was trained; None: nothing is recorded.
    Raises:
      ConfigError: the path holds something else, or the disk refuses.
    """
    refuse_v10(config, str(directory), "saved as a head directory")
    directory, to = Path(directory), run_dtype(dtype)
    tensors = {
        name: array.astype(to)
        for name, array in keymaps.write_draft(
            config,
            params,
            keymaps.PDM_PROJ,
            keymaps.PDM_LAYER_PREFIX,
            draft_sizes(config, dataclasses.asdict(target)),
        )
    }
    draft = dataclasses.asdict(config)
    if draft.pop("draft_ids") is not None:
        tensors[keymaps.DRAFT_IDS] = np.asarray(config.draft_ids, np.int32)
    described = {name: getattr(target, name) for name in (*TARGET_SIZES, *TARGET_FACTS)}
    fields = {"format": FORMAT, "version": VERSION, "draft": draft, "target": described}
    if trained is not None:
        fields["trained"] = dataclasses.asdict(trained)
    try:
        with whole_directory(directory, HEAD_FILES) as work:
            save_file(tensors, str(work / TENSORS_NAME), metadata={"format": "pt"})
            (work / CONFIG_NAME).write_text(json.dumps(fields, indent=2) + "\n")
            # A path on the card may hold bytes that no text can: they are shown, not an error.
            (work / CARD_NAME).write_text(card, encoding="utf-8", errors="backslashreplace")
    except (OSError, SafetensorError) as error:  # the second: a disk that fills up in save_file
        raise ConfigError(f"{directory}: cannot write the head ({one_line(error)})") from None


def load_head_dir(
    directory: str | Path, dtype: str
) -> tuple[DraftConfig, dict[str, Any], dict[str, Any]]:
    """Reads a head directory.

    Returns:
      its DraftConfig; its parameter tree of numpy arrays in the run dtype; the geometry of its
      target by TargetConfig's names (`TARGET_SIZES` and `TARGET_FACTS`).
    Raises:
      ConfigError: not such a directory, a misspelt field, or weights that do not fit it.
    """
    directory, to = Path(directory), run_dtype(dtype)
    path = directory / CONFIG_NAME
    fields = read_json(path)
    if fields.get("format") != FORMAT or fields.get("version") != VERSION:
        found = f"{fields.get('format')!r} version {fields.get('version')!r}"
        raise ConfigError(f"{path}: must be {FORMAT!r} version {VERSION}, got {one_line(found)}")
    draft, target = fields.get("draft"), fields.get("target")
    if not isinstance(draft, dict) or not isinstance(target, dict):
        raise ConfigError(f"{path}: must hold the objects 'draft' and 'target'")
    _check_target(target, path)
    if "draft_ids" in draft:
        raise ConfigError(f"{path}: draft_ids are kept in {TENSORS_NAME}; remove them here")
    tensors = TensorFile(directory / TENSORS_NAME)
    left = set(tensors.names)
    if keymaps.DRAFT_IDS in left:
        left.discard(keymaps.DRAFT_IDS)
        draft = {**draft, "draft_ids": tensors.take_ints(keymaps.DRAFT_IDS).tolist()}
    config = from_fields(DraftConfig, draft, str(path))
    try:
        PipelineConfig(target["n_layers"], config.n_stages, config.stage_layers)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if config.draft_ids is not None and config.draft_ids[-1] >= target["vocab_size"]:
        raise ConfigError(f"{path}: draft_ids must be below vocab_size {target['vocab_size']}")

    def take(name: str, shape: tuple[int, ...]) -> LazyArray:
        left.discard(name)
        return tensors.take(name, shape, to)

    params = keymaps.read_draft(
        config, keymaps.PDM_PROJ, keymaps.PDM_LAYER_PREFIX, draft_sizes(config, target), take
    )
    if left:
        raise ConfigError(f"{tensors.path}: unknown tensor {min(left)}; does it fit {CONFIG_NAME}?")
    return config, jax.tree.map(np.asarray, params), target


def read_trained(source: str | Path) -> Trained | None:
    """Returns how a head was trained; None where it is no head directory or does not say.

    Raises:
      ConfigError: what it says cannot be.
    """
    path = Path(source) / CONFIG_NAME
    fields = read_json(path).get("trained") if path.is_file() else None
    if fields is None:
        return None
    if not isinstance(fields, dict):
        raise ConfigError(f"{path}: 'trained' must be an object, got {one_line(repr(fields))}")
    return from_fields(Trained, fields, str(path))


def _check_target(target: dict[str, Any], path: Path) -> None:
    """Raises ConfigError unless these are the sizes and the type of a target."""
    known = (*TARGET_SIZES, *TARGET_FACTS)
    for name in target:
        if name not in known:
            raise ConfigError(f"{path}: unknown field {name!r} of 'target'; {suggest(name, known)}")
    for name in TARGET_SIZES:
        value = target.get(name)
        if (type(value) is not int or value < 1) and not (name == "d_ff" and value is None):
            raise ConfigError(f"{path}: target.{name} must be a positive integer, got {value!r}")
    if type(target.get("attn_gate", False)) is not bool:
        raise ConfigError(f"{path}: target.attn_gate must be true or false")
    if not isinstance(target.get("model_type"), str):
        raise ConfigError(f"{path}: target.model_type must be a text, like 'llama'")


def draft_sizes(config: DraftConfig, target: Mapping[str, Any]) -> dict[str, int]:
    """Returns the sizes of a draft's leaves; `target`: geometry by TargetConfig's names."""
    ids = config.draft_ids
    heads = (target["n_heads"], target["n_kv_heads"], target["head_dim"])
    return keymaps.attention_sizes(*heads, target.get("attn_gate", False)) | {
        "D": target["d_model"],
        "F": mlp_width(target.get("d_ff"), config.d_ff),
        "W": target["vocab_size"] if ids is None else len(ids),
    }
