"""Geometry without weights: the published values, and which file goes before them."""

import jax
import numpy as np
import pytest

from spd_jax.checks import ConfigError
from spd_jax.config import LayerKind
from spd_jax.models import target as model
from spd_jax.weights import load_target_config
from spd_jax.weights.fetch import fetch_smollm2
from spd_jax.weights.hf import write_target
from spd_jax.weights.published import published_config


@pytest.mark.parametrize("name", ["Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-9B"])
def test_every_fourth_layer_of_a_qwen_has_full_attention(name):
    config, _ = published_config(name)
    pattern = [LayerKind("delta")] * 3 + [LayerKind("attention")]
    assert list(config.layer_kinds) == pattern * 8
    assert (config.attn_gate, config.norm_offset, config.qk_norm, config.n_rotary) == (
        True, True, True, 64,
    )  # fmt: skip


def test_only_what_is_inferred_is_said():
    assert "tie_word_embeddings (true) is inferred" in published_config("Qwen/Qwen3.5-4B")[1]
    assert published_config("Qwen/Qwen3.5-9B")[1] is None


def test_the_config_of_a_directory_goes_before_what_is_published(tmp_path, monkeypatch):
    config, _ = load_target_config("tiny")
    directory = tmp_path / "Qwen" / "Qwen3.5-4B"
    shapes = model.param_shapes(config, "float32")
    write_target(directory, config, jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes))
    monkeypatch.chdir(tmp_path)
    assert load_target_config("Qwen/Qwen3.5-4B") == (config, None)


@pytest.mark.parametrize(
    ("source", "message"),
    [("someone/model", "no config.json of 'someone/model' is at hand"), ("tyni", "is not there")],
)
def test_a_target_without_a_config_is_an_error(source, message):
    with pytest.raises(ConfigError, match=message):
        load_target_config(source)


@pytest.mark.network
def test_the_published_smollm2_is_the_one_that_is_fetched():
    assert load_target_config(fetch_smollm2()) == load_target_config("smollm2-135m")
