"""Random tiny models made by HF transformers itself, of every architecture that we run.

A seed decides all: sizes, heads, tied or not, RoPE, patterns of layers, experts.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import torch
import transformers

ARCHITECTURES = (
    "llama", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5", "qwen3_5_moe_text",
    "qwen3_5_moe",
)  # fmt: skip
HYBRID = ARCHITECTURES[3:]
VOCAB = 101


def random_settings(architecture: str, seed: int) -> dict:
    """Fields of an HF config, as its own class names them."""
    rng = np.random.default_rng((ARCHITECTURES.index(architecture), seed))
    pick = lambda *values: values[rng.integers(len(values))]  # noqa: E731
    n_layers, n_kv = int(rng.integers(3, 9)), pick(1, 2)
    settings = dict(
        vocab_size=VOCAB,
        hidden_size=pick(24, 32, 48),
        num_hidden_layers=n_layers,
        num_attention_heads=n_kv * pick(1, 2, 3),
        num_key_value_heads=n_kv,
        head_dim=pick(8, 16),
        intermediate_size=pick(40, 64),
        max_position_embeddings=512,
        rms_norm_eps=pick(1e-6, 1e-5),
        tie_word_embeddings=bool(pick(True, False)),
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    rope = {"rope_type": "default", "rope_theta": pick(1e4, 1e6)}
    if architecture == "llama" and pick(True, False):
        rope |= {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        }  # fmt: skip
    if architecture in HYBRID:
        rope["partial_rotary_factor"] = pick(0.25, 0.5, 1.0)
        n_keys = pick(1, 2)
        settings |= dict(
            layer_types=_layer_types(rng, n_layers),
            linear_num_key_heads=n_keys,
            linear_num_value_heads=n_keys * pick(1, 2, 3),
            linear_key_head_dim=pick(4, 8),
            linear_value_head_dim=pick(4, 8),
            linear_conv_kernel_dim=pick(2, 4),
        )
    if "moe" in architecture or architecture == "qwen3_next":
        settings |= dict(
            num_experts=pick(4, 8),
            num_experts_per_tok=pick(1, 2, 4),
            moe_intermediate_size=pick(16, 24),
        )
        if architecture != "qwen3_moe":
            settings["shared_expert_intermediate_size"] = pick(16, 32)
        if architecture in ("qwen3_moe", "qwen3_next"):
            settings |= dict(
                norm_topk_prob=bool(pick(True, False)),
                decoder_sparse_step=pick(1, 2),
                mlp_only_layers=pick([], [0], [1, n_layers - 1]),
            )
        if architecture.startswith("qwen3_5"):
            del settings["intermediate_size"]
    return settings | {"rope_parameters": rope}


def write_model(directory: Path, architecture: str, seed: int) -> torch.nn.Module:
    """Makes a model, writes its HF directory and returns it, in float32."""
    torch.manual_seed(seed)
    settings = random_settings(architecture, seed)
    if architecture in ("qwen3_5", "qwen3_5_moe"):
        vision = dict(
            depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=4,
            out_hidden_size=settings["hidden_size"], num_position_embeddings=16,
        )  # fmt: skip
        whole = {name: settings.pop(name) for name in ("tie_word_embeddings",)}
        text = settings | whole
        settings = whole | {"text_config": text, "vision_config": vision}
    config = transformers.AutoConfig.for_model(architecture, **settings)
    kind = transformers.AutoModelForCausalLM
    if architecture in ("qwen3_5", "qwen3_5_moe"):
        kind = transformers.AutoModelForImageTextToText
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the peer's own are not ours to mend
        model = kind.from_config(config, dtype=torch.float32, attn_implementation="eager")
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and not name.endswith(("A_log", "dt_bias")):
                parameter.data += 0.1 * torch.randn_like(parameter)  # norms
            elif "embed_tokens" in name and not config.tie_word_embeddings:
                parameter.data /= config.get_text_config().initializer_range
        model.save_pretrained(directory)
    return model.eval()


def hf_logits(model: torch.nn.Module, ids: list[int]) -> np.ndarray:
    """Logits [T, V] of one text."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0].numpy()


def hf_greedy(model: torch.nn.Module, prompt: list[int], n_new: int) -> list[int]:
    """The ids that the model writes after a prompt."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=n_new,
            do_sample=False,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


def _layer_types(rng: np.random.Generator, n_layers: int) -> list[str]:
    """Every fourth layer of full attention, or any at all; at least one of each kind."""
    full = np.arange(n_layers) % 4 == 3
    if rng.random() < 0.5 or not full.any():
        full = rng.random(n_layers) < 0.4
        full[rng.permutation(n_layers)[:2]] = True, False
    return ["full_attention" if here else "linear_attention" for here in full]
