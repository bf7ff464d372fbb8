"""Puts parameters where the engine reads them.

Virtual mode shares the per-layer arrays. On a mesh they lie in the slots of `slots`: rank s < N
holds the layers of stage s there, rank N those of the draft module. A rank without an array that
another rank has in the same place holds zeros; `wasted_bytes` counts them. What is to be placed may
be anything that `np.asarray` reads, and of which x[rows] reads some: it is read here, for the ranks
of this process, one at a time.
On an abstract mesh parameters are shapes, and so is what comes of them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from spd_jax.config import PipelineConfig, TargetConfig
from spd_jax.models import draft as pdm
from spd_jax.models import target as model
from spd_jax.pipeline.comm import AXIS
from spd_jax.pipeline.heads import Heads, shard_ids
from spd_jax.pipeline.slots import Packed, place_layers, unpack_layers
from spd_jax.pipeline.spec import EngineSpec
from spd_jax.pipeline.weights import EngineWeights

ON_RANK = PartitionSpec(AXIS)
EVERYWHERE = PartitionSpec()


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a target's parameters are sharded: by which stages, over which devices."""

    pipeline: PipelineConfig
    mesh: Mesh | AbstractMesh


def local_weights(spec: EngineSpec, target_params: dict, draft_params: dict) -> EngineWeights:
    """The engine's view of per-layer parameters on one device; copies nothing."""
    starts = spec.pipeline.starts
    stages = [
        list(target_params["layers"][starts[s] : starts[s + 1]]) for s in range(spec.n_stages)
    ]
    ids = spec.draft.draft_ids
    own = spec.draft.head == "own" or ids is not None
    heads = Heads(
        final_scale=model.final_scale(spec.target, target_params),
        embed=target_params["embed"]["weight"],
        target=None if spec.target.tied_embeddings else target_params["lm_head"]["weight"],
        target_ids=jnp.arange(spec.target.vocab_size, dtype=jnp.int32),
        draft=pdm.head_weight(spec.draft, draft_params, target_params) if own else None,
        draft_ids=jnp.asarray(pdm.known_ids(spec.target, spec.draft)) if own else None,
        norm_eps=spec.target.norm_eps,
    )
    return EngineWeights([*stages, list(draft_params["layers"])], draft_params["projs"], heads)


def shard_target(params: dict, config: TargetConfig, layout: Layout) -> dict:
    """Returns the target's parameters as {"slots", "embed", "final_norm", "lm_head"} on a mesh."""
    mesh, n_ranks = layout.mesh, layout.mesh.size
    table = shard_ids(np.arange(config.vocab_size), n_ranks)
    sharded: dict[str, Any] = {  # the largest arrays first, while little else is there
        name: {"weight": _shard_rows(params[name]["weight"], table, mesh)}
        for name in ("embed", "lm_head")
        if name in params
    }
    sharded["final_norm"] = _replicate(params["final_norm"], mesh)
    stages = [params["layers"][a:b] for a, b in itertools.pairwise(layout.pipeline.starts)]
    return sharded | {"slots": _pack(stages, n_ranks, lambda parts: _stack(parts, mesh))}


def unshard_target(sharded: dict, config: TargetConfig, layout: Layout) -> dict:
    """The inverse of `shard_target`: one array per layer, on the first device."""
    starts = layout.pipeline.starts
    shapes = [model.layer_shapes(config, kind) for kind in config.layer_kinds]
    layers = []
    for s, (first, end) in enumerate(itertools.pairwise(starts)):
        there = unpack_layers(sharded["slots"], shapes[first:end])
        layers += jax.tree.map(
            lambda x, s=s: jnp.asarray(np.asarray(_sorted_shards(x)[s].data[0])), there
        )
    params: dict[str, Any] = {
        "layers": layers,
        "final_norm": jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), sharded["final_norm"]),
    }
    for name in ("embed", "lm_head"):
        if name in sharded:
            parts = np.stack(_shards(sharded[name]["weight"]))
            rows = parts.swapaxes(0, 1).reshape(-1, parts.shape[-1])  # id = j * R + shard
            params[name] = {"weight": jnp.asarray(rows[: config.vocab_size])}
    return params


def mesh_weights(
    spec: EngineSpec, sharded: dict, draft_params: dict, mesh: Mesh | AbstractMesh
) -> EngineWeights:
    """Adds the draft module to a sharded target: its layers on rank N, its head on all ranks."""
    n_ranks = mesh.size
    slots = {part: [dict(slot) for slot in there] for part, there in sharded["slots"].items()}
    for part, nth, key, leaf in place_layers(draft_params["layers"]):
        slot = _slot(slots, part, nth)
        if key in slot:
            slot[key] = _with_last(slot[key], leaf, mesh)
        else:
            slot[key] = _stack([*[None] * (n_ranks - 1), leaf], mesh)
    table = shard_ids(np.arange(spec.target.vocab_size), n_ranks)
    own = spec.draft.head == "own" or spec.draft.draft_ids is not None
    draft, draft_table = None, None
    if own:
        ids = pdm.known_ids(spec.target, spec.draft)
        draft_table = shard_ids(ids, n_ranks)
        if spec.draft.head == "own":
            source, rows = draft_params["lm_head"]["weight"], np.searchsorted(ids, draft_table)
            draft = _shard_rows(source, np.where(draft_table < 0, -1, rows), mesh)
        else:
            weight = sharded.get("lm_head", sharded["embed"])["weight"]
            draft = _stack(
                [_take_rows(part, np.where(row < 0, -1, row // n_ranks))
                 for part, row in zip(_shards(weight), draft_table, strict=True)],
                mesh,
            )  # fmt: skip
    find_scale = functools.partial(model.final_scale, spec.target)
    heads = Heads(
        final_scale=jax.eval_shape(find_scale, sharded)
        if is_abstract(mesh)
        else find_scale(sharded),
        embed=sharded["embed"]["weight"],
        target=None if spec.target.tied_embeddings else sharded["lm_head"]["weight"],
        target_ids=_place(table, mesh),
        draft=draft,
        draft_ids=None if draft_table is None else _place(draft_table, mesh),
        norm_eps=spec.target.norm_eps,
    )
    return EngineWeights([slots], _replicate(draft_params["projs"], mesh), heads)


def weight_specs(weights: EngineWeights) -> EngineWeights:
    """The partition of mesh weights, leaf for leaf."""
    specs = jax.tree.map(lambda _: ON_RANK, weights)
    return dataclasses.replace(
        specs,
        projs=jax.tree.map(lambda _: EVERYWHERE, weights.projs),
        heads=dataclasses.replace(specs.heads, final_scale=EVERYWHERE),
    )


def is_abstract(mesh: Mesh | AbstractMesh | None) -> bool:
    """True for a mesh without devices, where every array is a shape."""
    return isinstance(mesh, AbstractMesh)


def wasted_bytes(spec: EngineSpec, weights: EngineWeights) -> list[int]:
    """Bytes of layer slots that hold nothing, per rank of a mesh."""
    there = weights.ranks[0]
    bytes_of = {
        (part, nth, key): leaf.size * leaf.dtype.itemsize // leaf.shape[0]
        for part, slots in there.items()
        for nth, slot in enumerate(slots)
        for key, leaf in slot.items()
    }
    waste = []
    for rank, kinds in enumerate(spec.rank_kinds):
        config = spec.target if rank < spec.n_stages else spec.draft_layer
        shapes = [model.layer_shapes(config, kind) for kind in kinds]
        used = {place[:3] for place in place_layers(shapes)}
        waste.append(sum(size for place, size in bytes_of.items() if place not in used))
    return waste


def _pack(ranks: Sequence[Sequence[dict]], n_ranks: int, join: Callable) -> Packed:
    """Joins what each rank has in a slot: join(array or None of every rank)."""
    parts: Packed = {}
    for rank, layers in enumerate(ranks):
        for part, nth, key, leaf in place_layers(layers):
            _slot(parts, part, nth).setdefault(key, [None] * n_ranks)[rank] = leaf
    return {
        part: [{key: join(leaves) for key, leaves in slot.items()} for slot in slots]
        for part, slots in parts.items()
    }


def _slot(parts: Packed, part: str, nth: int) -> dict[str, Any]:
    """The nth slot of a part, made where it lacks."""
    slots = parts.setdefault(part, [])
    slots += [{} for _ in range(nth + 1 - len(slots))]
    return slots[nth]


def _shards(array: jax.Array) -> list[Any]:
    """The block [...] of each rank of a leaf [R, ...], on the host."""
    if isinstance(array, jax.ShapeDtypeStruct):
        return [jax.ShapeDtypeStruct(array.shape[1:], array.dtype)] * array.shape[0]
    return [np.asarray(shard.data)[0] for shard in _sorted_shards(array)]


def _sorted_shards(array: jax.Array) -> list[jax.Shard]:
    return sorted(array.addressable_shards, key=lambda s: s.index[0].start or 0)


def _with_last(array: jax.Array, block: Any, mesh: Mesh | AbstractMesh) -> jax.Array:
    """Replaces the block of the last rank; the others stay the buffers they are."""
    if is_abstract(mesh):
        return array
    blocks = [shard.data for shard in _sorted_shards(array)]
    blocks[-1] = jax.device_put(np.asarray(block)[None], mesh.devices[-1])
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, blocks)


def _place(array: np.ndarray, mesh: Mesh | AbstractMesh) -> jax.Array:
    return _put(array, mesh, ON_RANK)


def _replicate(tree: Any, mesh: Mesh | AbstractMesh) -> Any:
    return _put(tree, mesh, EVERYWHERE)


def _put(tree: Any, mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> Any:
    if is_abstract(mesh):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)

    def put(leaf: Any) -> jax.Array:
        array = np.asarray(leaf)
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return jax.tree.map(put, tree)


def _stack(parts: list[Any], mesh: Mesh | AbstractMesh) -> jax.Array:
    """One leaf [R, ...] of an array per rank; None is zeros."""
    example = next(part for part in parts if part is not None)
    shape = (len(parts), *example.shape)
    if is_abstract(mesh):
        return jax.ShapeDtypeStruct(shape, example.dtype)

    def block(rank: int) -> np.ndarray:
        part = parts[rank]
        return np.zeros(example.shape, example.dtype) if part is None else np.asarray(part)

    return _from_ranks(block, mesh)


def _take_rows(weight: Any, rows: np.ndarray) -> Any:
    """Rows int [n] of weight [V, D]; -1 is a row of zeros."""
    if isinstance(weight, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((len(rows), *weight.shape[1:]), weight.dtype)
    taken = np.zeros((len(rows), *weight.shape[1:]), weight.dtype)
    there = rows >= 0
    if there.any():
        taken[there] = weight[rows[there]]
    return taken


def _shard_rows(weight: Any, table: np.ndarray, mesh: Mesh | AbstractMesh) -> jax.Array:
    """Leaf [R, n, D] of the rows int [R, n] that each shard holds; -1 is a row of zeros."""
    if is_abstract(mesh):
        return jax.ShapeDtypeStruct((*table.shape, *weight.shape[1:]), weight.dtype)
    source = np.asarray(weight) if isinstance(weight, jax.Array) else weight
    return _from_ranks(lambda rank: _take_rows(source, table[rank]), mesh)


def _from_ranks(block: Callable[[int], np.ndarray], mesh: Mesh) -> jax.Array:
    """One leaf [R, ...] of block(rank), called for the ranks of this process, one at a time.

    Not make_array_from_callback, which holds the blocks of all ranks on the host at once.
    """
    put = [
        jax.block_until_ready(jax.device_put(block(rank)[None], device))
        for rank, device in enumerate(mesh.devices)
        if device.process_index == jax.process_index()
    ]
    shape = (mesh.devices.size, *put[0].shape[1:])
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, ON_RANK), put)
