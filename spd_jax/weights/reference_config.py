"""The settings in a head of the public SPD reference: its `config`, or head_config.json.

Each function reads one of them, checks it against the others, and names the file in its errors.
"""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Any

import numpy as np

from spd_jax.checks import ConfigError
from spd_jax.weights.files import one_line

VERSIONS = (10, 11, 12)
FALLBACK = "spec_intermediate_size_fallback"  # MLP width for targets that name none


def version_of(config: dict[str, Any], source: Path) -> int:
    """Returns 10, 11 or 12; a head that does not say (or says 0) is of version 11."""
    version = config.get("version")
    if version is not None and (type(version) is not int or version not in (0, *VERSIONS)):
        raise ConfigError(
            f"{source}: version {_shown(version)} of the reference's heads is not supported; "
            "give v10, v11 or v12"
        )
    return version or 11


def anchors(config: dict[str, Any], source: Path) -> tuple[int, ...]:
    """Returns the hidden-state indices that a head of version 11 or 12 reads."""
    bound = ints(config, "aggr_feature_bound", source)
    n_types = config.get("num_aggr_types")
    if n_types is not None and n_types != len(bound):
        raise ConfigError(
            f"{source}: num_aggr_types {_shown(n_types)} contradicts aggr_feature_bound, which "
            f"names {len(bound)}"
        )
    return bound


def row_anchors(config: dict[str, Any], source: Path) -> tuple[tuple[int, ...], ...]:
    """Returns the hidden-state indices of the rows of depth N, ..., 1 as stored, and of depth 0."""
    name, n_stages = "shallow_hidden_layer_indices", count(config, "num_stages", source)
    rows = config.get(name)
    if not isinstance(rows, (list, tuple)) or len(rows) != n_stages:
        raise ConfigError(
            f"{source}: {name} must be {n_stages} lists (num_stages), got {_shown(rows)}"
        )
    return (*(ints({name: row}, name, source) for row in rows), (0,))


def draft_ids(
    config: dict[str, Any], n_rows: int, vocab_size: int, source: Path
) -> tuple[int, ...] | None:
    """Returns the sorted ids of the head's rows, None for the whole vocabulary."""
    if config.get("draft_token_ids") is None:
        if n_rows != vocab_size:
            raise ConfigError(
                f"{source}: lm_head has {n_rows} rows for {vocab_size} ids, and no draft_token_ids"
            )
        return None
    ids = tuple(sorted(set(ints(config, "draft_token_ids", source))))
    if len(ids) != n_rows or ids[0] < 0 or ids[-1] >= vocab_size:
        raise ConfigError(
            f"{source}: draft_token_ids must be {n_rows} different ids (the rows of lm_head) below"
            f" {vocab_size}, got {len(ids)} from {ids[0]} to {ids[-1]}"
        )
    return None if len(ids) == vocab_size else ids


def stage_layers(
    config: dict[str, Any], version: int, bound: tuple[int, ...], source: Path
) -> tuple[int, ...] | None:
    """Returns the layers of each stage; None for an even split.

    They stand in stage_layers, in stage_layer_ranges, or in both.

    Args:
      bound: the anchors, which the layers must reach.
    Raises:
      ConfigError: a field is malformed, both contradict each other or num_stages or the anchors,
        or a version 12 head has neither.
    """
    counts, spans = _stage_counts(config, source), _range_counts(config, source)
    if counts is not None and spans is not None and counts != spans:
        raise ConfigError(
            f"{source}: stage_layers {counts} and stage_layer_ranges (sizes {spans}) contradict "
            "each other"
        )
    stages = spans if counts is None else counts
    if stages is None:
        if version == 12:
            raise ConfigError(
                f"{source}: a v12 head must have stage_layers or stage_layer_ranges; add the "
                "layers of each stage, or make it version 11 where they are even"
            )
        return None
    n_stages = count(config, "num_stages", source)
    if len(stages) != n_stages or min(stages) < 1:
        raise ConfigError(
            f"{source}: stage_layers must be {n_stages} positive counts (num_stages), got {stages}"
        )
    if bound[-1] > sum(stages):
        raise ConfigError(
            f"{source}: aggr_feature_bound goes to {bound[-1]}, but the stages {stages} have "
            f"{sum(stages)} layers in all"
        )
    return stages


def _stage_counts(config: dict[str, Any], source: Path) -> tuple[int, ...] | None:
    """Reads stage_layers: counts [4, 4] or "4;4", or one list a stage, [[4], [4]] or the indices of
    its layers [[0, 1, 2, 3], [4, 5, 6, 7]]."""
    name = "stage_layers"
    value = config.get(name)
    if value is None:
        return None
    if isinstance(value, str):
        try:
            return tuple(int(part) for part in value.split(";"))
        except ValueError:
            raise ConfigError(f"{source}: {name} must look like '4;4;4'") from None
    if not isinstance(value, (list, tuple)) or not all(isinstance(i, (list, tuple)) for i in value):
        return ints(config, name, source)
    rows = [ints({name: row}, name, source) for row in value]
    flat = [i for row in rows for i in row]
    if flat and flat == list(range(len(flat))):
        return tuple(len(row) for row in rows)
    if flat and len(flat) == len(rows):
        return tuple(flat)
    raise ConfigError(
        f"{source}: {name} must be the layers of each stage, as counts or as lists of indices 0, "
        f"1, ... in order, got {_shown(value)}"
    )


def _range_counts(config: dict[str, Any], source: Path) -> tuple[int, ...] | None:
    """Reads stage_layer_ranges, [start, end) of each stage."""
    name = "stage_layer_ranges"
    value = config.get(name)
    if value is None:
        return None
    spans = value if isinstance(value, (list, tuple)) else [value]
    ranges = [ints({name: span}, name, source) for span in spans]
    starts_at = 0
    for span in ranges:
        if len(span) != 2 or span[0] != starts_at or span[1] <= span[0]:
            raise ConfigError(
                f"{source}: {name} must be pairs of a first layer and the one after the last, each "
                f"going on where the one before ends, got {_shown(value)}"
            )
        starts_at = span[1]
    return tuple(end - start for start, end in ranges) or None


def ints(config: dict[str, Any], name: str, source: Path) -> tuple[int, ...]:
    """Returns a list of integers, which must not be empty."""
    value = config.get(name)
    value = value.tolist() if isinstance(value, np.ndarray) else value
    whole = isinstance(value, (list, tuple)) and all(type(i) is int for i in value)
    if not whole or not value:
        found = _shown(value)
        raise ConfigError(f"{source}: {name} must be a list of integers, got {found}")
    return tuple(value)


def count(config: dict[str, Any], name: str, source: Path, default: int | None = None) -> int:
    """Returns a positive integer."""
    value = config.get(name, default)
    if type(value) is not int or value < 1:
        raise ConfigError(f"{source}: {name} must be a positive integer, got {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    return one_line(reprlib.repr(value))  # bounded in depth and length, whatever a file holds
