"""A process that only decodes holds the weights once."""

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = """
import gc
import jax
import spd_jax
from infer.bench_report import memory, weight_bytes

target = spd_jax.load_target("tiny")
anchors = spd_jax.PipelineConfig(target.config.n_layers, 3).default_anchors()
config = spd_jax.DraftConfig(anchors, 3, n_layers=1)
draft = spd_jax.init_draft(target, config, jax.random.key(0))
for n_tokens in (3, 9):
    spd_jax.decode(target, draft, list(range(1, n_tokens)), max_new_tokens=4, mesh="virtual")
spd_jax.generate(target, [1, 2, 3], max_new_tokens=4)
gc.collect()
found = memory(weight_bytes(target, draft), ["virtual"])
print(found["weights_mib"], found["arrays_mib"])
"""


def test_weights_are_held_once():
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    weights, arrays = map(float, done.stdout.split())
    assert weights > 1
    assert weights <= arrays < 1.05 * weights  # and a few ids
