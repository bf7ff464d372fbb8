"""The engine's parameters: per local rank its layer slots, the aggregator and the heads."""

from __future__ import annotations

import dataclasses
import functools

import jax

from spd_jax.pipeline.heads import Heads
from spd_jax.pipeline.slots import Packed


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["ranks", "projs", "heads"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class EngineWeights:
    """As a program sees them on one device."""

    ranks: list[list[dict] | Packed]  # per local rank: its layers; on a mesh: packed slots
    projs: list[dict]  # the PDM's aggregation matrices, replicated
    heads: Heads  # this device's shard
