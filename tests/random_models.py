"""Small random targets, and draft modules for them whose acceptance is known beforehand.

A draft module made of the target's own layers, fed embeddings alone, computes what the target
computes: with all of them it is always right. Its head decides what else it can be.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from spd_jax.config import (
    DeltaNetConfig,
    DraftConfig,
    ExpertsConfig,
    LayerKind,
    PipelineConfig,
    TargetConfig,
)
from spd_jax.models import draft as pdm
from spd_jax.models import target as model
from spd_jax.models.bundle import Draft, Target

CONFIG = TargetConfig(
    vocab_size=97,  # a prime: no number of shards divides it
    d_model=32,
    n_layers=4,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    d_ff=48,
    norm_eps=1e-5,
    rope_theta=10000.0,
    max_context=1024,
    tied_embeddings=False,
)
DELTA = DeltaNetConfig(n_key_heads=2, n_value_heads=4, key_dim=8, value_dim=8, conv_width=4)
HYBRID = dataclasses.replace(  # of eight layers: two delta-nets to one of attention, as they come
    CONFIG,
    n_layers=8,
    kinds=tuple(
        LayerKind("attention" if i in (1, 4, 7) else "delta", "experts" if i % 3 else "dense")
        for i in range(8)
    ),
    rotary_dim=4,
    qk_norm=True,
    norm_offset=True,
    attn_gate=True,
    delta=DELTA,
    experts=ExpertsConfig(n_experts=4, n_active=2, d_ff=16, normalise=True, shared_d_ff=24),
)
INIT = 0.02  # the standard deviation of fresh matrices
NEVER = 0  # the id that no random target ever chooses
KINDS = ("random", "perfect", "wrong", "even")


@functools.cache
def make_target(n_layers: int = 4, seed: int = 0, base: TargetConfig = CONFIG) -> Target:
    """A random target; its logit of the id NEVER is zero, so that another is always higher."""
    config = dataclasses.replace(base, n_layers=n_layers)
    params = model.init_params(config, jax.random.key(seed))
    embed, head = params["embed"]["weight"] / INIT, scale_matrix(params["lm_head"]["weight"], 3)
    layers = jax.tree.map(lambda x: scale_matrix(x, 1.4), params["layers"])  # lively texts
    params |= {"embed": {"weight": embed}, "layers": layers}
    params["lm_head"] = {"weight": head.at[NEVER].set(0)}
    return Target(params, config, name=f"random target {seed}")


def full_config(n_layers: int, n_stages: int) -> DraftConfig:
    """As many layers as the target and one row type per depth: any of KINDS can have it."""
    anchors = PipelineConfig(n_layers, n_stages).default_anchors()
    return DraftConfig(anchors, n_stages, n_layers=n_layers, feature_norm="none")


@functools.cache
def make_draft(target: Target, config: DraftConfig, kind: str, seed: int = 0) -> Draft:
    """A draft module of one of KINDS.

    "random" proposes anything; "wrong" only the id that the target never chooses. The others hold
    the target's first layers: with all of them "perfect" is always right, "even" for even ids.
    """
    width, n_types = target.config.d_model, len(config.anchors)
    if kind == "random":
        params = pdm.init_params(target.config, config, target.params, jax.random.key(seed))
        leaves, tree = jax.tree.flatten(params)
        keys = jax.random.split(jax.random.key(seed), len(leaves))
        noise = [INIT * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
        fresh = [
            scale_matrix(y, 1) if y.ndim == 2 else x for x, y in zip(leaves, noise, strict=True)
        ]
        return Draft(jax.tree.unflatten(tree, fresh), config, "random draft")
    projs = [jnp.eye(width, (i + 1) * width) for i in range(n_types)]  # the embedding alone
    params = {
        "projs": [{"weight": proj} for proj in projs],
        "layers": target.params["layers"][: config.n_layers],
    }
    if config.head == "own":
        head, ids = target.params["lm_head"]["weight"], np.arange(target.config.vocab_size)
        if config.draft_ids is not None:
            ids = np.asarray(config.draft_ids)
        kept = {"perfect": ids >= 0, "wrong": ids < 0, "even": ids % 2 == 0}[kind]
        params["lm_head"] = {"weight": jnp.where(kept[:, None], head[ids], 0)}
    return Draft(params, config, f"{kind} draft")


def make_prompt(n_tokens: int, seed: int = 0) -> list[int]:
    """Random ids."""
    return np.random.default_rng((seed, n_tokens)).integers(0, CONFIG.vocab_size, n_tokens).tolist()


def scale_matrix(x: jax.Array, gain: float = 1) -> jax.Array:
    """Scales matrices as initialised so that they multiply sizes by `gain`; vectors stay."""
    return x * (gain * x.shape[-1] ** -0.5 / INIT) if x.ndim >= 2 else x
