"""The tiny target is the same everywhere and talks in bytes."""

import numpy as np

from spd_jax.weights import load_target_files


def test_tiny_is_deterministic_and_its_hash_is_of_its_content():
    a, b = load_target_files("tiny"), load_target_files("tiny", "bfloat16")
    assert a.sha256 == b.sha256
    # Pinned: heads record it. Another value means that every recorded one is void.
    assert a.sha256.startswith("48776a48")
    wide = a.params["layers"][9]["attn"]["qkv"]["weight"]
    narrow = b.params["layers"][9]["attn"]["qkv"]["weight"]
    np.testing.assert_array_equal(wide.astype(narrow.dtype), narrow)
    assert wide.dtype == np.float32 and narrow.dtype.name == "bfloat16"


def test_tiny_takes_text_and_never_stops():
    target = load_target_files("tiny")
    ids = target.tokenizer.encode_chat("hi")
    assert 0 < len(ids) and max(ids) < target.config.vocab_size == 256
    assert target.tokenizer.vocab_size == 256 and target.stop_ids == ()


def test_tiny_has_a_planted_bigram():
    params = load_target_files("tiny").params
    follows = (params["embed"]["weight"] @ params["lm_head"]["weight"].T).argmax(axis=1)
    # Nearly one successor each, none its own: greedy text wanders. (Random heads: 60% of ids.)
    assert len(set(follows.tolist())) > 240 and not np.any(follows == np.arange(256))
