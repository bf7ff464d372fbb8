"""Draft modules of the reference implementation's version 10: a memory row per depth, one query.

Each token has a row for every depth N, ..., 0, made from hidden states of its own choosing. The
newest row (depth 0) runs through the layers; it sees the token T <= t at depth min(N, t - T). The
others are memory: a layer multiplies them by a matrix F of that depth and reads keys and values
from them, layer l from F_l ... F_0 x.

Parameters, depths N, ..., 1, 0: {"projs": [N + 1 of [D, n*D]], "memory": [L_s][N of [D, D]],
"layers": [L_s], "lm_head"}.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from spd_jax.config import TargetConfig, V10DraftConfig
from spd_jax.models import draft as pdm
from spd_jax.models import target as model
from spd_jax.models import visibility
from spd_jax.ops.linear import linear


def layer_config(target: TargetConfig, draft: V10DraftConfig) -> TargetConfig:
    """Geometry of the layers: plain Qwen3 ones with the target's RoPE, whatever the target is."""
    return dataclasses.replace(pdm.layer_config(target, draft), norm_offset=False, attn_gate=False)


def replicate_sequence(
    draft: V10DraftConfig,
    projs: list[dict],
    hidden: Sequence[jax.Array] | Mapping[int, jax.Array],
    fill: jax.Array | int,
) -> list[jax.Array]:
    """Returns the rows [B, T, D] of depths N, ..., 0 with `fill` tokens in flight.

    Tokens that are not in flight are complete: their rows are those of depth N.
    """
    features = [jnp.concatenate([hidden[b] for b in used], axis=-1) for used in draft.row_anchors]
    rows = [linear(x, proj["weight"]) for x, proj in zip(features, projs, strict=True)]
    depths = range(draft.n_stages, -1, -1)
    return [jnp.where(depth >= fill, rows[0], row) for depth, row in zip(depths, rows, strict=True)]


def project_memory(memory: list[jax.Array], projs: list[dict]) -> list[jax.Array]:
    """Returns the memory rows of a layer from those of the layer before (at first: the rows)."""
    return [linear(x, proj["weight"]) for x, proj in zip(memory, projs, strict=True)]


def depth_mask(n_stages: int, valid_mask: jax.Array) -> jax.Array:
    """Returns bool [B, T, (N+1)*T]: the rows that the newest row of each token sees.

    `valid_mask` bool [B, T] is False on padding, which neither sees nor is seen.
    """
    time = jnp.arange(valid_mask.shape[1])
    distance = time[:, None] - time[None, :]  # [T, T]; of later tokens negative, as no depth is
    depths = jnp.arange(n_stages, -1, -1)
    seen = jnp.minimum(distance, n_stages)[:, None, :] == depths[None, :, None]  # [T, N+1, T]
    seen = seen[None] & valid_mask[:, :, None, None] & valid_mask[:, None, None, :]
    return seen.reshape(*valid_mask.shape, -1)


def forward(
    target: TargetConfig,
    draft: V10DraftConfig,
    params: dict,
    hidden: Sequence[jax.Array] | Mapping[int, jax.Array],
    valid_mask: jax.Array,
    fill: jax.Array | int,
    mask_mode: str,
) -> jax.Array:
    """Returns outputs [B, T, D] (before the norm); arguments as of `distill.draft_outputs`.

    Both mask modes are one here: they differ for rows that query and are not the newest.
    """
    visibility.check_mask_mode(mask_mode)
    n_batch, n_tokens = valid_mask.shape
    *memory, newest = replicate_sequence(draft, params["projs"], hidden, fill)
    positions = jnp.tile(jnp.arange(n_tokens), (n_batch, draft.n_stages + 1))
    mask = depth_mask(draft.n_stages, valid_mask)
    config = layer_config(target, draft)
    turn = model.rotation(config, positions)
    for layer, projs in zip(params["layers"], params["memory"], strict=True):
        memory = project_memory(memory, projs)
        rows = jnp.concatenate([*memory, newest], axis=1)
        newest, _ = model.run_layer(config, pdm.KIND, layer, rows, turn, mask, n_query=n_tokens)
    return newest
