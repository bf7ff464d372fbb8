"""Loading takes about the memory of what is placed, and reads only what is placed."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import spd_jax
from spd_jax.checks import ConfigError
from spd_jax.config import TargetConfig
from spd_jax.weights import keymaps
from spd_jax.weights.hf import write_target
from tests import random_models

CONFIG = dataclasses.replace(random_models.CONFIG, max_context=128, tied_embeddings=True)
# A tenth of its bytes are the embedding, the largest tensor.
LARGE = dataclasses.replace(
    CONFIG, vocab_size=16384, d_model=512, n_layers=20, d_ff=2048, head_dim=128
)

LOAD = """
import sys
import jax, spd_jax
status = lambda: dict(line.split(":", 1) for line in open("/proc/self/status"))
print(status()["RssAnon"].split()[0], flush=True)
target = spd_jax.load_target(sys.argv[1], n_stages=8, placement=sys.argv[2])
print(sum(x.nbytes for x in jax.tree.leaves(target.params)), flush=True)
"""
LOAD_IN_TWO = """
import json, sys
import jax
jax.distributed.initialize(sys.argv[2], num_processes=2, process_id=int(sys.argv[3]))
import spd_jax
from spd_jax.weights.tensors import TensorFile
read, rows_read = [], {}
whole, part = TensorFile.read, TensorFile.read_rows
TensorFile.read = lambda self, name: read.append(name) or whole(self, name)
def read_rows(self, name, rows):
    rows_read.setdefault(name, []).extend(rows.tolist())
    return part(self, name, rows)
TensorFile.read_rows = read_rows
target = spd_jax.load_target(sys.argv[1], n_stages=3, placement="dedicated")
assert len(jax.devices()) == 4 and len(jax.local_devices()) == 2
print(json.dumps([read, rows_read]))
"""


def write(directory: Path, config: TargetConfig) -> Path:
    """Writes a target whose content does not matter."""
    params = keymaps.read_target(config, "hf", "{i}", lambda _, shape: np.ones(shape, np.float32))
    write_target(directory, config, jax.tree.map(np.asarray, params))
    return directory


def start(script: str, *args: str, n_devices: int) -> subprocess.Popen:
    flags = f"--xla_force_host_platform_device_count={n_devices}"
    return subprocess.Popen(
        [sys.executable, "-c", script, *args],
        env={**os.environ, "XLA_FLAGS": flags},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["virtual", "dedicated"])
def test_loading_takes_little_more_memory_than_what_is_placed(tmp_path, placement):
    directory = write(tmp_path, LARGE)
    with start(LOAD, str(directory), placement, n_devices=9) as loading:
        before = int(loading.stdout.readline()) * 1024
        status, peak = Path(f"/proc/{loading.pid}/status"), 0
        while loading.poll() is None:
            lines = [line.split() for line in status.read_text().splitlines()]
            peak = max([peak, *(int(line[1]) * 1024 for line in lines if line[0] == "RssAnon:")])
            time.sleep(0.001)
        placed = int(loading.stdout.readline())
    assert placed > 200e6
    # The largest tensor twice (as stored, and on its way), and what the allocator does not return.
    assert placed < peak - before < 1.3 * placed


@pytest.mark.timeout(120)
def test_a_process_reads_only_what_its_ranks_need(tmp_path):
    directory = write(tmp_path, CONFIG)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    both = [start(LOAD_IN_TWO, str(directory), address, str(i), n_devices=2) for i in (0, 1)]
    try:
        found = [json.loads(process.communicate(timeout=60)[0]) for process in both]
    finally:
        for process in both:
            process.kill()
    read, rows_read = zip(*found, strict=True)
    layers = [{name.split(".")[2] for name in names if ".layers." in name} for names in read]
    assert layers == [{"0", "1", "2"}, {"3"}]  # stages of 2, 1 and 1 layers and the draft module
    for i, (names, rows) in enumerate(zip(read, rows_read, strict=True)):
        assert len(names) == len(set(names))
        # Id x is on rank x mod 4, and ranks 2i and 2i + 1 are of process i.
        there = [x for x in range(CONFIG.vocab_size) if x % 4 // 2 == i]
        assert set(rows) == {"model.embed_tokens.weight"}
        assert sorted(rows["model.embed_tokens.weight"]) == there


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n_stages": "x"}, "n_stages must be an integer"),
        ({"n_stages": 2.5}, "n_stages must be an integer"),
        ({"n_stages": 0}, "n_stages must be from 2"),
        ({"n_stages": 99}, "n_stages must be from 2"),
        ({"stage_layers": 5}, "stage_layers must be a sequence"),
        ({"stage_layers": (5, 4)}, "sum to 10"),
    ],
)
def test_stages_that_cannot_be_are_one_line(options, words):
    with pytest.raises(ConfigError, match=words):
        spd_jax.load_target("tiny", **options)


def test_a_head_for_other_attention_is_one_line(golden):
    gated = spd_jax.load_target(golden / "qwen3_5" / "target")
    plain = spd_jax.load_target(golden / "qwen3" / "target")
    for ours, other, family in ((gated, plain, "qwen3_5"), (plain, gated, "qwen3")):
        draft = spd_jax.load_draft(golden / family / "n2", ours)
        with pytest.raises(ConfigError, match="other shapes than .* needs"):
            spd_jax.decode(other, draft, [1, 2], max_new_tokens=2)
        with pytest.raises(ConfigError, match="made for a target with attn_gate"):
            spd_jax.load_draft(golden / family / "n2", other)
