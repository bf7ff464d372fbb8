"""Random tiny models of every architecture against HF transformers, run by hand (needs torch).

    python -m tests.hf_parity                    # 48 models, six of each architecture
    python -m tests.hf_parity --models 8 --seed 100

Of each: the logits of four texts, and 64 greedy tokens through a pipeline of N = 2..8 stages.
tests/models/test_hf_parity.py runs a few of them.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault(
    "XLA_FLAGS", "--xla_force_host_platform_device_count=9 --xla_backend_optimization_level=0"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

import spd_jax
from spd_jax.config import DraftConfig, PipelineConfig
from tests.expected import Comparison, expected_cycles
from tests.hf_models import ARCHITECTURES, VOCAB, hf_greedy, hf_logits, write_model

LENGTHS = (1, 7, 64, 200)
N_NEW = 64
TOLERANCE = 2e-4


def texts(seed: int) -> list[list[int]]:
    """One random text of each length."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, length).tolist() for length in LENGTHS]


def logits_error(target: spd_jax.Target, model, ids: list[int]) -> float:
    """The largest difference of the logits of one text."""
    return float(
        np.abs(np.asarray(spd_jax.target_logits(target, ids)) - hf_logits(model, ids)).max()
    )


def decode_random(target: spd_jax.Target, prompts: list[list[int]], n_stages: int, mesh, seed: int):
    """Decodes with an untrained draft module, which is mostly wrong: every reject rolls back."""
    anchors = PipelineConfig(target.config.n_layers, n_stages).default_anchors()
    config = DraftConfig(anchors, n_stages, n_layers=1, d_ff=32, qk_norm=target.config.qk_norm)
    draft = spd_jax.init_draft(target, config, jax.random.key(seed))
    return spd_jax.decode(target, draft, prompts, max_new_tokens=N_NEW, stop_ids=(), mesh=mesh)


def compare(architecture: str, seed: int, comparison: Comparison) -> str:
    """Makes one model and compares all; returns a line of figures."""
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(Path(directory), architecture, seed)
        target = spd_jax.load_target(directory)
    errors = [logits_error(target, model, ids) for ids in texts(seed)]
    n_layers = target.config.n_layers
    rng = np.random.default_rng(seed)
    n_stages, mesh = int(rng.integers(2, min(8, n_layers) + 1)), ("virtual", None)[rng.integers(2)]
    prompts = texts(seed)
    results = decode_random(target, prompts, n_stages, mesh, seed)
    for prompt, result in zip(prompts, results, strict=True):
        comparison.check(target, prompt, result.tokens, hf_greedy(model, prompt, N_NEW))
        assert result.cycles == expected_cycles(n_stages, result.accepted)
    assert max(errors) < TOLERANCE, errors
    rejects = sum(result.stats.rejects for result in results)
    mixers = "".join(kind.mixer[0] for kind in target.config.layer_kinds)
    mode = results[0].stats.mode
    return f"{max(errors):.1e}  {mixers:<9} N = {n_stages} {mode:<8} {rejects:>3} rejects"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    comparison, began = Comparison(), time.monotonic()
    for i in range(args.models):
        architecture = ARCHITECTURES[i % len(ARCHITECTURES)]
        seed = args.seed + i
        print(f"{seed:>4} {architecture:<17} {compare(architecture, seed, comparison)}", flush=True)
        jax.clear_caches()  # compiled programs take memory maps: see spd_jax.program
    near = ", ".join(f"{gap:.1e}" for gap in comparison.gaps) or "none"
    seconds = time.monotonic() - began
    print(f"{comparison.n_sequences} texts of {args.models} models in {seconds:.0f} s")
    print(f"parted at near ties with gaps of {near}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
