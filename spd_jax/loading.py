"""Loading targets and drafts, and checking that they belong together."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from spd_jax.checks import ConfigError, as_ints
from spd_jax.config import DraftConfig, PipelineConfig, refuse_v10
from spd_jax.engines import check_belongs, whole_params
from spd_jax.models import draft as pdm
from spd_jax.models.bundle import Draft, Target, Trained
from spd_jax.pipeline.mesh import resolve_mesh
from spd_jax.pipeline.placing import Layout, shard_target
from spd_jax.weights import load_draft_file, load_target_files
from spd_jax.weights.files import read_json
from spd_jax.weights.heads import CONFIG_NAME, read_trained
from spd_jax.weights.reference_config import FALLBACK

log = logging.getLogger("spd_jax")


def load_target(
    source: str | Path,
    dtype: str = "float32",
    *,
    n_stages: int | None = None,
    stage_layers: tuple[int, ...] | None = None,
    mesh: Mesh | str | None = None,
    placement: str = "auto",
    thinking: bool | None = None,
) -> Target:
    """Loads a target model.

    Args:
      source: "smollm2-135m" (fetched once), "tiny" (random weights), an HF directory, a .gguf
        file or a hub id.
      dtype: "float32" or "bfloat16".
      n_stages, stage_layers: of the pipeline, where parameters go onto a mesh at once; n_stages
        defaults to the mesh's size less one.
      mesh: None or "virtual" keeps one array per layer; a Mesh of n_stages + 1 devices shards
        the parameters over it from the start, and so does placement="dedicated".
      thinking: what the chat template gets as `enable_thinking` wherever text becomes a prompt;
        None: nothing, so that the template's own default holds.

    Raises:
      ConfigError: nothing usable there, or the mesh does not fit; one line.
    """
    loaded = load_target_files(source, dtype)
    layout, tokenizer = None, loaded.tokenizer
    if tokenizer is not None:
        tokenizer = tokenizer.with_thinking(thinking)
    if stage_layers is not None:
        stage_layers = as_ints("stage_layers", stage_layers)
        n_stages = len(stage_layers) if n_stages is None else n_stages
    if n_stages is not None:
        PipelineConfig(loaded.config.n_layers, n_stages, stage_layers)  # for its errors
    if isinstance(mesh, Mesh) or placement == "dedicated":
        if n_stages is None:
            n_stages = (mesh.devices.size if isinstance(mesh, Mesh) else len(jax.devices())) - 1
        pipeline = PipelineConfig(loaded.config.n_layers, n_stages, stage_layers)
        layout = Layout(pipeline, resolve_mesh(mesh, placement, n_stages))
        params = shard_target(loaded.params, loaded.config, layout)
    else:
        resolve_mesh(mesh, placement, 2 if n_stages is None else n_stages)  # for its errors
        params = loaded.place()
    return Target(
        params, loaded.config, tokenizer, loaded.stop_ids, loaded.sha256, str(source), layout
    )


def load_draft(source: str | Path | None, target: Target) -> Draft:
    """Loads a draft module for a target, in the target's dtype.

    Args:
      source: a head directory (config.json and model.safetensors), a reference head.pt, a
        head.safetensors beside its head_config.json, or None: the head shipped for this target.
        With a version 10 head of the reference implementation `pdm_loss` works, `decode` not.
        A head trained with another `thinking` than the target's is noted.

    Raises:
      ConfigError: nothing usable there, none is shipped, or it was made for another target.
    """
    dtype = str(jax.tree.leaves(target.params)[0].dtype)
    if source is None:
        source = _shipped_head(target)
    config, params, meta = load_draft_file(source, dtype)
    _check_sizes(target, meta, source)
    trained, name = read_trained(source), f"draft head {Path(source).name}"
    draft = Draft(jax.tree.map(jnp.asarray, params), config, name, trained)
    check_belongs(target, draft)
    _note_thinking(target, name, trained)
    return draft


def _note_thinking(target: Target, name: str, trained: Trained | None) -> None:
    """Says so where prompts are not those that a head was trained with: it guesses worse then."""
    if trained is None or target.tokenizer is None:
        return
    if trained.thinking != target.tokenizer.thinking:
        log.warning(
            "note: %s was trained with thinking %s, the target is loaded with %s",
            name, trained.thinking, target.tokenizer.thinking,
        )  # fmt: skip


def init_draft(target: Target, draft_config: DraftConfig, key: jax.Array) -> Draft:
    """Returns an untrained draft module: layers and head start as copies of the target's."""
    refuse_v10(draft_config, "draft_config", "trained")
    if target.config.d_ff is None and draft_config.d_ff is None:
        log.warning(
            "%s has no dense MLP to take the width of: the draft's is %d; d_ff sets another",
            target.name, pdm.DEFAULT_D_FF,
        )  # fmt: skip
    params = pdm.init_params(target.config, draft_config, whole_params(target), key)
    return Draft(params, draft_config, "untrained draft")


def shipped_heads() -> Iterator[Path]:
    """The head directories that come with the package."""
    root = Path(str(resources.files("spd_jax.heads")))
    yield from sorted(path.parent for path in root.glob(f"*/{CONFIG_NAME}"))


def _shipped_head(target: Target) -> Path:
    for path in shipped_heads():
        if read_json(path / CONFIG_NAME)["draft"].get("target_sha256") == target.sha256:
            return path
    names = ", ".join(path.name for path in shipped_heads()) or "none"
    raise ConfigError(
        f"no draft head is shipped for {target.name} (shipped: {names}); name one with draft "
        "(--draft), train one with train.pdm, or start from init_draft"
    )


def _check_sizes(target: Target, meta: dict, source: str | Path) -> None:
    """Raises ConfigError where the sizes that a head records of its target are others."""
    for name, theirs in meta.items():
        if name == FALLBACK:  # for an export; no size of this target
            continue
        ours = getattr(target.config, name, None)
        if theirs != ours:
            raise ConfigError(
                f"draft {source}: made for a target with {name} {theirs}, but {target.name} has "
                f"{ours}; choose a head made for this target"
            )
