"""The Pipeline Draft Module (PDM): aggregated rows, decoder layers, the target's norm, a head.

Training replicates the sequence once per row type; a query sees each earlier token in exactly the
row that decoding would show it (`visibility`).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spd_jax.checks import ConfigError
from spd_jax.config import (
    AnyDraftConfig,
    DraftConfig,
    LayerKind,
    PipelineConfig,
    TargetConfig,
)
from spd_jax.models import target as model
from spd_jax.models.aggregate import normalise, replicate_sequence
from spd_jax.models.visibility import all_blocks, live_blocks, seen_blocks, structural_mask
from spd_jax.ops.attention import segment_mask, segment_positions
from spd_jax.ops.depth_attention import attend_by_depth
from spd_jax.ops.linear import linear

KIND = LayerKind()  # of every layer of a PDM: dense, full attention
DEFAULT_D_FF = 9216  # where neither the draft nor the target says (the reference's)


def mlp_width(target: int | None, draft: int | None) -> int:
    """F of the PDM's layers: the draft's own, else the target's where it has one."""
    return draft or target or DEFAULT_D_FF


def layer_config(target: TargetConfig, draft: DraftConfig) -> TargetConfig:
    """Geometry of the PDM's layers: the target's full attention, the draft's own MLP and norms."""
    return dataclasses.replace(
        target,
        n_layers=draft.n_layers,
        kinds=None,
        delta=None,
        experts=None,
        d_ff=mlp_width(target.d_ff, draft.d_ff),
        qk_norm=draft.qk_norm,
    )


def check_pair(target: TargetConfig, draft: AnyDraftConfig) -> None:
    """Raises ConfigError where a draft cannot belong to a target."""
    if draft.n_layers > target.n_layers:
        raise ConfigError(
            f"n_layers of a draft must not exceed the target's {target.n_layers}, got "
            f"{draft.n_layers}; lower it"
        )
    if draft.anchors[-1] > target.n_layers:
        raise ConfigError(
            f"anchors must not exceed the target's {target.n_layers} layers, got "
            f"{draft.anchors[-1]}; choose a head made for this target"
        )
    if draft.draft_ids is not None and draft.draft_ids[-1] >= target.vocab_size:
        raise ConfigError(
            f"draft ids must be below the target's vocab_size {target.vocab_size}, got "
            f"{draft.draft_ids[-1]}; choose a head made for this target"
        )


def check_row_types(target: TargetConfig, draft: DraftConfig) -> None:
    """Raises ConfigError where a row type would be trained on nothing."""
    pipeline = PipelineConfig(target.n_layers, draft.n_stages, draft.stage_layers)
    reached = set(pipeline.row_types(draft.anchors))
    unused = [b for i, b in enumerate(draft.anchors) if i not in reached]
    if unused:
        raise ConfigError(
            f"anchors {unused} are the deepest at no depth of {draft.n_stages} stages that end at "
            f"layers {pipeline.starts[1:]}; drop them or move them to stage boundaries"
        )


def forward(
    target: TargetConfig,
    draft: DraftConfig,
    params: dict,
    features: jax.Array,
    segments: jax.Array,
    fill: jax.Array | int,
    mask_mode: str,
    *,
    dense: bool = False,
    remat: bool = False,
) -> jax.Array:
    """Returns the PDM's output [B, T, D] for the type-0 row of each token, before the norm.

    A static fill computes only the row types that matter at it; a traced one computes all.

    Args:
      features: anchors [B, T, M, D].
      segments: int [B, T], equal for the tokens of one text, 0 on padding.
      dense: attend under `structural_mask`, whose memory is the square of K*T: the oracle.
      remat: for the gradient keep only what enters each layer, and compute the rest again.
    """
    n_tokens = features.shape[1]
    pipeline = PipelineConfig(target.n_layers, draft.n_stages, draft.stage_layers)
    blocks = all_blocks(draft.anchors)
    if not isinstance(fill, jax.core.Tracer):
        blocks = live_blocks(pipeline, draft.anchors, fill, mask_mode)
    prepared = normalise(draft, features, target.norm_eps)
    rows = replicate_sequence(params["projs"], prepared, blocks)
    config = layer_config(target, draft)
    turn = model.rotation(config, jnp.tile(segment_positions(segments), (1, len(blocks))))
    if dense:
        mask = structural_mask(pipeline, draft.anchors, n_tokens, fill, mask_mode, blocks)
        attend = mask & jnp.tile(segment_mask(segments), (1, len(blocks), len(blocks)))
        attend_newest = attend[:, -n_tokens:]
    else:
        seen, far_from = seen_blocks(pipeline, draft.anchors, fill, mask_mode, blocks)
        attend, attend_newest = (
            functools.partial(attend_by_depth, seen=s, far_from=f, segments=segments)
            for s, f in ((seen, far_from), (seen[-1:], far_from[-1:]))
        )

    def run(layer: dict, rows: jax.Array, attend: Any, n_query: int) -> jax.Array:
        out, _ = model.run_layer(config, KIND, layer, rows, turn, attend, n_query=n_query)
        return out

    if remat:
        run = jax.checkpoint(run, static_argnums=(2, 3))
    *first, last = params["layers"]
    for layer in first:
        rows = run(layer, rows, attend, rows.shape[1])
    # Only type-0 rows are scored: the last layer queries no others.
    return run(last, rows, attend_newest, n_tokens)


def head_weight(draft: AnyDraftConfig, params: dict, target_params: dict) -> jax.Array:
    """The draft head [W, D]: trained, or the target's rows of the draft ids, frozen."""
    if draft.head == "own":
        return params["lm_head"]["weight"]
    weight = jax.lax.stop_gradient(model.head_weight(target_params))
    return weight if draft.draft_ids is None else weight[np.asarray(draft.draft_ids)]


def logits(
    target: TargetConfig, draft: AnyDraftConfig, params: dict, target_params: dict, x: jax.Array
) -> jax.Array:
    """Returns float32 logits [..., W] over the draft ids of PDM outputs [..., D]."""
    weight = head_weight(draft, params, target_params)
    return linear(model.normed(target, target_params, x), weight, jnp.float32)


def init_params(
    target: TargetConfig,
    draft: DraftConfig,
    target_params: dict,
    key: jax.Array,
    *,
    copy: bool = True,
) -> dict:
    """Returns starting parameters for training.

    A row begins as its token's deepest available anchor, at that anchor's own scale, with a
    little noise; the layers as copies of the target's last ones of full attention where the shapes
    agree; the head as the target's rows of the draft ids. Without `copy` the first two are random,
    normal 0.02, as published.
    """
    check_pair(target, draft)
    dtype = target_params["embed"]["weight"].dtype
    width = target.d_model
    scale_key, projs_key, *layer_keys = jax.random.split(key, draft.n_layers + 2)
    config = layer_config(target, draft)
    layers = [model.init_layer(config, KIND, layer_key, dtype) for layer_key in layer_keys]
    noise = [
        jax.random.normal(proj_key, (width, (i + 1) * width), dtype)
        for i, proj_key in enumerate(jax.random.split(projs_key, len(draft.anchors)))
    ]
    if copy:
        scales = anchor_scales(target, draft, target_params, scale_key)
        eye = jnp.eye(width, dtype=dtype)
        projs = [
            scales[i] * (0.1 * x.shape[1] ** -0.5 * x).at[:, i * width :].add(eye)
            for i, x in enumerate(noise)
        ]
        sources = _attention_layers(target, target_params)[-draft.n_layers :]
        sources = [{}] * (draft.n_layers - len(sources)) + sources
        layers = [_copy_matching(*pair) for pair in zip(layers, sources, strict=True)]
    else:
        projs = [0.02 * x for x in noise]
    params = {"projs": [{"weight": x} for x in projs], "layers": layers}
    if draft.head == "own":
        weight = model.head_weight(target_params)
        ids = draft.draft_ids
        params["lm_head"] = {"weight": weight[np.asarray(ids)] if ids is not None else weight}
    return jax.tree.map(jnp.array, params)  # own buffers: a trainer may donate them


def grow_params(
    target: TargetConfig,
    draft: DraftConfig,
    fresh: dict,
    target_params: dict,
    start_config: DraftConfig,
    start_params: dict,
) -> dict:
    """Returns parameters for training that do what a smaller or equal draft does.

    Layers that the other lacks come first and add nothing yet: copies of the target's second full
    attention layer and on (early ones look at the tokens just before) with output matrices of
    zeros. The rows of the head are taken by id. An id that the other lacks has no row: the
    target's own would outbid the trained ones, whose logits are smaller.

    Args:
      fresh: `init_params` of `draft`; start_config, start_params: the draft to begin from.
    Raises:
      ConfigError: as `check_grows`.
    """
    check_grows(target, draft, start_config)
    n_new = draft.n_layers - start_config.n_layers
    sources = _attention_layers(target, target_params)[1 : n_new + 1]
    sources += [{}] * (n_new - len(sources))
    added = [
        _without_output(_copy_matching(layer, source))
        for layer, source in zip(fresh["layers"][:n_new], sources, strict=True)
    ]
    params = {"projs": start_params["projs"], "layers": [*added, *start_params["layers"]]}
    if draft.head == "own":
        ours, theirs = (known_ids(target, config) for config in (draft, start_config))
        rows = np.searchsorted(theirs, ours)
        params["lm_head"] = {"weight": start_params["lm_head"]["weight"][rows]}
    return jax.tree.map(jnp.array, params)  # own buffers: a trainer may donate them


def known_ids(target: TargetConfig, draft: AnyDraftConfig) -> np.ndarray:
    """The sorted full-vocabulary ids that a draft can propose."""
    return np.asarray(range(target.vocab_size) if draft.draft_ids is None else draft.draft_ids)


def check_grows(target: TargetConfig, draft: DraftConfig, start: DraftConfig) -> None:
    """Raises ConfigError where two drafts differ in more than layers, split and fewer draft ids."""
    for name in ("anchors", "d_ff", "feature_norm", "qk_norm", "head"):
        ours, theirs = getattr(draft, name), getattr(start, name)
        if ours != theirs:
            raise ConfigError(
                f"{name} must be that of the head to start from, {theirs}, got {ours}; change it "
                "or start from another head"
            )
    if draft.n_layers < start.n_layers:
        raise ConfigError(
            f"n_layers must be at least {start.n_layers}, as in the head to start from, got "
            f"{draft.n_layers}"
        )
    ours, theirs = known_ids(target, draft), known_ids(target, start)
    n_unknown = len(np.setdiff1d(ours, theirs))
    if n_unknown:
        raise ConfigError(
            f"draft ids must be among the {len(theirs)} of the head to start from, {n_unknown} of "
            f"{len(ours)} are not; set draft_vocab_size to at most {len(theirs)}"
        )


def anchor_scales(
    target: TargetConfig, draft: DraftConfig, params: dict, key: jax.Array, n_tokens: int = 64
) -> jax.Array:
    """What normalising takes from each anchor: its median root mean square over random tokens.

    Returns [M] in the parameters' dtype; ones where anchors are not normalised.
    """
    dtype = params["embed"]["weight"].dtype
    if draft.feature_norm == "none":
        return jnp.ones(len(draft.anchors), dtype)
    ids = jax.random.randint(key, (1, n_tokens), 0, target.vocab_size)
    hidden = model.hidden_states(target, params, ids)
    anchors = jnp.stack([hidden[b] for b in draft.anchors]).astype(jnp.float32)  # [M, 1, T, D]
    return jnp.median(jnp.sqrt(jnp.mean(anchors**2, axis=-1)), axis=(1, 2)).astype(dtype)


def _attention_layers(target: TargetConfig, params: dict) -> list[dict]:
    """The target's layers of full attention."""
    pairs = zip(target.layer_kinds, params["layers"], strict=True)
    return [layer for kind, layer in pairs if kind.mixer == "attention"]


def _without_output(layer: dict) -> dict:
    """A decoder layer that returns its input: both output matrices are zero."""
    attn, mlp = layer["attn"], layer["mlp"]
    return layer | {
        "attn": attn | {"o": jax.tree.map(jnp.zeros_like, attn["o"])},
        "mlp": mlp | {"down": jax.tree.map(jnp.zeros_like, mlp["down"])},
    }


def _copy_matching(fresh: dict, source: dict) -> dict:
    """Replaces each leaf of `fresh` by the leaf of `source` at its path where shapes agree."""
    copied = {}
    for name, value in fresh.items():
        other = source.get(name)
        if isinstance(value, dict):
            copied[name] = _copy_matching(value, other or {})
        else:
            agrees = other is not None and other.shape == value.shape
            copied[name] = other if agrees else value
    return copied
