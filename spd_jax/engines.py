"""Builds engines from a target and a draft, and keeps what was placed for the next call."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from spd_jax.checks import ConfigError, as_ints
from spd_jax.config import PipelineConfig, V10DraftConfig, refuse_v10
from spd_jax.models import draft_v10
from spd_jax.models.bundle import Draft, Target
from spd_jax.models.draft import KIND, check_pair, known_ids, layer_config
from spd_jax.models.target import layer_shapes
from spd_jax.pipeline import placing
from spd_jax.pipeline.mesh import resolve_mesh
from spd_jax.pipeline.placing import Layout
from spd_jax.pipeline.programs import Engine
from spd_jax.pipeline.spec import EngineSpec
from spd_jax.program import is_traced

log = logging.getLogger("spd_jax")

_ENGINES: WeakKeyDictionary[Target, WeakKeyDictionary] = WeakKeyDictionary()
_SHARDED: WeakKeyDictionary[Target, dict[Layout, dict]] = WeakKeyDictionary()
_WHOLE: WeakKeyDictionary[Target, dict] = WeakKeyDictionary()


def resolve_pipeline(
    target: Target,
    draft: Draft,
    n_stages: int | None = None,
    stage_layers: Sequence[int] | None = None,
) -> PipelineConfig:
    """Returns the stages to run: as asked for, else the draft's N, as even as possible.

    Raises:
      ConfigError: the stages do not fit the target, or the draft runs in none.
    """
    refuse_v10(draft.config, draft.name, "decoded with")
    if stage_layers is not None:
        stage_layers = as_ints("stage_layers", stage_layers)
        n_stages = len(stage_layers) if n_stages is None else n_stages
    n_stages = draft.config.n_stages if n_stages is None else n_stages
    return PipelineConfig(target.config.n_layers, n_stages, stage_layers)


def build_engine(
    target: Target,
    draft: Draft,
    n_stages: int | None,
    stage_layers: Sequence[int] | None,
    mesh: Mesh | str | None,
    placement: str,
) -> Engine:
    """Returns the engine for these settings, placing parameters the first time only.

    A target that was loaded onto a mesh decodes there when the settings leave that open and its
    stages are the ones asked for.

    Raises:
      ConfigError: stages, devices or the pair of target and draft do not fit.
    """
    check_belongs(target, draft)
    pipeline = resolve_pipeline(target, draft, n_stages, stage_layers)
    layout = target.layout
    if layout is not None and mesh is None and placement != "virtual":
        mesh = layout.mesh if layout.pipeline == pipeline else None
    mesh = resolve_mesh(mesh, placement, pipeline.n_stages)

    kept = _ENGINES.setdefault(target, WeakKeyDictionary()).setdefault(draft, {})
    if (pipeline, mesh) not in kept:
        trained = PipelineConfig(
            target.config.n_layers, draft.config.n_stages, draft.config.stage_layers
        )
        if pipeline != trained:
            log.warning(
                "%s was trained for stages of %s layers and decodes with %s: its depth map is "
                "recomputed",
                draft.name, _counts(trained.stage_layers), _counts(pipeline.stage_layers),
            )  # fmt: skip
        spec = EngineSpec(target.config, draft.config, pipeline)
        if mesh is None:
            weights = placing.local_weights(spec, whole_params(target), draft.params)
        else:
            sharded = _sharded_params(target, Layout(pipeline, mesh))
            weights = placing.mesh_weights(spec, sharded, draft.params, mesh)
            waste = placing.wasted_bytes(spec, weights)
            log.warning(
                "sharded over %d devices; bytes per rank in layer slots that hold nothing: %s",
                mesh.devices.size, _counts(waste),
            )  # fmt: skip
        kept[pipeline, mesh] = Engine(spec, mesh, weights)
    return kept[pipeline, mesh]


def check_belongs(target: Target, draft: Draft) -> None:
    """Raises ConfigError where a draft was made for another target."""
    check_pair(target.config, draft.config)
    recorded = draft.config.target_sha256
    if recorded is not None and target.sha256 is not None and recorded != target.sha256:
        raise ConfigError(
            f"{draft.name}: trained on the target with sha256 {recorded[:12]}..., but "
            f"{target.name} has {target.sha256[:12]}...; choose a head made for this target"
        )
    row = draft.params["projs"][0]["weight"]
    scale = target.params["final_norm"]["weight"]
    if (row.shape[0], row.dtype) != (scale.shape[0], scale.dtype):
        raise ConfigError(
            f"{draft.name}: expected width {scale.shape[0]} in {scale.dtype} as {target.name} "
            f"has, got {row.shape[0]} in {row.dtype}; load the head for this target"
        )
    config = (draft_v10.layer_config if isinstance(draft.config, V10DraftConfig) else layer_config)(
        target.config, draft.config
    )
    want, layer = layer_shapes(config, KIND), draft.params["layers"][0]
    if jax.tree.map(jnp.shape, layer) != jax.tree.map(lambda x: x.shape, want):
        raise ConfigError(
            f"{draft.name}: its layers have other shapes than {target.name} needs (heads, their "
            "size, norms or a gate); choose a head made for this target"
        )
    n_ids = len(known_ids(target.config, draft.config))
    n_rows = len(draft.params["lm_head"]["weight"]) if draft.config.head == "own" else n_ids
    if n_rows != n_ids:
        raise ConfigError(
            f"{draft.name}: expected a head of {n_ids} ids, got one of {n_rows}; choose a head "
            f"made for {target.name}"
        )


def whole_params(target: Target) -> dict:
    """The target's parameters, one array per layer; gathered once if it lies on a mesh.

    Raises:
      ConfigError: it lies on a mesh and is being traced by jax.jit or jax.grad.
    """
    if target.layout is None:
        return target.params
    if is_traced(target.params):
        raise ConfigError(f"{target.name} lies on a mesh; load it without one to trace it")
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


def _counts(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def check_not_traced(tree: object, name: str) -> None:
    """Raises ConfigError where a function with a loop on the host is being traced."""
    if is_traced(tree):
        raise ConfigError(
            f"{name} runs a loop on the host and cannot be traced; call it outside jax.jit"
        )
