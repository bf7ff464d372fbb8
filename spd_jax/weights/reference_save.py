"""Writes heads in version 11 of the public SPD reference's format, for those who run that program.

parameter tree -> its tensor names -> head.pt, and head.safetensors beside head_config.json
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from spd_jax.checks import ConfigError
from spd_jax.config import AnyDraftConfig, DraftConfig, PipelineConfig, TargetConfig, refuse_v10
from spd_jax.models.draft import DEFAULT_D_FF, mlp_width
from spd_jax.weights import keymaps
from spd_jax.weights.directories import whole_directory
from spd_jax.weights.files import check_out, found_at, one_line, replacing
from spd_jax.weights.heads import draft_sizes
from spd_jax.weights.loaded import run_dtype
from spd_jax.weights.reference_config import FALLBACK, version_of
from spd_jax.weights.reference_head import CONFIG_NAME, TENSORS_NAME, open_pickle
from spd_jax.weights.torch_zip import save_torch_zip

VERSION = 11
PICKLE_NAME = "head.pt"
NEEDED = {"feature_norm": "none", "qk_norm": True, "head": "own"}  # all that the format can hold

log = logging.getLogger("spd_jax")


def save_reference_head(
    path: str | Path,
    config: AnyDraftConfig,
    target: TargetConfig | Mapping[str, Any],
    params: dict[str, Any],
    *,
    base_model_path: str = "",
    dtype: str = "bfloat16",
    replace: bool = False,
) -> list[Path]:
    """Writes a head that the reference implementation can serve.

    What it cannot serve faithfully (uneven stages, an anchor at the last layer's output) is
    written too, and said in a line each.

    Args:
      path: `*.pt` is that one file; any other name is a directory with head.pt, and the same
        tensors as head.safetensors beside head_config.json.
      target: its config, or what `load_draft_file` returned of it.
      params: the draft's parameter tree.
      base_model_path: where the reference is to look for the target; its users give their own.
      dtype: of the stored weights; the reference publishes bfloat16.
      replace: whether to replace what is there, if it is nothing but such a head.
    Returns:
      the files written.
    Raises:
      ConfigError: the format cannot hold this head, something is there already, or the disk
        refuses.
    """
    path = Path(path)
    facts = target if isinstance(target, Mapping) else dataclasses.asdict(target)
    config = _expressible(config, facts)
    _check_free(path, replace)
    tensors = _tensors(config, facts, params, dtype)
    fields = _fields(config, facts, base_model_path)
    for line in _unfaithful(config, facts):
        log.warning("%s: %s", path, line)
    try:
        if path.suffix == ".pt":
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                save_torch_zip(file, {"state_dict": tensors, "config": fields})
            return [path]
        names = (PICKLE_NAME, TENSORS_NAME, CONFIG_NAME)
        with whole_directory(path, set(names)) as work:
            with open(work / PICKLE_NAME, "wb") as file:
                save_torch_zip(file, {"state_dict": tensors, "config": fields})
            save_file(tensors, str(work / TENSORS_NAME), metadata={"format": "pt"})
            (work / CONFIG_NAME).write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot write the head ({one_line(error)})") from None
    return [path / name for name in names]


def _expressible(config: AnyDraftConfig, target: Mapping[str, Any]) -> DraftConfig:
    """Returns the config; raises ConfigError where the format has no place for a setting."""
    refuse_v10(config, "export", "saved as version 11")
    wrong = [f"{name} {getattr(config, name)}" for name, only in NEEDED.items()
             if getattr(config, name) != only]  # fmt: skip
    if wrong:
        raise ConfigError(
            f"the reference implementation's format cannot hold a head with {', '.join(wrong)}; a "
            "head that is trained with feature_norm none, qk_norm true and head own can be exported"
        )
    width = mlp_width(target.get("d_ff"), config.d_ff)
    if target.get("d_ff") not in (None, width):
        raise ConfigError(
            f"the reference implementation gives its layers the target's MLP width "
            f"{target['d_ff']}, this head has d_ff {width}; train it without d_ff to export it"
        )
    if len(config.anchors) > config.n_stages + 1:
        raise ConfigError(
            f"the reference implementation takes at most {config.n_stages + 1} anchors for "
            f"{config.n_stages} stages, got {len(config.anchors)}"
        )
    return config


def _check_free(path: Path, replace: bool) -> None:
    if path.suffix in (".safetensors", ".json"):
        raise ConfigError(
            f"{path}: give a name that ends in .pt, or a directory: it gets {TENSORS_NAME} beside "
            f"{CONFIG_NAME}"
        )
    is_there = found_at(path) is not None
    if is_there and not replace:
        raise ConfigError(f"{path} is there already; give another place, or say --replace")
    if path.suffix == ".pt" and path.is_dir():
        raise ConfigError(f"{path} is a directory; give another place")
    if path.suffix == ".pt" and is_there:
        check_out(path, "the head")
        _check_head(path)


def _check_head(path: Path) -> None:
    """Raises ConfigError unless a file is a head of this version: nothing else is replaced."""
    try:
        fields, _ = open_pickle(path)
        found = version_of(fields, path)
    except ConfigError as error:
        raise ConfigError(
            f"{path}: not replaced, it is no head ({one_line(error)}); give another place"
        ) from None
    if found != VERSION:
        raise ConfigError(
            f"{path}: not replaced, it is a head of version {found}; give another place"
        )


def _tensors(
    config: DraftConfig, target: Mapping[str, Any], params: dict[str, Any], dtype: str
) -> dict[str, np.ndarray]:
    """Returns the tensors by the reference's names, and says where the cast loses bits."""
    to, is_rounded, tensors = run_dtype(dtype), False, {}
    named = keymaps.write_draft(
        config,
        params,
        keymaps.REFERENCE_PROJ,
        keymaps.REFERENCE_LAYER_PREFIX,
        draft_sizes(config, target),
    )
    for name, array in named:
        tensors[name] = array.astype(to)
        is_rounded |= not np.array_equal(tensors[name].astype(array.dtype), array)
    if is_rounded:
        log.warning("the weights are rounded to %s; dtype float32 keeps more of them", dtype)
    return tensors


def _fields(config: DraftConfig, target: Mapping[str, Any], base_model_path: str) -> dict[str, Any]:
    """Returns the settings by the reference's names."""
    ids, stages = config.draft_ids, _stage_layers(config, target)
    fields = {
        "hidden_size": target["d_model"],
        "vocab_size": target["vocab_size"],
        "draft_vocab_size": target["vocab_size"] if ids is None else len(ids),
        "num_stages": config.n_stages,
        "num_spec_layers": config.n_layers,
        "num_aggr_types": len(config.anchors),
        "version": VERSION,
        "trained_with_use_deepest": True,  # rows of their deepest type, as decoding has them here
        "aggr_feature_bound": list(config.anchors),
        "base_model_path": base_model_path,
        FALLBACK: _fallback(config, target),
    }
    if "model_type" in target:
        fields["model_type"] = target["model_type"]
    if stages is not None:
        fields["stage_layers"] = list(stages)
    if ids is not None:
        fields["draft_token_ids"] = list(ids)
    return fields


def _fallback(config: DraftConfig, target: Mapping[str, Any]) -> int:
    """The MLP width that the reference takes where its target names none."""
    if target.get("d_ff") is not None:
        return DEFAULT_D_FF
    return target.get(FALLBACK) or mlp_width(None, config.d_ff)


def _stage_layers(config: DraftConfig, target: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The layers of each stage where they must be told: without them the reference cuts evenly."""
    n_layers = target.get("n_layers")
    if config.stage_layers is None and n_layers is not None and n_layers % config.n_stages:
        return PipelineConfig(n_layers, config.n_stages).stage_layers
    return config.stage_layers


def _unfaithful(config: DraftConfig, target: Mapping[str, Any]) -> list[str]:
    """Returns lines about what the reference will do otherwise than this package."""
    lines, last = [], config.anchors[-1]
    if last == target.get("n_layers"):
        lines.append(
            f"anchor {last} is the last layer's output, read here before the final norm; the "
            f"reference reads it after that norm on the prompt; end the anchors below {last}"
        )
    stages = _stage_layers(config, target)
    if stages is not None and len(set(stages)) > 1:
        lines.append(
            f"stages of {', '.join(map(str, stages))} layers: only the reference's distributed "
            "workers cut unevenly; its single-process program does not"
        )
    return lines
