"""A target of four small layers, a draft for it, and rows that a small draft can learn."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from spd_jax.config import (
    DeltaNetConfig,
    DraftConfig,
    ExpertsConfig,
    LayerKind,
    PipelineConfig,
    TargetConfig,
)
from spd_jax.models import target as model
from spd_jax.weights.hf import write_target
from train.data import Corpus, read_corpus

SMALL = TargetConfig(
    vocab_size=64,
    d_model=32,
    n_layers=4,
    n_heads=2,
    n_kv_heads=1,
    head_dim=16,
    d_ff=48,
    norm_eps=1e-5,
    rope_theta=10000.0,
    max_context=128,
)


@dataclasses.dataclass(frozen=True)
class Setting:
    """What most tests of the trainer start from."""

    target: TargetConfig
    target_params: dict
    draft: DraftConfig


@pytest.fixture(scope="session")
def small() -> Setting:
    """A random target and a one-layer draft of three stages with 40 draft ids."""
    params = model.init_params(SMALL, jax.random.key(0))
    params = jax.tree.map(lambda leaf: leaf * 4 if leaf.ndim == 2 else leaf, params)
    anchors = PipelineConfig(SMALL.n_layers, 3).default_anchors()
    draft = DraftConfig(anchors=anchors, n_stages=3, n_layers=1, draft_ids=tuple(range(40)))
    return Setting(SMALL, params, draft)


def row_fields(n_tokens: int, n_prompt: int, seed: int, vocab_size: int = 64) -> dict:
    """A row as train.prepare writes it."""
    rng = np.random.default_rng(seed)
    return {
        "messages": [],
        "input_ids": rng.integers(0, vocab_size, n_tokens).tolist(),
        "loss_mask": [0] * n_prompt + [1] * (n_tokens - n_prompt),
        "temperature": 0.7 if seed % 2 else 0.0,
    }


@pytest.fixture(scope="session")
def rows_file(tmp_path_factory) -> Path:
    """Thirteen rows of 9 to 21 tokens."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    rows = [row_fields(9 + seed, 4, seed) for seed in range(13)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def corpus(rows_file) -> Corpus:
    """The rows of `rows_file`."""
    return read_corpus(rows_file, SMALL.vocab_size, 24)


HYBRID = dataclasses.replace(
    SMALL,
    n_layers=8,
    d_ff=48,
    max_context=4096,
    tied_embeddings=True,
    qk_norm=True,
    model_type="qwen3_5_text",
    kinds=(LayerKind("delta"),) * 3 + (LayerKind(),) + (LayerKind("delta"),) * 3 + (LayerKind(),),
    rotary_dim=4,
    norm_offset=True,
    attn_gate=True,
    delta=DeltaNetConfig(n_key_heads=1, n_value_heads=2, key_dim=8, value_dim=8, conv_width=4),
)
MIXTURE = dataclasses.replace(
    HYBRID,
    d_ff=None,
    model_type="qwen3_5_moe_text",
    kinds=tuple(LayerKind(kind.mixer, "experts") for kind in HYBRID.kinds),
    experts=ExpertsConfig(n_experts=4, n_active=2, d_ff=16, normalise=True, shared_d_ff=16),
)


def _write_directory(directory: Path, config: TargetConfig) -> Path:
    params = model.init_params(config, jax.random.key(1))
    params = jax.tree.map(lambda leaf: np.asarray(leaf * 4 if leaf.ndim == 2 else leaf), params)
    write_target(directory, config, params)
    return directory


@pytest.fixture(scope="session")
def hybrid_directory(tmp_path_factory) -> Path:
    """The HF directory of a target of delta-nets and full attention."""
    return _write_directory(tmp_path_factory.mktemp("hybrid"), HYBRID)


@pytest.fixture(scope="session")
def mixture_directory(tmp_path_factory) -> Path:
    """The HF directory of the same target with mixtures of experts: it has no dense MLP."""
    return _write_directory(tmp_path_factory.mktemp("mixture"), MIXTURE)
