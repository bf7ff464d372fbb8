"""Random weights of Qwen3.5-4B's shapes, from files to decoded tokens; run by hand.

    python -m tests.full_size          # 8.4 GB on disk for a while; needs some 14 GB of memory
    python -m tests.full_size --small  # a fifth of each size, to see that the script works

write shards -> load_target -> init_draft -> generate -> decode through 8 virtual stages -> compare
Each phase prints its seconds and its peak of anonymous memory (what no file backs).
"""

import argparse
import contextlib
import dataclasses
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

import spd_jax
from spd_jax.config import DraftConfig, PipelineConfig, TargetConfig
from spd_jax.models import target as model
from spd_jax.models.bundle import Target
from spd_jax.program import Program
from spd_jax.weights import keymaps
from spd_jax.weights.hf_config import config_to_hf
from spd_jax.weights.leaves import Leaf, sources
from spd_jax.weights.published import published_config

LAYERS_PER_FILE = 4
N_STAGES, N_NEW, N_DRAFT_IDS = 8, 4, 8192
FULL, _ = published_config("Qwen/Qwen3.5-4B")
SMALL = dataclasses.replace(FULL, vocab_size=49664, d_model=512, d_ff=1536, n_heads=4, n_kv_heads=1)
# Of logits up to 5: bfloat16 rounds to 2^-8 of a number, and does so some 64 times in 32 layers.
NOISE = 0.2


def write_shards(directory: Path, config: TargetConfig) -> None:
    """Writes an HF directory, one file of a few layers at a time."""
    rng, sizes, weight_map = np.random.default_rng(0), keymaps.target_sizes(config), {}

    def write(file: str, leaves: list[tuple[Leaf, str]]) -> None:
        tensors = {
            name: random_tensor(rng, name, shape)
            for leaf, prefix in leaves
            for name, shape in sources(leaf, "hf", prefix, sizes)
        }
        save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))

    write("model-ends.safetensors", [(keymaps.EMBED, ""), (keymaps.FINAL_NORM, "")])
    for first in range(0, config.n_layers, LAYERS_PER_FILE):
        numbered = list(enumerate(config.layer_kinds))[first : first + LAYERS_PER_FILE]
        leaves = [
            (leaf, keymaps.HF_LAYER_PREFIX.format(i=i))
            for i, kind in numbered
            for leaf in keymaps.layer_leaves(config, kind)
        ]
        write(f"model-{first}.safetensors", leaves)
    index = {"weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(config_to_hf(config)))


def random_tensor(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns bfloat16 normals of 0.02 (0.5 in convolutions), and vectors as models start."""
    array = np.empty(shape, ml_dtypes.bfloat16)
    if name.endswith("A_log"):
        array[:] = np.log(rng.uniform(1, 16, shape))
    elif len(shape) == 1:  # norms multiply by 1 + w, but for that of a delta-net
        array[:] = 1 if name.endswith(("dt_bias", "linear_attn.norm.weight")) else 0
    else:
        scale = np.float32(0.5 if "conv" in name else 0.02)
        for start in range(0, shape[0], 4096):
            rows = array[start : start + 4096]
            rows[:] = scale * rng.standard_normal(rows.shape, np.float32)
    return array


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon")


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Prints the seconds and the peak memory of what runs inside."""
    ended, peak, began = threading.Event(), [0], time.perf_counter()

    def watch() -> None:
        while not ended.wait(0.01):
            peak[0] = max(peak[0], anonymous_bytes())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
    seconds = time.perf_counter() - began
    print(f"{name:<12} {seconds:7.1f} s   peak {peak[0] / 1e9:5.2f} GB", flush=True)


def check_same(target: Target, prompt: list[int], got: list[int], want: list[int]) -> bool:
    """True for equal texts, or where they part between ids that tie within NOISE; says which."""
    pairs = enumerate(zip(got, want, strict=True))
    parting = next((i for i, (a, b) in pairs if a != b), None)
    if parting is None:
        print(f"decode = generate: {got}")
        return True

    def score(params: dict, ids: jax.Array) -> jax.Array:
        hidden = model.hidden_states(target.config, params, ids)
        return model.logits(target.config, params, hidden[-1][0, -1])

    ids = jax.numpy.asarray([prompt + want[:parting]])
    logits = np.asarray(Program(score)(target.params, ids))
    below = (logits.max() - logits[[got[parting], want[parting]]]).tolist()
    print(f"decode {got} and generate {want} part at token {parting}, where their logits are "
          f"{below} below the best; bfloat16 noise is {NOISE}")  # fmt: skip
    return max(below) < NOISE


def main() -> int:
    """Runs all phases; returns 1 where decode and generate differ by more than rounding."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a fifth of each size")
    config = SMALL if parser.parse_args().small else FULL
    directory = Path(tempfile.mkdtemp(prefix="spd_full_size."))
    try:
        with phase("write"):
            write_shards(directory, config)
        with phase("load"):
            target = spd_jax.load_target(directory, "bfloat16")
    finally:
        shutil.rmtree(directory)
    print(f"{sum(x.nbytes for x in jax.tree.leaves(target.params)) / 1e9:.2f} GB of weights")
    anchors = PipelineConfig(config.n_layers, N_STAGES).default_anchors()
    ids = np.linspace(0, config.vocab_size - 1, N_DRAFT_IDS).astype(int)
    draft_config = DraftConfig(anchors, N_STAGES, n_layers=1, draft_ids=tuple(ids.tolist()))
    with phase("init_draft"):
        draft = spd_jax.init_draft(target, draft_config, jax.random.key(0))
    prompt = np.random.default_rng(1).integers(0, config.vocab_size, 16).tolist()
    settings = {"max_new_tokens": N_NEW, "stop_ids": ()}
    with phase("generate"):
        want = spd_jax.generate(target, prompt, **settings)
    with phase("decode"):
        got = spd_jax.decode(target, draft, prompt, mesh="virtual", **settings)
    for name, stats in (("generate", want.stats), ("decode", got.stats)):
        print(f"{name}: prefill {stats.prefill_seconds:.1f} s, decode {stats.decode_seconds:.1f} s")
    print(f"{got.cycles} cycles, {got.stats.rejects} rejects")
    return 0 if check_same(target, prompt, got.tokens, want.tokens) else 1


if __name__ == "__main__":
    sys.exit(main())
