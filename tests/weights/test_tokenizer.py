"""Tokenizers: streams equal whole decoding, chat needs a template, caches heal."""

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from spd_jax.checks import ConfigError
from spd_jax.weights.gguf_tokenizer import tokenizer_from_gguf
from spd_jax.weights.tiny import byte_tokenizer
from spd_jax.weights.tokenizer import tokenizer_from_directory, wrap_backend

FIELDS = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["<|im_end|>", *"abcĠ0123456789", "ab", "Ġa", "abc"],
    "tokenizer.ggml.token_type": [3] + [1] * 17,
    "tokenizer.ggml.merges": ["a b", "Ġ a", "ab c"],
    "tokenizer.ggml.eos_token_id": 0,
}
TEXTS = [
    "plain",
    "héllo wörld",
    "日本語 🎉👩‍👩‍👧 done",
    "\x00\n\t tab",
    "",
    "🎉" * 40,
    " lead  two",
]


@pytest.fixture(scope="module")
def bytes_tokenizer():
    return byte_tokenizer()


def test_half_a_character_is_refused(bytes_tokenizer):
    with pytest.raises(ConfigError, match="not valid Unicode at character 2"):
        bytes_tokenizer.encode("ab\udce9")


@pytest.mark.parametrize("text", TEXTS)
def test_byte_ids_are_the_utf8_bytes_and_decode_back(bytes_tokenizer, text):
    ids = bytes_tokenizer.encode(text)
    assert ids == list(text.encode())
    assert bytes_tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_emits_whole_characters_that_join_to_the_text(bytes_tokenizer, text):
    stream = bytes_tokenizer.stream()
    pieces = [stream.push(i) for i in text.encode()]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) == text and stream.flush() == ""


@pytest.mark.parametrize("seed", range(5))
def test_a_stream_of_any_bytes_joins_to_the_whole_decoding(bytes_tokenizer, seed):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 256 if seed else 128, 300).tolist()
    stream, text, at = bytes_tokenizer.stream(), "", 0
    while at < len(ids):
        n = int(rng.integers(1, 5))
        text += stream.push(ids[at : at + n])
        at += n
    assert text + stream.flush() == bytes_tokenizer.decode(ids)
    assert stream.push(65) == "A"  # afresh after a flush


def test_a_stream_keeps_spaces_of_decoders_that_treat_the_first_id_specially():
    vocab = {"<unk>": 0, "▁a": 1, "▁b": 2, "c": 3, "<0xC3>": 4, "<0xA9>": 5}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer = wrap_backend(backend, None, None)
    # Bytes come in whole characters: this decoder takes back an é that a stray byte follows.
    ids = np.random.default_rng(0).choice([1, 2, 3, 4], 400)
    ids = [j for i in ids for j in ([4, 5] if i == 4 else [int(i)])]
    stream = tokenizer.stream()
    assert "".join(stream.push(i) for i in ids) + stream.flush() == tokenizer.decode(ids)


def test_special_ids_are_skipped_in_text():
    tokenizer = tokenizer_from_gguf(FIELDS, None)
    assert tokenizer.encode("ab<|im_end|>c") == [15, 0, 3]
    assert tokenizer.decode([15, 0, 3]) == "abc"
    assert tokenizer.vocab_size == 18 and tokenizer.end_ids == (0,)


def test_chat_without_a_template_is_refused(refused):
    tokenizer = tokenizer_from_gguf(FIELDS, None)
    with refused("chat template"):
        tokenizer.encode_chat("ab")


def test_chat_takes_a_string_as_one_user_turn(bytes_tokenizer, refused):
    turns = [{"role": "user", "content": "hi"}]
    assert bytes_tokenizer.encode_chat("hi") == bytes_tokenizer.encode_chat(turns)
    assert bytes_tokenizer.decode(bytes_tokenizer.encode_chat(turns)) == "user: hi\nassistant: "
    refuser = wrap_backend(
        bytes_tokenizer._fast.backend_tokenizer, "{{ raise_exception('no\nsystem') }}", None
    )
    with refused("no system"):
        refuser.encode_chat("hi")


def test_tokenizers_are_compared_by_identity(bytes_tokenizer):
    other = byte_tokenizer()
    assert other != bytes_tokenizer and len({other, bytes_tokenizer}) == 2


def test_the_cached_tokenizer_is_used_and_a_damaged_one_rebuilt(tmp_path):
    cache = tmp_path / "tokenizer.json"
    expected = tokenizer_from_gguf(FIELDS, None, cache).encode("abc ab 12")
    whole = cache.read_bytes()
    assert expected == [17, 4, 15, 4, 6, 7]
    unread = {k: v for k, v in FIELDS.items() if k != "tokenizer.ggml.merges"}
    assert tokenizer_from_gguf(unread, None, cache).encode("abc ab 12") == expected
    for damaged in (b"", whole[:-7], whole.replace(b'"ab": 15', b'"ab": 14'), b"\xff\xfe"):
        cache.write_bytes(damaged)
        assert tokenizer_from_gguf(FIELDS, None, cache).encode("abc ab 12") == expected
        assert cache.read_bytes() == whole
    assert {p.name for p in tmp_path.iterdir()} == {"tokenizer.json", "tokenizer.json.sha256"}


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer.ggml.merges": ["a b", "zz q"]},
        {"tokenizer.ggml.token_type": [1]},
        {"tokenizer.ggml.tokens": ["a"] * 18},
    ],
)
def test_bad_metadata_is_refused(tmp_path, change, refused):
    with refused("bad tokenizer metadata"):
        tokenizer_from_gguf(FIELDS | change, tmp_path / "m.gguf")


def test_an_hf_directory_gives_its_tokenizer_and_template(tmp_path, refused):
    assert tokenizer_from_directory(tmp_path) is None
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate("abcd")}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_end|>"])
    template = "{{ messages[0]['content'] }}<|im_end|>"
    wrap_backend(backend, template, "<|im_end|>")._fast.save_pretrained(tmp_path)
    tokenizer = tokenizer_from_directory(tmp_path)
    assert tokenizer.encode_chat("abcd") == [0, 1, 2, 3, 4] and tokenizer.end_ids == (4,)
    (tmp_path / "tokenizer.json").write_text("{")
    with refused(str(tmp_path), "tokenizer"):
        tokenizer_from_directory(tmp_path)
