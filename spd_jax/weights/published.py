"""The published geometry of models by name, where no file of theirs is at hand.

Values of their public configs and model cards; a config.json always goes before them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spd_jax.config import TargetConfig
from spd_jax.weights.hf_config import config_from_hf

_QWEN3_5_4B = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_hidden_layers": 32,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "attention_bias": False,
    "attn_output_gate": True,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000.0,
        "partial_rotary_factor": 0.25,
    },
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": True,
}
_QWEN3_5_9B = _QWEN3_5_4B | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "tie_word_embeddings": False,
}
_SMOLLM2_135M = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rope_theta": 100000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3.5-4B": _QWEN3_5_4B,
    "Qwen/Qwen3.5-9B": _QWEN3_5_9B,
    "smollm2-135m": _SMOLLM2_135M,
}
_INFERRED = {
    "Qwen/Qwen3.5-4B": "Qwen/Qwen3.5-4B: no config.json at hand; tie_word_embeddings (true) is "
    "inferred from the published parameter count"
}


def published_names() -> tuple[str, ...]:
    """The models whose geometry is known here."""
    return tuple(_PUBLISHED)


def published_config(name: str) -> tuple[TargetConfig, str | None] | None:
    """Returns the geometry of a model and a line on what is inferred of it, not published.

    None where the name is not known.
    """
    if name not in _PUBLISHED:
        return None
    return config_from_hf(_PUBLISHED[name], Path(name)), _INFERRED.get(name)
