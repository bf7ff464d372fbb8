"""An HF config.json <-> TargetConfig; what we do not run is an error that names it.

The facts that differ between model families are the table FAMILIES.
"""

from __future__ import annotations

import reprlib
import sys
from pathlib import Path
from typing import Any, NamedTuple

from spd_jax.checks import ConfigError
from spd_jax.config import (
    DeltaNetConfig,
    ExpertsConfig,
    LayerKind,
    Llama3Scaling,
    TargetConfig,
)

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
    uses_window: bool = True  # a sliding_window counts unless use_sliding_window is false
    hybrid: bool = False  # delta-nets between gated attention, 1 + w norms, partial RoPE
    experts: bool = False  # mixtures of experts, but for the layers that the config excepts
    some_dense: bool = False  # decoder_sparse_step and mlp_only_layers except layers from that
    shared: bool = False  # one more expert that every token goes to
    normalise: bool | None = None  # norm_topk_prob where the config has none; None: always true


_HYBRID = Family("", qk_norm=True, head_dim=256, uses_window=False, hybrid=True)
_QWEN3_5 = _HYBRID._replace(architecture="Qwen3_5ForCausalLM")
_QWEN3_5_MOE = _HYBRID._replace(architecture="Qwen3_5MoeForCausalLM", experts=True, shared=True)
FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True, head_dim=128, uses_window=False),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        qk_norm=True,
        uses_window=False,
        experts=True,
        some_dense=True,
        normalise=False,
    ),
    "qwen3_next": _QWEN3_5_MOE._replace(
        architecture="Qwen3NextForCausalLM", some_dense=True, normalise=True
    ),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5_MOE,
}
# Multimodal configs hold that of their text model.
_COMPOSITES = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
MAX_LAYERS = 10_000  # each is a part of the program: more are a damaged file
_OF_THE_WHOLE = ("tie_word_embeddings", "quantization_config")  # there they decide, as in HF
_MIXERS = {"full_attention": "attention", "linear_attention": "delta"}
_DELTA_SIZES = {
    "n_key_heads": ("linear_num_key_heads", 16),
    "n_value_heads": ("linear_num_value_heads", 32),
    "key_dim": ("linear_key_head_dim", 128),
    "value_dim": ("linear_value_head_dim", 128),
    "conv_width": ("linear_conv_kernel_dim", 4),
}


def config_from_hf(hf: dict[str, Any], path: Path) -> TargetConfig:
    """Returns the TargetConfig of an HF config of one of FAMILIES.

    Args:
      hf: config.json of old (rope_theta, rope_scaling) or new (rope_parameters) style.
      path: where it was read, for messages.
    Raises:
      ConfigError: another model type, or a feature that we do not run.
    """
    hf = text_config(hf, path)
    model_type = hf["model_type"]
    family = FAMILIES[model_type]
    theta, rope, share = _rope(hf, path, 0.25 if family.hybrid else 1.0)
    unsupported = {
        "attention_bias": bool(hf.get("attention_bias")),
        "mlp_bias": bool(hf.get("mlp_bias")),
        "hidden_act": hf.get("hidden_act", "silu") != "silu",
        "sliding_window": hf.get("sliding_window") is not None
        and hf.get("use_sliding_window", family.uses_window),
        "partial_rotary_factor": share != 1 and not family.hybrid,
        "attn_output_gate": family.hybrid and hf.get("attn_output_gate", True) is not True,
        "quantization_config": hf.get("quantization_config") is not None,
    }
    for name, found in unsupported.items():
        if found:
            value = repr(hf.get(name, share))
            value = value if len(value) < 60 else "..."
            raise ConfigError(f"{path}: {name} = {value} is not supported")
    sizes = {
        ours: _int(hf, theirs, path)
        for ours, theirs in _SIZES.items()
        if ours != "d_ff" or theirs in hf or not family.experts
    }
    if sizes["n_layers"] > MAX_LAYERS:
        raise ConfigError(
            f"{path}: num_hidden_layers must be at most {MAX_LAYERS}, got {sizes['n_layers']}"
        )
    head_dim = _int(hf, "head_dim", path, family.head_dim or sizes["d_model"] // sizes["n_heads"])
    kinds = _layer_kinds(hf, family, sizes["n_layers"], path)
    n_kv_heads = _int(hf, "num_key_value_heads", path, sizes["n_heads"])
    norm_eps, tied = _float(hf, "rms_norm_eps", path, 1e-6), _bool(hf, "tie_word_embeddings", path)
    delta = _delta(hf, path) if family.hybrid else None
    experts = _experts(hf, family, path) if family.experts else None
    try:
        return TargetConfig(
            **{"d_ff": None} | sizes,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            norm_eps=norm_eps,
            rope_theta=theta,
            rope_scaling=rope,
            tied_embeddings=tied,
            qk_norm=family.qk_norm,
            model_type=model_type,
            kinds=None if set(kinds) == {LayerKind()} else kinds,
            rotary_dim=None if share == 1 else int(head_dim * share),
            norm_offset=family.hybrid,
            attn_gate=family.hybrid,
            delta=DeltaNetConfig(**delta) if delta else None,
            experts=ExpertsConfig(**experts) if experts else None,
        )
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def text_config(hf: dict[str, Any], path: Path) -> dict[str, Any]:
    """Returns the config of the language model, where that is a part of the whole.

    Raises:
      ConfigError: none of FAMILIES.
    """
    model_type = hf.get("model_type")
    if isinstance(model_type, str) and model_type in _COMPOSITES:
        text = hf.get("text_config")
        if not isinstance(text, dict):
            raise ConfigError(f"{path}: {model_type} must hold a text_config, got {text!r}")
        whole = {name: hf[name] for name in _OF_THE_WHOLE if hf.get(name) is not None}
        return {**text, **whole, "model_type": _COMPOSITES[model_type]}
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join([*FAMILIES, *_COMPOSITES])
        raise ConfigError(f"{path}: model_type must be one of {known}, got {model_type!r}")
    return hf


def _layer_kinds(
    hf: dict[str, Any], family: Family, n_layers: int, path: Path
) -> tuple[LayerKind, ...]:
    types = hf.get("layer_types")
    if types is None:
        every = _int(hf, "full_attention_interval", path, 4) if family.hybrid else 1
        types = [
            "linear_attention" if (i + 1) % every else "full_attention" for i in range(n_layers)
        ]
    allowed = _MIXERS if family.hybrid else {"full_attention": "attention"}
    if not isinstance(types, list) or len(types) != n_layers:
        raise ConfigError(f"{path}: layer_types must be a list of {n_layers}, got {types!r}")
    for kind in types:
        if not isinstance(kind, str) or kind not in allowed:
            raise ConfigError(f"{path}: layer_types with {kind!r} is not supported")
    step, dense = 1, []
    if family.some_dense:
        step, dense = _int(hf, "decoder_sparse_step", path, 1), hf.get("mlp_only_layers") or []
        if not isinstance(dense, list) or not all(
            type(i) is int and 0 <= i < n_layers for i in dense
        ):
            raise ConfigError(
                f"{path}: mlp_only_layers must be a list of layers below {n_layers}, got {dense!r}"
            )
    is_sparse = [family.experts and i not in dense and (i + 1) % step == 0 for i in range(n_layers)]
    return tuple(
        LayerKind(_MIXERS[mixer], "experts" if sparse else "dense")
        for mixer, sparse in zip(types, is_sparse, strict=True)
    )


def _delta(hf: dict[str, Any], path: Path) -> dict[str, int]:
    return {ours: _int(hf, name, path, default) for ours, (name, default) in _DELTA_SIZES.items()}


def _experts(hf: dict[str, Any], family: Family, path: Path) -> dict[str, Any]:
    shared = "shared_expert_intermediate_size"
    default = family.normalise
    return dict(
        n_experts=_int(
            hf, "num_local_experts" if "num_local_experts" in hf else "num_experts", path
        ),
        n_active=_int(hf, "num_experts_per_tok", path),
        d_ff=_int(hf, "moe_intermediate_size", path),
        normalise=True if default is None else _bool(hf, "norm_topk_prob", path, default),
        shared_d_ff=_int(hf, shared, path) if family.shared else None,
    )


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
    if config.rotary_dim is not None:
        rope["partial_rotary_factor"] = config.rotary_dim / config.head_dim
    fields = {theirs: getattr(config, ours) for ours, theirs in _SIZES.items()}
    fields |= {
        "architectures": [FAMILIES[config.model_type].architecture],
        "model_type": config.model_type,
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
    if config.delta is not None:
        theirs = {mixer: name for name, mixer in _MIXERS.items()}
        fields["layer_types"] = [theirs[kind.mixer] for kind in config.layer_kinds]
        fields |= {name: getattr(config.delta, ours) for ours, (name, _) in _DELTA_SIZES.items()}
    if config.experts is not None:
        dense = [i for i, kind in enumerate(config.layer_kinds) if kind.mlp == "dense"]
        fields |= {
            "num_experts": config.experts.n_experts,
            "num_experts_per_tok": config.experts.n_active,
            "moe_intermediate_size": config.experts.d_ff,
            "norm_topk_prob": config.experts.normalise,
            "decoder_sparse_step": 1,
            "mlp_only_layers": dense,
        }
        if config.experts.shared_d_ff is not None:
            fields["shared_expert_intermediate_size"] = config.experts.shared_d_ff
    return {name: value for name, value in fields.items() if name != "intermediate_size" or value}


def _rope(
    hf: dict[str, Any], path: Path, default_share: float
) -> tuple[float, Llama3Scaling | None, float]:
    """Returns theta, the scaling and the share of a head that turns, of the new or old style."""
    style = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    rope = hf.get(style) or {}
    if not isinstance(rope, dict) or any(isinstance(v, dict) for v in rope.values()):
        raise ConfigError(f"{path}: {style} of several kinds of layers is not supported")
    source = rope if "rope_theta" in rope else hf
    theta = _float(source, "rope_theta", path, 10000.0)
    partial = "partial_rotary_factor"
    share = _float(rope if rope.get(partial) is not None else hf, partial, path, default_share)
    if share > 1:
        raise ConfigError(f"{path}: {partial} must be at most 1, got {share}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    # Sections of a multimodal position agree for text, where all three positions are the token's.
    if kind == "default" or (kind == "mrope" and "mrope_section" in rope):
        return theta, None, share
    if kind != "llama3":
        raise ConfigError(f"{path}: rope_type {kind!r} is not supported (default and llama3 are)")
    original = "original_max_position_embeddings"
    scaling = Llama3Scaling(
        factor=_float(rope, "factor", path),
        low_freq_factor=_float(rope, "low_freq_factor", path),
        high_freq_factor=_float(rope, "high_freq_factor", path),
        original_max_position=_int(rope if original in rope else hf, original, path),
    )
    return theta, scaling, share


def _int(hf: dict[str, Any], name: str, path: Path, default: int | None = None) -> int:
    value = hf.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        shown = reprlib.repr(value)
        raise ConfigError(f"{path}: {name} must be a positive integer below 2^31, got {shown}")
    return value


def _float(hf: dict[str, Any], name: str, path: Path, default: float | None = None) -> float:
    value = hf.get(name)
    value = default if value is None else value
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_number and 0 < value < sys.float_info.max):
        raise ConfigError(f"{path}: {name} must be a positive number, got {value!r}")
    return float(value)


def _bool(hf: dict[str, Any], name: str, path: Path, default: bool = False) -> bool:
    value = hf.get(name)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise ConfigError(f"{path}: {name} must be true or false, got {value!r}")
    return value
