"""Builds engines from a target and a draft, and keeps what was placed for the next call."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import jax
from jax.sharding import Mesh

from spd_jax.config import ConfigError, PipelineConfig
from spd_jax.models.bundle import Draft, Target
from spd_jax.models.draft import check_pair
from spd_jax.pipeline import placing
from spd_jax.pipeline.mesh import resolve_mesh
from spd_jax.pipeline.placing import Layout
from spd_jax.pipeline.programs import Engine
from spd_jax.pipeline.spec import EngineSpec

log = logging.getLogger("spd_jax")

_ENGINES: WeakKeyDictionary[Target, WeakKeyDictionary] = WeakKeyDictionary()
_SHARDED: WeakKeyDictionary[Target, dict[Layout, dict]] = WeakKeyDictionary()
_WHOLE: WeakKeyDictionary[Target, dict] = WeakKeyDictionary()


def build_engine(
    target: Target,
    draft: Draft,
    n_stages: int | None,
    stage_layers: Sequence[int] | None,
    mesh: Mesh | str | None,
    placement: str,
) -> Engine:
    """Returns the engine for these settings, placing parameters the first time only.

    Raises:
      ConfigError: stages, devices or the pair of target and draft do not fit.
    """
    check_pair(target.config, draft.config)
    layout = target.layout
    if stage_layers is not None:
        stage_layers = tuple(stage_layers)
        n_stages = n_stages or len(stage_layers)
    elif layout is not None and n_stages in (None, layout.pipeline.n_stages):
        n_stages, stage_layers = layout.pipeline.n_stages, layout.pipeline.stage_layers
    n_stages = n_stages or draft.config.n_stages
    pipeline = PipelineConfig(target.config.n_layers, n_stages, stage_layers)
    if layout is not None and mesh is None and placement != "virtual":
        mesh = layout.mesh
    mesh = resolve_mesh(mesh, placement, n_stages)

    kept = _ENGINES.setdefault(target, WeakKeyDictionary()).setdefault(draft, {})
    if (pipeline, mesh) not in kept:
        if n_stages != draft.config.n_stages:
            log.warning(
                "%s was trained for %d stages and decodes at %d: its depth map is recomputed",
                draft.name, draft.config.n_stages, n_stages,
            )  # fmt: skip
        spec = EngineSpec(target.config, draft.config, pipeline)
        if mesh is None:
            weights = placing.local_weights(spec, whole_params(target), draft.params)
        else:
            sharded = _sharded_params(target, Layout(pipeline, mesh))
            weights = placing.mesh_weights(spec, sharded, draft.params, mesh)
            waste = placing.wasted_bytes(spec, weights)
            log.info("bytes in layer slots that hold nothing, per rank: %s", waste)
        kept[pipeline, mesh] = Engine(spec, mesh, weights)
    return kept[pipeline, mesh]


def whole_params(target: Target) -> dict:
    """The target's parameters, one array per layer; gathered once if it lies on a mesh."""
    if target.layout is None:
        return target.params
    if target not in _WHOLE:
        log.warning("%s lies on a mesh: gathering a second, whole copy once", target.name)
        _WHOLE[target] = placing.unshard_target(target.params, target.config, target.layout)
    return _WHOLE[target]


def _sharded_params(target: Target, layout: Layout) -> dict:
    if target.layout == layout:
        return target.params
    kept = _SHARDED.setdefault(target, {})
    if layout not in kept:
        log.warning(
            "%s was loaded without this mesh: placing a second copy on %d devices once",
            target.name, layout.mesh.devices.size,
        )  # fmt: skip
        kept[layout] = placing.shard_target(whole_params(target), target.config, layout)
    return kept[layout]


def is_traced(tree: object) -> bool:
    """True inside `jax.jit` or `jax.grad`."""
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))


def check_not_traced(target: Target, draft: Draft, name: str) -> None:
    """Raises ConfigError where a host loop is called under a transformation."""
    if is_traced((target, draft)):
        raise ConfigError(
            f"{name} runs a loop on the host and cannot be traced; call it outside jax.jit"
        )
