"""GGUF files: rows back in HF order, and nothing damaged or unsupported read silently."""

import dataclasses

import gguf
import numpy as np
import pytest

from spd_jax.weights import keymaps, load_target_files
from spd_jax.weights.gguf import llama3_divisors, load_gguf, unpermute
from spd_jax.weights.leaves import write_leaves

TOKENS = ["<|im_start|>", "<|im_end|>", "<|eot|>", *"abcdefghijklmnopqrstuvwxyzĠ!?.", "ab", "abc"]
MERGES = ["a b", "ab c"]
TEMPLATE = "{{ messages[0]['content'] }}<|im_end|>"


def permute(array: np.ndarray, n_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k, as its source has it."""
    return (
        array.reshape(n_heads, 2, array.shape[0] // n_heads // 2, *array.shape[1:])
        .swapaxes(1, 2)
        .reshape(array.shape)
    )


def tensors_of(config, params) -> dict[str, np.ndarray]:
    """GGUF name -> array."""
    sizes, tensors = keymaps.target_sizes(config), {}
    leaves = [(params, keymaps.EMBED, ""), (params, keymaps.FINAL_NORM, "")]
    leaves += [] if config.tied_embeddings else [(params, keymaps.LM_HEAD, "")]
    for i, layer in enumerate(params["layers"]):
        leaves += [
            (layer, leaf, keymaps.GGUF_LAYER_PREFIX.format(i=i))
            for leaf in keymaps.dense_leaves(False)
        ]
    for tree, leaf, prefix in leaves:
        renamed = leaf._replace(hf=leaf.gguf)
        tensors |= write_leaves(tree, [renamed], prefix, sizes)
    for name in tensors:
        n_heads = {"attn_q": config.n_heads, "attn_k": config.n_kv_heads}.get(name.split(".")[-2])
        tensors[name] = tensors[name] if n_heads is None else permute(tensors[name], n_heads)
    return tensors


def write_gguf(path, config, tensors, architecture="llama", quantize=None, **extra) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.n_layers)
    writer.add_context_length(config.max_context)
    writer.add_embedding_length(config.d_model)
    writer.add_feed_forward_length(config.d_ff)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    tokens = TOKENS[: config.vocab_size]
    tokens = tokens + [f"unused{i}" for i in range(config.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (config.vocab_size - 3))
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(0)
    writer.add_eot_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, value in extra.items():
        name = name.replace("__", ".")
        adders = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
        adders[type(value)](name, value)
    for name, array in tensors.items():
        if quantize and array.ndim == 2:
            packed = gguf.quants.quantize(array, quantize)
            writer.add_tensor(name, packed, raw_dtype=quantize)
        else:
            writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("n_heads", [1, 2, 9])
def test_unpermute_undoes_llama_cpp(n_heads):
    array = np.random.default_rng(0).standard_normal((n_heads * 8, 5))
    np.testing.assert_array_equal(unpermute(permute(array, n_heads), n_heads), array)
    assert n_heads * 8 == 8 or not np.array_equal(permute(array, n_heads), array)


@pytest.mark.parametrize("tied", [True, False])
def test_reading_gives_what_was_written(tmp_path, config, random_params, assert_same, tied):
    config = dataclasses.replace(config, tied_embeddings=tied)
    params = random_params(config)
    write_gguf(tmp_path / "m.gguf", config, tensors_of(config, params))
    target = load_target_files(tmp_path / "m.gguf")
    assert target.config == config
    assert_same(target.params, params)
    assert load_gguf(tmp_path / "m.gguf", "float32").sha256 == target.sha256


def test_quantised_blocks_are_widened_to_the_run_dtype(tmp_path, config, random_params):
    tensors = tensors_of(config, random_params(config))
    write_gguf(tmp_path / "m.gguf", config, tensors, quantize=gguf.GGMLQuantizationType.Q4_1)
    wide, narrow = (
        np.asarray(
            load_gguf(tmp_path / "m.gguf", dtype).params["layers"][1]["mlp"]["down"]["weight"]
        )
        for dtype in ("float32", "bfloat16")
    )
    exact = tensors["blk.1.ffn_down.weight"]
    step = (exact.max() - exact.min()) / 15
    assert 0 < np.abs(wide - exact).max() <= step
    assert narrow.dtype.name == "bfloat16"
    np.testing.assert_array_equal(wide.astype(narrow.dtype), narrow)


def test_stop_ids_are_the_union_of_fields_and_template(tmp_path, config, random_params):
    write_gguf(tmp_path / "m.gguf", config, tensors_of(config, random_params(config)))
    target = load_gguf(tmp_path / "m.gguf", "float32")
    assert target.stop_ids == (0, 1, 2)  # eos field, <|im_end|> of the template, eot field
    assert target.tokenizer.encode_chat("abcd") == [TOKENS.index("abc"), TOKENS.index("d"), 1]


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.01, 0.05, 0.2, 0.5, 0.99, 0.9999])
def test_a_truncated_file_is_refused(tmp_path, config, random_params, refused, fraction):
    path = tmp_path / "m.gguf"
    write_gguf(path, config, tensors_of(config, random_params(config)))
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * fraction)])
    with refused("m.gguf"):
        load_gguf(path, "float32")


@pytest.mark.timeout(20)
def test_a_damaged_array_length_does_not_hang(tmp_path, config, random_params, refused):
    path = tmp_path / "m.gguf"
    write_gguf(path, config, tensors_of(config, random_params(config)))
    data = bytearray(path.read_bytes())
    at = data.index(b"tokenizer.ggml.token_type") + len(b"tokenizer.ggml.token_type") + 4 + 4
    data[at : at + 8] = (1 << 60).to_bytes(8, "little")
    path.write_bytes(data)
    with refused("not a whole GGUF file"):
        load_gguf(path, "float32")


@pytest.mark.parametrize(
    "extra",
    [
        {"llama__expert_count": 8},
        {"llama__rope__scaling__type": "yarn"},
        {"llama__rope__dimension_count": 4},
        {"llama__attention__value_length": 16},
        {"llama__attention__sliding_window": 16},
    ],
)
def test_an_unsupported_feature_is_named(tmp_path, config, random_params, refused, extra):
    write_gguf(tmp_path / "m.gguf", config, tensors_of(config, random_params(config)), **extra)
    with refused(next(iter(extra)).replace("__", ".")):
        load_gguf(tmp_path / "m.gguf", "float32")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_number_that_is_none_is_named(tmp_path, config, random_params, refused, value):
    extra = {"llama__rope__freq_base": value}
    write_gguf(tmp_path / "m.gguf", config, tensors_of(config, random_params(config)), **extra)
    with refused("m.gguf", "llama.rope.freq_base"):
        load_gguf(tmp_path / "m.gguf", "float32")


def test_an_end_id_beyond_the_vocabulary_is_named(tmp_path, config, random_params, refused):
    extra = {"tokenizer__ggml__eom_token_id": 10**6}
    write_gguf(tmp_path / "m.gguf", config, tensors_of(config, random_params(config)), **extra)
    with refused("m.gguf", "1000000"):
        load_gguf(tmp_path / "m.gguf", "float32")


def test_another_architecture_is_named(tmp_path, config, random_params, refused):
    tensors = tensors_of(config, random_params(config))
    write_gguf(tmp_path / "m.gguf", config, tensors, architecture="falcon")
    with refused("'llama'", "'falcon'"):
        load_gguf(tmp_path / "m.gguf", "float32")


def test_missing_misshapen_and_unknown_tensors_are_named(tmp_path, config, random_params, refused):
    whole, path = tensors_of(config, random_params(config)), tmp_path / "m.gguf"
    name = "blk.1.ffn_up.weight"
    cases = (
        ({k: v for k, v in whole.items() if k != name}, name),
        (whole | {name: whole[name][:32]}, name),
        (whole | {"blk.0.attn_q.bias": np.zeros(32, np.float32)}, "blk.0.attn_q.bias"),
    )
    for tensors, word in cases:
        path.unlink(missing_ok=True)
        write_gguf(path, config, tensors)
        with refused(word):
            load_gguf(path, "float32")


def test_llama3_scaling_is_recognised_and_another_refused(tmp_path, config, random_params, refused):
    from spd_jax.config import Llama3Scaling

    config = dataclasses.replace(config, rope_theta=500000.0)
    scaling = Llama3Scaling(8.0, 1.0, 4.0, 8192)
    tensors = tensors_of(config, random_params(config))
    divisors = llama3_divisors(config, scaling).astype(np.float32)
    assert divisors.min() == 1 and divisors.max() == 8
    write_gguf(tmp_path / "a.gguf", config, tensors | {keymaps.ROPE_FREQS: divisors})
    assert load_gguf(tmp_path / "a.gguf", "float32").config.rope_scaling == scaling
    divisors[1] += 0.5
    write_gguf(tmp_path / "b.gguf", config, tensors | {keymaps.ROPE_FREQS: divisors})
    with refused(keymaps.ROPE_FREQS):
        load_gguf(tmp_path / "b.gguf", "float32")


def test_an_unknown_tokenizer_is_said_and_left_out(tmp_path, config, random_params, capsys):
    path = tmp_path / "m.gguf"
    write_gguf(path, config, tensors_of(config, random_params(config)))
    data = path.read_bytes()
    path.write_bytes(data.replace(b"smollm", b"smollx"))
    target = load_gguf(path, "float32")
    assert target.tokenizer is None and target.stop_ids == (0, 2)
    assert "smollx" in capsys.readouterr().err


@pytest.mark.network
def test_smollm2_has_its_known_geometry_and_chat_ids():
    target = load_target_files("smollm2-135m")
    c = target.config
    assert (c.n_layers, c.d_model, c.n_heads, c.n_kv_heads, c.head_dim) == (30, 576, 9, 3, 64)
    assert (c.d_ff, c.rope_theta, c.norm_eps, c.max_context) == (1536, 100000.0, 1e-5, 8192)
    assert c.tied_embeddings and target.stop_ids == (2,)
    assert target.params["layers"][29]["attn"]["qkv"]["weight"].shape == (960, 576)
    tokenizer = target.tokenizer
    ids = tokenizer.encode_chat("hi")
    assert ids == [
        1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411,
        407, 19712, 8182, 2, 198, 1, 4093, 198, 6004, 2, 198, 1, 520, 9531, 198,
    ]  # fmt: skip
    assert tokenizer.decode(ids).endswith("user\nhi\nassistant\n")
    assert tokenizer.encode("a 12") == [81, 216, 33, 34]  # digits one by one
