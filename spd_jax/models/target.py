"""The target model as free functions over its parameter tree: embed, layers, final norm, head.

One decoder is assembled from layers of the kinds that the config lists.

Parameters (every matrix [out, in], one tree per layer, never stacked):
{"embed": {"weight"}, "layers": [...], "final_norm": {"weight"}, "lm_head": {"weight"} if untied}.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spd_jax.config import LayerKind, TargetConfig
from spd_jax.models.cache import Rows
from spd_jax.models.layers import DecoderLayer, norm_scale
from spd_jax.ops import rope
from spd_jax.ops.attention import causal_mask, segment_positions
from spd_jax.ops.depth_attention import attend_causally
from spd_jax.ops.linear import linear
from spd_jax.ops.norms import rms_norm
from spd_jax.ops.rope import Rotation, inverse_frequencies


def embed(params: dict, input_ids: jax.Array) -> jax.Array:
    """Returns the embedding rows [..., D] of int ids [...]."""
    return jnp.take(params["embed"]["weight"], input_ids, axis=0)


def rotation(config: TargetConfig, positions: jax.Array) -> Rotation:
    """Returns how rows at positions int [B, T] turn in every layer."""
    inv_freq = inverse_frequencies(config.n_rotary, config.rope_theta, config.rope_scaling)
    return rope.rotation(positions, inv_freq)


def run_layer(
    config: TargetConfig, kind: LayerKind, layer: dict, x: jax.Array, *args, **more
) -> tuple[jax.Array, Rows]:
    """Applies one decoder layer; arguments and results as in `layers.DecoderLayer`."""
    return DecoderLayer(config, kind).apply({"params": layer}, x, *args, **more)


def run_layers(
    config: TargetConfig,
    layers: Sequence[dict],
    x: jax.Array,
    turn: Rotation,
    mask: jax.Array,
    caches: Sequence[Rows] | None = None,
    cache_len: jax.Array | None = None,
    n_valid: jax.Array | None = None,
) -> tuple[list[jax.Array], list[Rows]]:
    """Applies all layers; returns the output of each [B, T, D] and what its rows leave."""
    outputs, rows = [], []
    for idx, (kind, layer) in enumerate(zip(config.layer_kinds, layers, strict=True)):
        cache = None if caches is None else caches[idx]
        x, new_rows = run_layer(config, kind, layer, x, turn, mask, cache, cache_len, n_valid)
        outputs.append(x)
        rows.append(new_rows)
    return outputs, rows


def run_block(
    active: jax.Array, config: TargetConfig, layers: Sequence[dict], x: jax.Array, *args
) -> tuple[jax.Array, list[Rows]]:
    """Runs all layers where the scalar `active` holds, and returns zeros where not.

    A branch is one operation: it has read the caches before anything it returns can be written
    to them. Without it XLA's CPU backend copies every cache in every step of a loop.
    """

    def run():
        outputs, rows = run_layers(config, layers, x, *args)
        return outputs[-1], rows

    return run_if(active, run)


def run_if(active: jax.Array, work: Callable[[], Any]) -> Any:
    """Returns work() where the scalar `active` holds, and zeros where not.

    In a loop, XLA's CPU backend keeps float32 copies of bfloat16 weights from the first step to
    the last, but for those that are used in a branch.
    """

    def skip():
        return jax.tree.map(jnp.zeros_like, jax.eval_shape(work))

    return lax.cond(active, work, skip)


def hidden_states(
    config: TargetConfig, params: dict, input_ids: jax.Array, segments: jax.Array | None = None
) -> list[jax.Array]:
    """Returns the L+1 hidden states [B, T, D] of int ids [B, T], the last before the final norm.

    With `segments` int [B, T] a row holds texts 1, 2, ... that do not see each other, 0 is padding,
    and scores are made for a part of the queries at a time. Delta-nets take a row for one text.
    """
    x = embed(params, input_ids)
    if segments is None:
        n_batch, n_rows = input_ids.shape
        positions = jnp.broadcast_to(jnp.arange(n_rows), (n_batch, n_rows))
        mask = causal_mask(n_rows)
    else:
        positions = segment_positions(segments)
        mask = functools.partial(attend_causally, segments=segments)
    outputs, _ = run_layers(config, params["layers"], x, rotation(config, positions), mask)
    return [x, *outputs]


def normed(config: TargetConfig, params: dict, x: jax.Array) -> jax.Array:
    """Applies the final norm to hidden states of index L."""
    return rms_norm(x, final_scale(config, params), config.norm_eps)


def final_scale(config: TargetConfig, params: dict) -> jax.Array:
    """What the final norm multiplies by, float32 [D]."""
    return norm_scale(params["final_norm"]["weight"], config.norm_offset)


def head_weight(params: dict) -> jax.Array:
    """The target's head [V, D]: its own, or the embedding where they are tied."""
    return params.get("lm_head", params["embed"])["weight"]


def logits(config: TargetConfig, params: dict, x: jax.Array) -> jax.Array:
    """Returns float32 logits [..., V] of hidden states of index L."""
    return linear(normed(config, params, x), head_weight(params), jnp.float32)


def init_layer(
    config: TargetConfig, kind: LayerKind, key: jax.Array, dtype: jnp.dtype = jnp.float32
) -> dict:
    """Returns one layer's random parameters: matrices normal 0.02, norms that scale by one."""
    x, turn = jnp.zeros((1, 1, config.d_model), dtype), rotation(config, jnp.zeros((1, 1)))
    return DecoderLayer(config, kind).init(key, x, turn, causal_mask(1))["params"]


@functools.cache
def layer_shapes(config: TargetConfig, kind: LayerKind) -> dict:
    """The parameter tree of one layer as abstract float32 arrays."""
    return jax.eval_shape(functools.partial(init_layer, config, kind), jax.random.key(0))


def param_shapes(config: TargetConfig, dtype: jnp.dtype) -> dict:
    """The parameter tree as abstract arrays."""
    return jax.eval_shape(functools.partial(init_params, config, dtype=dtype), jax.random.key(0))


def init_params(config: TargetConfig, key: jax.Array, dtype: jnp.dtype = jnp.float32) -> dict:
    """Returns random parameters, as of `init_layer`, in the tree described above."""
    embed_key, head_key, *layer_keys = jax.random.split(key, config.n_layers + 2)
    shape = (config.vocab_size, config.d_model)
    init_norm = jnp.zeros if config.norm_offset else jnp.ones
    params = {
        "embed": {"weight": 0.02 * jax.random.normal(embed_key, shape, dtype)},
        "layers": [
            init_layer(config, kind, layer_key, dtype)
            for kind, layer_key in zip(config.layer_kinds, layer_keys, strict=True)
        ],
        "final_norm": {"weight": init_norm(config.d_model, dtype)},
    }
    if not config.tied_embeddings:
        params["lm_head"] = {"weight": 0.02 * jax.random.normal(head_key, shape, dtype)}
    return params
