"""Small random targets, and a decoder in plain float64 numpy that others are compared with."""

import functools
import types

import jax
import numpy as np
import pytest

import spd_jax
from spd_jax.config import TargetConfig
from spd_jax.models.bundle import Target
from spd_jax.ops.rope import inverse_frequencies
from spd_jax.weights import keymaps

CONFIG = TargetConfig(
    vocab_size=64,
    d_model=32,
    n_layers=6,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    d_ff=48,
    norm_eps=1e-5,
    rope_theta=10000.0,
    max_context=512,
    tied_embeddings=False,
)


def make_params(config: TargetConfig, seed: int = 0) -> dict:
    """Float32 normals, scaled so that every part of a layer moves the logits."""
    rng = np.random.default_rng(seed)

    def take(name, shape):
        noise = rng.standard_normal(shape, np.float32)
        if len(shape) == 1:
            return 1 + np.float32(0.2) * noise
        return noise if "embed" in name else noise * np.float32(shape[-1] ** -0.5)

    return keymaps.read_target(config, "hf", "{i}.", take)


@pytest.fixture(scope="session")
def config() -> TargetConfig:
    return CONFIG


@pytest.fixture(scope="session")
def make_target():
    """(config, seed) -> a random Target."""

    def make(config: TargetConfig = CONFIG, seed: int = 0) -> Target:
        return Target(jax.tree.map(jax.numpy.asarray, make_params(config, seed)), config)

    return make


@pytest.fixture(scope="session")
def golden_target(golden):
    """Family -> its golden target."""
    return functools.cache(lambda family: spd_jax.load_target(golden / family / "target"))


@pytest.fixture(scope="session")
def naive():
    """The functions below."""
    return types.SimpleNamespace(
        norm=naive_norm, layers=naive_layers, hidden=naive_hidden, logits=naive_logits
    )


def as_float64(array) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def naive_norm(x, weight, eps):
    """Root-mean-square norm of rows [..., D]."""
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * as_float64(weight)


def naive_rope(x, turn):
    """Turns the first elements of x [T, heads, E] as complex numbers; turn [T, 1, n / 2]."""
    half = turn.shape[-1]
    turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * turn
    return np.concatenate([turned.real, turned.imag, x[..., 2 * half :]], axis=-1)


def naive_attention(config, params, x, positions, mask):
    """One head and one query at a time; RoPE by complex numbers."""
    c, (n_rows, _) = config, x.shape
    qkv = (x @ as_float64(params["qkv"]["weight"]).T).reshape(n_rows, -1, c.head_dim)
    q, k, v = np.split(qkv, [c.n_heads, c.n_heads + c.n_kv_heads], axis=1)
    if c.qk_norm:
        q = naive_norm(q, params["q_norm"]["weight"], c.norm_eps)
        k = naive_norm(k, params["k_norm"]["weight"], c.norm_eps)
    inv_freq = as_float64(inverse_frequencies(c.n_rotary, c.rope_theta, c.rope_scaling))
    turn = np.exp(1j * positions[:, None, None] * inv_freq)
    q, k = (naive_rope(x, turn) for x in (q, k))
    out = np.zeros((n_rows, c.n_heads, c.head_dim))
    for h in range(c.n_heads):
        g = h // (c.n_heads // c.n_kv_heads)
        for t in range(n_rows):
            seen = np.flatnonzero(mask[t])
            scores = k[seen, g] @ q[t, h] / np.sqrt(c.head_dim)
            weights = np.exp(scores - scores.max())
            out[t, h] = weights @ v[seen, g] / weights.sum()
    return out.reshape(n_rows, -1) @ as_float64(params["o"]["weight"]).T


def naive_layers(config, layers, x, positions, mask):
    """Returns the output [T, D] of each layer for rows x [T, D] under a mask [T, T]."""
    outputs = []
    for p in layers:
        normed = naive_norm(x, p["mixer_norm"]["weight"], config.norm_eps)
        x = x + naive_attention(config, p["attn"], normed, positions, mask)
        normed = naive_norm(x, p["mlp_norm"]["weight"], config.norm_eps)
        gate, up = np.split(normed @ as_float64(p["mlp"]["gate_up"]["weight"]).T, 2, axis=-1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ as_float64(p["mlp"]["down"]["weight"]).T
        outputs.append(x)
    return outputs


def naive_hidden(config, params, ids):
    """Returns hidden states [L+1, T, D] of ids [T], the last before the final norm."""
    x, n_rows = as_float64(params["embed"]["weight"])[np.asarray(ids)], len(ids)
    mask = np.tril(np.ones((n_rows, n_rows), bool))
    return np.stack([x, *naive_layers(config, params["layers"], x, np.arange(n_rows), mask)])


def naive_logits(config, params, ids):
    """Returns logits [T, V] of ids [T]."""
    last = naive_hidden(config, params, ids)[-1]
    head = params["embed" if config.tied_embeddings else "lm_head"]["weight"]
    return naive_norm(last, params["final_norm"]["weight"], config.norm_eps) @ as_float64(head).T
