"""What each rank of a mesh holds in bytes, counted on the arrays of an engine or on their shapes.

`shape_engine` lays shapes out with the code that places weights; all ranks allocate alike.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

import jax
from jax.sharding import PartitionSpec

from spd_jax.pipeline.mesh import abstract_mesh
from spd_jax.pipeline.placing import (
    EVERYWHERE,
    ON_RANK,
    Layout,
    mesh_weights,
    shard_target,
    wasted_bytes,
    weight_specs,
)
from spd_jax.pipeline.programs import NO_RANKS, STATE_SPECS, Engine
from spd_jax.pipeline.slots import Slots, cache_slots
from spd_jax.pipeline.spec import EngineSpec
from spd_jax.pipeline.state import PipelineState


@dataclasses.dataclass(frozen=True)
class EngineBytes:
    """Bytes on every rank, and how many of them hold nothing there."""

    layers: int  # layer slots
    heads: int  # this rank's rows of the embedding and the heads
    projs: int  # the PDM's aggregation matrices, on all ranks
    kv_caches: int
    state_rings: int  # of delta-nets
    proposals: int  # of rejection sampling: what the drafts in flight were drawn from
    rest: int  # of the decode state: the same on all ranks
    wasted_layers: tuple[int, ...]  # per rank, of `layers`
    wasted_caches: tuple[int, ...]  # per rank, of `kv_caches` and `state_rings`

    @property
    def caches(self) -> int:
        """What layers remember."""
        return self.kv_caches + self.state_rings

    @property
    def total(self) -> int:
        """All that a rank holds between two cycles."""
        return self.layers + self.heads + self.projs + self.caches + self.proposals + self.rest


def shape_engine(spec: EngineSpec, target_params: Any, draft_params: Any) -> Engine:
    """Returns an engine of shapes on an abstract mesh, from parameter trees of shapes."""
    mesh = abstract_mesh(spec.n_stages)
    sharded = shard_target(target_params, spec.target, Layout(spec.pipeline, mesh))
    return Engine(spec, mesh, mesh_weights(spec, sharded, draft_params, mesh))


def count_engine(engine: Engine, state: PipelineState) -> EngineBytes:
    """Counts an engine on a mesh, abstract or not, and its state between two cycles."""
    weights, (caches,) = engine.weights, state.caches
    specs = weight_specs(weights)
    rest, rest_specs = (dataclasses.replace(x, **NO_RANKS) for x in (state, STATE_SPECS))
    return EngineBytes(
        layers=_on_a_rank(weights.ranks, specs.ranks),
        heads=_on_a_rank(weights.heads, specs.heads),
        projs=_on_a_rank(weights.projs, specs.projs),
        kv_caches=_on_a_rank(caches.get("attention"), STATE_SPECS.caches),
        state_rings=_on_a_rank(caches.get("delta"), STATE_SPECS.caches),
        proposals=_on_a_rank(state.proposals, STATE_SPECS.proposals),
        rest=_on_a_rank(rest, rest_specs),
        wasted_layers=tuple(wasted_bytes(engine.spec, weights)),
        wasted_caches=tuple(_wasted_caches(engine.spec, caches)),
    )


def n_bytes(tree: Any) -> int:
    """Bytes of all arrays or shapes of a tree."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _on_a_rank(tree: Any, specs: Any) -> int:
    """Bytes that a rank holds of a tree, of which `specs` is a prefix."""

    def count(spec: PartitionSpec, there: Any) -> int:
        assert spec in (ON_RANK, EVERYWHERE), spec
        return sum(n_bytes(x) // (x.shape[0] if spec == ON_RANK else 1)
                   for x in jax.tree.leaves(there))  # fmt: skip

    return sum(jax.tree.leaves(jax.tree.map(count, specs, tree)))


def _wasted_caches(spec: EngineSpec, caches: Slots) -> list[int]:
    """Bytes of cache slots that a rank has no layer for, per rank."""
    waste = []
    for kinds in spec.rank_kinds:
        used = Counter(mixer for mixer, _ in cache_slots(kinds))
        unused = [slots[used[mixer] :] for mixer, slots in caches.items()]
        waste.append(_on_a_rank(unused, ON_RANK))
    return waste
