"""The "tiny" target: a deterministic random llama over bytes that needs no download.

Its head is the embedding permuted by one 256-cycle plus noise (a planted bigram), so that greedy
text wanders instead of repeating itself. Its text means nothing; every path of the code runs.
"""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from spd_jax.config import TargetConfig
from spd_jax.weights import keymaps
from spd_jax.weights.leaves import write_leaves
from spd_jax.weights.loaded import LoadedTarget, run_dtype
from spd_jax.weights.tokenizer import ChatTokenizer, wrap_backend

TINY_CONFIG = TargetConfig(
    vocab_size=256,
    d_model=64,
    n_layers=10,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    d_ff=96,
    norm_eps=1e-5,
    rope_theta=10000.0,
    max_context=4096,
    tied_embeddings=False,
)
_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def load_tiny(dtype: str) -> LoadedTarget:
    """Returns the tiny target; it names no end ids."""
    params = _random_params(TINY_CONFIG, np.random.Generator(np.random.PCG64(20240)))
    digest = hashlib.sha256()
    sizes, leaves = keymaps.target_sizes(TINY_CONFIG), keymaps.dense_leaves(False)
    parts = [(params, (keymaps.EMBED, keymaps.FINAL_NORM, keymaps.LM_HEAD))]
    parts += [(layer, leaves) for layer in params["layers"]]
    for tree, names in parts:
        for name, array in write_leaves(tree, names, "", sizes):
            digest.update(name.encode() + array.tobytes())
    params = jax.tree.map(lambda x: x.astype(run_dtype(dtype)), params)
    return LoadedTarget(TINY_CONFIG, params, byte_tokenizer(), (), digest.hexdigest())


def byte_tokenizer() -> ChatTokenizer:
    """Returns the tokenizer whose ids are bytes, with "user: ...\\nassistant: " as its chat."""
    # ByteLevel maps bytes to printable letters: printable latin-1 to itself, others from U+0100.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (chr(256 + i) for i in range(256))
    vocab = {chr(b) if b in printable else next(others): b for b in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return wrap_backend(backend, _TEMPLATE, None)


def _random_params(config: TargetConfig, rng: np.random.Generator) -> dict[str, Any]:
    residual = ("o_proj.weight", "down_proj.weight")

    def take(name: str, shape: tuple[int, ...]) -> np.ndarray:
        noise = rng.standard_normal(shape, dtype=np.float32)
        if len(shape) == 1:
            return 1 + np.float32(0.1) * noise
        if name.startswith("model.embed_tokens"):
            return noise
        return noise * np.float32(0.05 if name.endswith(residual) else 0.15)

    params = keymaps.read_target(config, "hf", keymaps.HF_LAYER_PREFIX, take)
    params = jax.tree.map(np.asarray, params)
    cycle = rng.permutation(config.vocab_size)
    follows = np.empty_like(cycle)
    follows[cycle] = np.roll(cycle, -1)
    # Row `follows[v]` of the head points along the embedding of v: v is mostly followed by it.
    params["lm_head"]["weight"][follows] += np.float32(0.12) * params["embed"]["weight"]
    return params
