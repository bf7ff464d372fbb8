"""Targets that we write give the logits and the greedy text of HF transformers.

`test_hf_parity` is the other direction: models that HF writes.
"""

import dataclasses

import jax
import numpy as np
import pytest

import spd_jax
from spd_jax.config import LayerKind, Llama3Scaling
from spd_jax.weights.hf import write_target
from tests import random_models
from tests.expected import Comparison
from tests.random_models import HYBRID

torch = pytest.importorskip("torch", reason="a peer for tests only: pip install torch==2.13.0")

from tests.hf_models import hf_greedy  # noqa: E402  (it imports torch)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # the peer's own are not ours to mend
]

VARIANTS = {
    "tied, grouped heads": {"tied_embeddings": True},
    "untied, one kv head": {"n_kv_heads": 1, "norm_eps": 1e-3},
    "untied, llama3 rope": {"rope_scaling": Llama3Scaling(8.0, 1.0, 4.0, 64), "rope_theta": 5e5},
    "tied, wide heads": {"tied_embeddings": True, "n_kv_heads": 4, "head_dim": 16, "d_ff": 80},
    "qwen3": {"model_type": "qwen3", "qk_norm": True, "head_dim": 16, "rope_theta": 1e6},
}
KINDS = [LayerKind(kind.mixer) for kind in HYBRID.kinds]
HYBRIDS = {
    "qwen3_5": {"model_type": "qwen3_5_text", "kinds": KINDS, "experts": None},
    "qwen3_next": {"model_type": "qwen3_next"},
}


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return Comparison()


@pytest.fixture(params=[*VARIANTS, *HYBRIDS])
def pair(request, tmp_path, config, make_target):
    """A target of ours and HF's model of the same directory."""
    from transformers import AutoModelForCausalLM

    if request.param in HYBRIDS:
        base = dataclasses.replace(HYBRID, **HYBRIDS[request.param])
        target = random_models.make_target(base.n_layers, base=base)
        # Calmer layers: with those of that target the peer's float32 is 1e-3 off its own float64.
        calm = jax.tree.map(lambda x: x / 2 if x.ndim > 1 else x, target.params["layers"])
        target = dataclasses.replace(target, params=target.params | {"layers": calm})
    else:
        seed = list(VARIANTS).index(request.param)
        target = make_target(dataclasses.replace(config, **VARIANTS[request.param]), seed)
    write_target(tmp_path, target.config, target.params)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    return spd_jax.load_target(str(tmp_path)), hf


def test_logits_are_those_of_hf(pair):
    from spd_jax.models import target as model

    target, hf = pair
    ids = np.random.default_rng(0).integers(0, 64, (2, 150))
    with torch.no_grad():
        want = hf(torch.from_numpy(ids)).logits.numpy()
    hidden = model.hidden_states(target.config, target.params, ids)
    got = model.logits(target.config, target.params, hidden[-1])
    assert want.std() > 0.5
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-4)


def test_greedy_text_is_that_of_hf(pair, comparison):
    target, hf = pair
    prompts = [np.random.default_rng(n).integers(0, 64, n).tolist() for n in (1, 7, 140)]
    results = spd_jax.generate(target, prompts, max_new_tokens=32)
    for prompt, result in zip(prompts, results, strict=True):
        comparison.check(target, prompt, result.tokens, hf_greedy(hf, prompt, 32))
