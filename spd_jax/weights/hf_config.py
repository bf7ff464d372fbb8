"""An HF config.json <-> TargetConfig; what we do not run is an error that names it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

from spd_jax.config import ConfigError, Llama3Scaling, TargetConfig

_SIZES = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "d_ff": "intermediate_size",
    "max_context": "max_position_embeddings",
}


class Family(NamedTuple):
    """What a model_type implies."""

    architecture: str
    qk_norm: bool = False
    head_dim: int | None = None  # where the config has none; None: d_model / n_heads
    windowed: bool = True  # a sliding_window counts unless use_sliding_window is false


FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True, head_dim=128, windowed=False),
}
_KNOWN = " or ".join(map(repr, FAMILIES))


def config_from_hf(hf: dict[str, Any], path: Path) -> TargetConfig:
    """Returns the TargetConfig of an HF config of one of FAMILIES.

    Args:
      hf: config.json of old (rope_theta, rope_scaling) or new (rope_parameters) style.
      path: where it was read, for messages.
    Raises:
      ConfigError: another model type, or a feature that we do not run.
    """
    model_type = hf.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ConfigError(f"{path}: model_type must be {_KNOWN}, got {model_type!r}")
    theta, rope = _rope(hf, path)
    layer_types = hf.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise ConfigError(f"{path}: layer_types must be a list, got {layer_types!r}")
    unsupported = {
        "attention_bias": bool(hf.get("attention_bias")),
        "mlp_bias": bool(hf.get("mlp_bias")),
        "hidden_act": hf.get("hidden_act", "silu") != "silu",
        "sliding_window": hf.get("sliding_window") is not None
        and hf.get("use_sliding_window", family.windowed),
        "layer_types": any(kind != "full_attention" for kind in layer_types),
        "partial_rotary_factor": hf.get("partial_rotary_factor") not in (None, 1, 1.0),
        "quantization_config": hf.get("quantization_config") is not None,
    }
    for name, found in unsupported.items():
        if found:
            value = repr(hf[name])
            value = value if len(value) < 60 else "..."
            raise ConfigError(f"{path}: {name} = {value} is not supported")
    sizes = {ours: _int(hf, theirs, path) for ours, theirs in _SIZES.items()}
    default_head_dim = family.head_dim or sizes["d_model"] // sizes["n_heads"]
    try:
        return TargetConfig(
            **sizes,
            n_kv_heads=_int(hf, "num_key_value_heads", path, sizes["n_heads"]),
            head_dim=_int(hf, "head_dim", path, default_head_dim),
            norm_eps=_float(hf, "rms_norm_eps", path, 1e-6),
            rope_theta=theta,
            rope_scaling=rope,
            tied_embeddings=_bool(hf, "tie_word_embeddings", path),
            qk_norm=family.qk_norm,
            model_type=model_type,
        )
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def config_to_hf(config: TargetConfig) -> dict[str, Any]:
    """Returns a config.json that transformers' class of the family and `config_from_hf` read."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        }
    return {
        "architectures": [FAMILIES[config.model_type].architecture],
        "model_type": config.model_type,
        **{theirs: getattr(config, ours) for ours, theirs in _SIZES.items()},
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tied_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _rope(hf: dict[str, Any], path: Path) -> tuple[float, Llama3Scaling | None]:
    """Returns theta and the scaling of the new or the old style."""
    style = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    rope = hf.get(style) or {}
    if not isinstance(rope, dict) or any(isinstance(v, dict) for v in rope.values()):
        raise ConfigError(f"{path}: {style} of several kinds of layers is not supported")
    source = rope if "rope_theta" in rope else hf
    theta = _float(source, "rope_theta", path, 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ConfigError(f"{path}: {style}.partial_rotary_factor is not supported")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ConfigError(f"{path}: rope_type {kind!r} is not supported (default and llama3 are)")
    original = "original_max_position_embeddings"
    return theta, Llama3Scaling(
        factor=_float(rope, "factor", path),
        low_freq_factor=_float(rope, "low_freq_factor", path),
        high_freq_factor=_float(rope, "high_freq_factor", path),
        original_max_position=_int(rope if original in rope else hf, original, path),
    )


def _int(hf: dict[str, Any], name: str, path: Path, default: int | None = None) -> int:
    value = hf.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{path}: {name} must be a positive integer, got {value!r}")
    return value


def _float(hf: dict[str, Any], name: str, path: Path, default: float | None = None) -> float:
    value = hf.get(name)
    value = default if value is None else value
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_number and 0 < value < math.inf):
        raise ConfigError(f"{path}: {name} must be a positive number, got {value!r}")
    return float(value)


def _bool(hf: dict[str, Any], name: str, path: Path) -> bool:
    value = hf.get(name) or False
    if not isinstance(value, bool):
        raise ConfigError(f"{path}: {name} must be true or false, got {value!r}")
    return value
