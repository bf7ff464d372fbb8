"""A few of the models of `tests.hf_parity`: those that HF makes, of every architecture."""

import pytest

pytest.importorskip("torch", reason="a peer for tests only: pip install torch==2.13.0")

import spd_jax
from tests import hf_parity
from tests.expected import Comparison
from tests.hf_models import ARCHITECTURES, write_model

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # the peer's own


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_those_of_hf(architecture, tmp_path):
    model = write_model(tmp_path, architecture, seed=1000)
    target = spd_jax.load_target(tmp_path)
    for ids in hf_parity.texts(0):
        assert hf_parity.logits_error(target, model, ids) < hf_parity.TOLERANCE


@pytest.mark.parametrize(
    ("architecture", "seed"), [("qwen3_moe", 7), ("qwen3_next", 3), ("qwen3_5_moe", 4)]
)
def test_a_pipeline_writes_what_hf_writes(architecture, seed):
    comparison = Comparison()
    hf_parity.compare(architecture, seed, comparison)
    assert comparison.n_sequences == len(hf_parity.LENGTHS)
