"""What an HF config.json of each family means, and what of it is refused by name."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from spd_jax.checks import ConfigError
from spd_jax.config import DeltaNetConfig, LayerKind
from spd_jax.weights.hf import load_hf, write_target
from spd_jax.weights.hf_config import FAMILIES, config_from_hf, config_to_hf
from tests.random_models import CONFIG, HYBRID

PATH = Path("config.json")
DENSE = dict(
    vocab_size=100, hidden_size=32, num_hidden_layers=8, num_attention_heads=4,
    num_key_value_heads=2, intermediate_size=48, max_position_embeddings=64,
)  # fmt: skip
MOE = DENSE | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
QWEN3_5 = DENSE | {"model_type": "qwen3_5_text"}
QWEN3_NEXT = MOE | {"model_type": "qwen3_next", "shared_expert_intermediate_size": 24}


def composite(text: dict, model_type: str = "qwen3_5", **whole) -> dict:
    return {"model_type": model_type, "text_config": text, **whole}


def test_qwen3_5_has_its_published_facts_where_the_config_is_silent():
    config = config_from_hf(QWEN3_5, PATH)
    mixers = [kind.mixer for kind in config.layer_kinds]
    assert mixers == ["delta", "delta", "delta", "attention"] * 2
    assert (config.head_dim, config.n_rotary) == (256, 64)
    assert config.norm_offset and config.attn_gate and config.qk_norm
    assert config.delta == DeltaNetConfig(16, 32, 128, 128, 4)
    assert config.experts is None and not config.tied_embeddings


def test_sparse_layers_are_those_that_the_config_does_not_except():
    fields = MOE | {"model_type": "qwen3_moe", "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    config = config_from_hf(fields, PATH)
    sparse = [i for i, kind in enumerate(config.layer_kinds) if kind.mlp == "experts"]
    assert sparse == [1, 5, 7]
    assert config.head_dim == 8 and not config.experts.normalise
    assert config_from_hf(QWEN3_NEXT, PATH).experts.normalise
    # The class of Qwen3.5 has no such fields: all its layers are sparse.
    fields |= {"model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 24}
    del fields["intermediate_size"]
    config = config_from_hf(fields, PATH)
    assert {kind.mlp for kind in config.layer_kinds} == {"experts"} and config.d_ff is None


@pytest.mark.parametrize("of_text", [True, False, None])
@pytest.mark.parametrize("of_whole", [True, False])
def test_the_whole_decides_whether_embeddings_are_tied(of_text, of_whole):
    text = QWEN3_5 | ({} if of_text is None else {"tie_word_embeddings": of_text})
    config = config_from_hf(composite(text, tie_word_embeddings=of_whole), PATH)
    assert config.tied_embeddings is of_whole


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (QWEN3_5 | {"attn_output_gate": False}, "attn_output_gate = False"),
        (QWEN3_5 | {"attention_bias": True}, "attention_bias = True"),
        (QWEN3_5 | {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        (QWEN3_5 | {"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn'"),
        (QWEN3_5 | {"partial_rotary_factor": 1.5}, "partial_rotary_factor must be at most 1"),
        (QWEN3_5 | {"partial_rotary_factor": 0.005}, "rotary_dim must be at least 2"),
        (QWEN3_5 | {"linear_num_key_heads": 3}, "n_value_heads"),
        (QWEN3_5 | {"linear_key_head_dim": "8"}, "linear_key_head_dim must be a positive"),
        (QWEN3_5 | {"layer_types": ["full_attention"]}, "layer_types must be a list of 8"),
        (QWEN3_5 | {"layer_types": [["full_attention"]] * 8}, "layer_types with"),
        (QWEN3_5 | {"layer_types": ["sliding_attention"] * 8}, "'sliding_attention'"),
        (DENSE | {"model_type": "qwen3", "layer_types": ["linear_attention"] * 8}, "linear"),
        (DENSE | {"model_type": "qwen3", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (QWEN3_NEXT | {"num_experts_per_tok": 5}, "n_active"),
        (QWEN3_NEXT | {"mlp_only_layers": [8]}, "layers below 8"),
        (QWEN3_NEXT | {"norm_topk_prob": "yes"}, "norm_topk_prob must be true or false"),
        (DENSE | {"model_type": "qwen3_moe"}, "num_experts must be"),
        (composite(QWEN3_5, quantization_config={"quant_method": "fp8"}), "quantization_config"),
        (QWEN3_5 | {"num_hidden_layers": 2**31 - 1}, "num_hidden_layers must be at most 10000"),
        (QWEN3_5 | {"head_dim": 10**400}, "head_dim must be a positive integer below"),
        (QWEN3_5 | {"rms_norm_eps": 10**400}, "rms_norm_eps must be a positive number"),
        (composite(None), "must hold a text_config"),
        (DENSE | {"model_type": "qwen4"}, "model_type must be one of"),
        (DENSE | {"model_type": ["qwen3"]}, "model_type must be one of"),
    ],
)
def test_what_we_do_not_run_is_named(fields, words):
    with pytest.raises(ConfigError, match=words) as error:
        config_from_hf(fields, PATH)
    assert str(error.value).startswith("config.json: ") and "\n" not in str(error.value)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_reading_gives_what_was_written(model_type, tmp_path, random_params, assert_same):
    family = FAMILIES[model_type]
    base = HYBRID if family.hybrid else CONFIG
    experts = HYBRID.experts if family.experts else None
    if experts and not family.shared:
        experts = dataclasses.replace(experts, shared_d_ff=None)
    kinds = None
    if family.hybrid or family.experts:
        mixers = [kind.mixer for kind in HYBRID.kinds] if family.hybrid else ["attention"] * 4
        dense = 2 if family.some_dense else len(mixers) * (not family.experts)
        kinds = [LayerKind(m, "dense" if i < dense else "experts") for i, m in enumerate(mixers)]
    config = dataclasses.replace(
        base,
        model_type=model_type,
        kinds=kinds,
        experts=experts,
        qk_norm=family.qk_norm,
        d_ff=None if family.experts and not family.some_dense else base.d_ff,
    )
    params = random_params(config)
    assert config_from_hf(config_to_hf(config), PATH) == config
    write_target(tmp_path, config, params)
    loaded = load_hf(tmp_path, "float32")
    assert loaded.config == config
    assert_same(loaded.params, params)


def test_fused_experts_are_those_one_by_one(tmp_path, random_params, assert_same):
    config = dataclasses.replace(HYBRID, model_type="qwen3_next")
    write_target(tmp_path, config, random_params(config))
    want = jax.tree.map(np.asarray, load_hf(tmp_path, "float32").params)
    path = tmp_path / "model.safetensors"
    tensors, fused = load_file(path), {}
    for name in list(tensors):
        before, is_expert, after = name.partition(".experts.")
        if is_expert:
            fused.setdefault(before, {})[after] = tensors.pop(name)
    for before, parts in fused.items():
        stack = [
            np.stack([parts[f"{e}.{part}_proj.weight"] for e in range(config.experts.n_experts)])
            for part in ("gate", "up", "down")
        ]
        tensors[f"{before}.experts.gate_up_proj"] = np.concatenate(stack[:2], axis=1)
        tensors[f"{before}.experts.down_proj"] = stack[2]
    save_file(tensors, path)
    assert_same(load_hf(tmp_path, "float32").params, want)


def test_projections_by_key_head_hold_query_key_value_and_gate_of_each(tmp_path, random_params):
    """qwen3_next: rows of one key head lie together; ours go by what they are."""
    config = dataclasses.replace(HYBRID, model_type="qwen3_next")
    params = random_params(config)
    write_target(tmp_path, config, params)
    stored = load_file(tmp_path / "model.safetensors")[
        "model.layers.0.linear_attn.in_proj_qkvz.weight"
    ]
    ours, d = np.asarray(params["layers"][0]["delta"]["in_proj"]["weight"]), config.delta
    wide = d.n_value_heads // d.n_key_heads * d.value_dim
    by_head = stored.reshape(d.n_key_heads, 2 * d.key_dim + 2 * wide, -1)
    starts = {"q": 0, "k": d.n_keys, "v": 2 * d.n_keys, "z": d.n_channels}
    for head, rows in enumerate(by_head):
        parts = np.split(rows, [d.key_dim, 2 * d.key_dim, 2 * d.key_dim + wide])
        for start, part in zip(starts.values(), parts, strict=True):
            at = start + head * len(part)
            np.testing.assert_array_equal(part, ours[at : at + len(part)])


def test_vision_and_prediction_heads_are_left_out_with_one_line(tmp_path, random_params, caplog):
    config = dataclasses.replace(
        HYBRID, model_type="qwen3_5_text", experts=None,
        kinds=[LayerKind(kind.mixer) for kind in HYBRID.kinds],
    )  # fmt: skip
    write_target(tmp_path, config, random_params(config))
    path = tmp_path / "model.safetensors"
    tensors = {
        name.replace("model.", "model.language_model.", 1): x for name, x in load_file(path).items()
    }
    others = {"model.visual.patch.weight": np.ones(2), "mtp.fc.weight": np.ones(2)}
    save_file(tensors | others, path)
    text = json.loads((tmp_path / "config.json").read_text())
    whole = composite(text, tie_word_embeddings=False)
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert load_hf(tmp_path, "float32").config == config
    (line,) = [r.getMessage() for r in caplog.records]
    assert "2 tensors of vision and token prediction" in line


def test_one_tensor_under_two_names_is_refused(tmp_path, random_params, refused):
    write_target(tmp_path, CONFIG, random_params(CONFIG))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    again = {"model.language_model.norm.weight": tensors["model.norm.weight"]}
    save_file(tensors | again, path)
    with refused("model.norm.weight", "model.language_model.norm.weight", "the same tensor"):
        load_hf(tmp_path, "float32")


def test_a_name_that_is_twice_in_a_json_file_is_refused(tmp_path, refused):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "model_type": "qwen3"}')
    with refused("config.json", "'model_type' is there twice"):
        load_hf(tmp_path, "float32")


@pytest.mark.parametrize("change", ["other values", "cut short", "removed"])
def test_weights_that_change_before_they_are_placed_are_not_mixed_in(
    tmp_path, random_params, refused, change
):
    write_target(tmp_path, CONFIG, random_params(CONFIG))
    loaded, path = load_hf(tmp_path, "float32"), tmp_path / "model.safetensors"
    if change == "other values":
        tensors = load_file(path)
        path.unlink()
        save_file({name: x + 1 for name, x in tensors.items()}, path)
    elif change == "cut short":
        path.write_bytes(path.read_bytes()[:-100])
    else:
        path.unlink()
    with refused("model.safetensors", "changed or removed"):
        loaded.place()
