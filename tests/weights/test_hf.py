"""HF directories: read exactly, in one file or shards; what is damaged or unsupported is named."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from spd_jax.config import Llama3Scaling
from spd_jax.weights import load_target_files
from spd_jax.weights.hf import load_hf, write_target
from spd_jax.weights.hf_config import config_from_hf, config_to_hf
from spd_jax.weights.tiny import byte_tokenizer

SCALING = Llama3Scaling(8.0, 1.0, 4.0, 64)


@pytest.fixture
def directory(tmp_path, config, random_params):
    write_target(tmp_path / "m", config, random_params(config))
    return tmp_path / "m"


def shard(directory, n: int = 3) -> None:
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for i in range(n):
        file = f"model-{i}.safetensors"
        save_file({name: tensors[name] for name in names[i::n]}, directory / file)
        weight_map |= dict.fromkeys(names[i::n], file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "model.safetensors").unlink()


def edit(path, **changes) -> None:
    fields = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(fields | changes))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("scaling", [None, SCALING])
def test_reading_gives_what_was_written(
    tmp_path, config, random_params, assert_same, tied, scaling
):
    config = dataclasses.replace(config, tied_embeddings=tied, rope_scaling=scaling)
    params = random_params(config)
    write_target(tmp_path / "m", config, params)
    target = load_target_files(tmp_path / "m")
    assert target.config == config
    assert_same(target.params, params)
    assert target.stop_ids == () and target.tokenizer is None


def test_shards_give_the_same_arrays_as_one_file(directory, assert_same):
    one = load_hf(directory, "float32")
    whole = jax.tree.map(np.asarray, one.params)
    shard(directory)
    many = load_hf(directory, "float32")
    assert_same(many.params, whole)
    assert many.sha256 == load_hf(directory, "bfloat16").sha256 != one.sha256
    path = directory / "model-1.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert load_hf(directory, "float32").sha256 != many.sha256


def test_stored_bfloat16_is_read_exactly(directory, assert_same):
    loaded = load_hf(directory, "bfloat16")
    narrow = jax.tree.map(np.asarray, loaded.params)
    write_target(directory, loaded.config, narrow)
    again = jax.tree.map(np.asarray, load_hf(directory, "bfloat16").params)
    assert_same(again, narrow)
    wide = load_hf(directory, "float32").params["embed"]["weight"]
    np.testing.assert_array_equal(wide, narrow["embed"]["weight"].astype(np.float32))


def test_the_old_rope_style_means_the_same(config, tmp_path):
    config = dataclasses.replace(config, rope_scaling=SCALING, rope_theta=77.0)
    fields = config_to_hf(config)
    rope = fields.pop("rope_parameters")
    fields |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    assert config_from_hf(fields, tmp_path) == config
    rope["type"] = rope.pop("rope_type")  # older still
    assert config_from_hf(fields, tmp_path) == config
    assert config_from_hf(fields | {"rope_scaling": None}, tmp_path).rope_scaling is None


def test_transformers_reads_the_written_config(directory, config):
    from transformers import LlamaConfig

    hf = LlamaConfig.from_pretrained(directory)
    assert (hf.hidden_size, hf.head_dim, hf.num_key_value_heads) == (32, 8, 2)
    assert config_from_hf(json.loads(hf.to_json_string(use_diff=False)), directory) == config


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_type", "mistral"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("hidden_act", "gelu"),
        ("sliding_window", 128),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("partial_rotary_factor", 0.5),
        ("quantization_config", {"quant_method": "gptq"}),
        ("rope_parameters", {"rope_type": "yarn", "factor": 2.0}),
        ("rope_parameters", {"full_attention": {"rope_type": "default"}}),
        ("rope_parameters", {"rope_type": "llama3"}),
        ("hidden_size", "32"),
        ("num_hidden_layers", 0),
        ("num_key_value_heads", 3),
        ("rms_norm_eps", -1),
        ("rms_norm_eps", float("inf")),
        ("tie_word_embeddings", "false"),
        ("layer_types", 5),
        ("eos_token_id", 10**6),
        ("eos_token_id", True),
    ],
)
def test_an_unsupported_or_wrong_field_is_named(directory, refused, name, value):
    edit(directory / "config.json", **{name: value})
    word = {"rope_parameters": "", "num_key_value_heads": "n_kv_heads"}.get(name, name)
    with refused("config.json", word):
        load_hf(directory, "float32")


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_a_broken_config_is_named(directory, refused, text):
    (directory / "config.json").write_text(text, encoding="latin-1")
    with refused("config.json"):
        load_hf(directory, "float32")


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 2000, -1000, -1])
def test_truncated_weights_are_named(directory, refused, keep):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with refused("model.safetensors", "not a whole"):
        load_hf(directory, "float32")


def test_missing_misshapen_and_unknown_tensors_are_named(directory, refused):
    path, name = directory / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    whole = load_file(path)
    cases = (
        ({k: v for k, v in whole.items() if k != name}, name),
        (whole | {name: whole[name].T.copy()}, name),
        (whole | {name: whole[name].astype(np.int8)}, name),
        (whole | {"model.layers.0.self_attn.q_proj.bias": np.zeros(32)}, "q_proj.bias"),
    )
    for tensors, word in cases:
        save_file(tensors, path)
        with refused("model.safetensors", word):
            load_hf(directory, "float32")


def test_missing_files_are_named(directory, refused):
    shard(directory)
    (directory / "model-2.safetensors").unlink()
    with refused("model-2.safetensors"):
        load_hf(directory, "float32")
    for name in ("../m/model-1.safetensors", "", ".."):
        edit(directory / "model.safetensors.index.json", weight_map={"a": name})
        with refused(f"{name!r} is not the name of a file beside it"):
            load_hf(directory, "float32")
    (directory / "model.safetensors.index.json").unlink()
    with refused("safetensors"):
        load_hf(directory, "float32")
    (directory / "config.json").unlink()
    with refused("config.json"):
        load_hf(directory, "float32")


def test_stop_ids_are_the_union_of_their_sources(tmp_path, config, random_params, refused):
    directory, config = tmp_path / "m", dataclasses.replace(config, vocab_size=300)
    write_target(directory, config, random_params(config))
    edit(directory / "config.json", eos_token_id=9)
    assert load_hf(directory, "float32").stop_ids == (9,)  # no generation_config.json
    edit(directory / "generation_config.json", eos_token_id=None)
    assert load_hf(directory, "float32").stop_ids == ()
    edit(directory / "generation_config.json", eos_token_id=[5, 3])
    assert load_hf(directory, "float32").stop_ids == (3, 5)
    fast = byte_tokenizer()._fast
    fast.add_special_tokens({"eos_token": "<end>", "additional_special_tokens": ["<|im_end|>"]})
    fast.chat_template = "{{ messages[0]['content'] }}<|im_end|>"
    fast.save_pretrained(directory)
    assert load_hf(directory, "float32").stop_ids == (3, 5, 256, 257)
    edit(directory / "generation_config.json", eos_token_id="</s>")
    with refused("eos_token_id"):
        load_hf(directory, "float32")


def test_a_wrong_source_or_dtype_is_refused(directory, refused, tmp_path):
    for source in ("smollm", str(tmp_path / "absent"), "./a", str(tmp_path / "absent.gguf")):
        with refused(source):
            load_target_files(source)
    with refused("float16", "bfloat16"):
        load_target_files(directory, "float16")


def test_an_unreachable_hub_is_one_line(refused, monkeypatch):
    import huggingface_hub

    def offline(*_, **__):
        raise OSError("a long story\nabout https://some.host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with refused("owner/name", "directory"):
        load_target_files("owner/name")


def test_the_golden_qwen3_is_read(golden, tmp_path):
    path = golden / "qwen3" / "target"
    hf, target = json.loads((path / "config.json").read_text()), load_target_files(path)
    assert (target.config.model_type, target.config.qk_norm) == ("qwen3", True)
    assert not target.config.tied_embeddings and target.config.rope_scaling is None
    assert target.params["layers"][0]["attn"]["q_norm"]["weight"].shape == (hf["head_dim"],)
    write_target(tmp_path / "again", target.config, target.params)
    assert load_target_files(tmp_path / "again").config == target.config


def test_what_qwen3_leaves_out_is_as_in_transformers(config, tmp_path, refused):
    fields = config_to_hf(dataclasses.replace(config, model_type="qwen3", qk_norm=True))
    del fields["head_dim"]
    assert config_from_hf(fields, tmp_path).head_dim == 128
    assert config_from_hf(fields | {"sliding_window": 64}, tmp_path)  # use_sliding_window is false
    with refused("sliding_window = 64 is not supported"):
        config_from_hf(fields | {"sliding_window": 64, "use_sliding_window": True}, tmp_path)


def test_golden_target_is_read(golden):
    path = golden / "llama" / "target"
    hf, target = json.loads((path / "config.json").read_text()), load_target_files(path)
    assert target.config.rope_scaling.factor == hf["rope_parameters"]["factor"]
    assert target.config.tied_embeddings and target.stop_ids == ()
    assert target.config.n_layers == len(target.params["layers"]) == hf["num_hidden_layers"]
