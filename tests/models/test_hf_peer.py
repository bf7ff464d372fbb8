"""Random tiny targets give the logits and the greedy text of HF transformers."""

import dataclasses

import numpy as np
import pytest

import spd_jax
from spd_jax.config import Llama3Scaling
from spd_jax.weights.hf import write_target

torch = pytest.importorskip("torch", reason="a peer for tests only: pip install torch==2.13.0")
pytestmark = pytest.mark.filterwarnings("default")  # the peer's own are not ours to mend

MARGIN = 1e-3  # two runs in float32 may choose differently between logits this close
VARIANTS = {
    "tied, grouped heads": {"tied_embeddings": True},
    "untied, one kv head": {"n_kv_heads": 1, "norm_eps": 1e-3},
    "untied, llama3 rope": {"rope_scaling": Llama3Scaling(8.0, 1.0, 4.0, 64), "rope_theta": 5e5},
    "tied, wide heads": {"tied_embeddings": True, "n_kv_heads": 4, "head_dim": 16, "d_ff": 80},
    "qwen3": {"model_type": "qwen3", "qk_norm": True, "head_dim": 16, "rope_theta": 1e6},
}


@pytest.fixture(params=VARIANTS)
def pair(request, tmp_path, config, make_target):
    """A target of ours and HF's model of the same directory."""
    from transformers import AutoModelForCausalLM

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


def test_greedy_text_is_that_of_hf(pair):
    target, hf = pair
    n_new, n_differing = 32, 0
    prompts = [np.random.default_rng(n).integers(0, 64, n).tolist() for n in (1, 7, 140)]
    results = spd_jax.generate(target, prompts, max_new_tokens=n_new)
    for prompt, result in zip(prompts, results, strict=True):
        with torch.no_grad():
            ids = torch.tensor([prompt])
            out = hf.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=n_new,
                do_sample=False,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            )
        want = out.sequences[0, len(prompt) :].tolist()
        assert len(want) == len(result.tokens) == n_new
        at = next(
            (
                i
                for i, pair in enumerate(zip(result.tokens, want, strict=True))
                if len(set(pair)) > 1
            ),
            None,
        )
        if at is not None:
            first, second = np.sort(out.logits[at][0].numpy())[::-1][:2]
            assert first - second < MARGIN, f"prompt of {len(prompt)}, token {at}"
            n_differing += 1
    assert n_differing <= 1
