"""Compiled programs are kept, but not without end; and what memory they need as they run."""

import dataclasses
import gc
import os
import subprocess
import sys
import weakref
from collections import OrderedDict
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import spd_jax
from spd_jax import program
from spd_jax.config import DraftConfig, PipelineConfig
from spd_jax.models import target as model
from spd_jax.models.bundle import Target
from spd_jax.program import Program
from tests.random_models import CONFIG


@pytest.fixture(autouse=True)
def two_are_kept(monkeypatch):
    monkeypatch.setattr(program, "MAX_PROGRAMS", 2)
    monkeypatch.setattr(program, "MANY_MAPS", 0)
    monkeypatch.setattr(program, "_KEPT", OrderedDict())


@pytest.fixture
def scale() -> Program:
    return Program(lambda x, *, times: x * times)


def test_a_program_is_compiled_once(scale):
    for value in (1.0, 2.0):
        assert scale(jnp.full(3, value), times=2).tolist() == [2 * value] * 3
    assert scale.n_compiled == 1
    assert scale(jnp.ones(3), times=5).tolist() == [5, 5, 5]
    assert scale(jnp.ones(4), times=2).tolist() == [2, 2, 2, 2]
    assert scale.n_compiled == 3


def test_the_programs_used_last_are_kept_of_all_functions_together(scale):
    negate = Program(lambda x: -x)
    first = weakref.ref(scale.compile(jnp.ones(1), times=2))
    second = weakref.ref(scale.compile(jnp.ones(2), times=2))
    scale(jnp.ones(1), times=2)  # used again: the other is now the older one
    assert negate(jnp.ones(2)).tolist() == [-1, -1]
    gc.collect()
    assert first() is not None and second() is None
    scale(jnp.ones(1), times=2)
    assert (scale.n_compiled, negate.n_compiled) == (2, 1)
    assert scale(jnp.ones(2), times=2).tolist() == [2, 2]  # compiled anew
    assert scale.n_compiled == 3


def test_more_are_kept_while_memory_maps_last(scale, monkeypatch):
    monkeypatch.setattr(program, "MANY_MAPS", 10**9)
    for _ in range(2):
        for n in range(1, 6):
            scale(jnp.ones(n), times=2)
    assert scale.n_compiled == 5


@pytest.mark.slow
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="others compute in bfloat16")
def test_no_program_widens_all_bfloat16_weights_at_once(monkeypatch):
    """Only the head, an eighth of the weights, or a few layers at a time."""
    sizes = {"n_layers": 4, "d_model": 128, "d_ff": 512, "head_dim": 32, "vocab_size": 1031}
    config = dataclasses.replace(CONFIG, **sizes, tied_embeddings=True)
    target = Target(model.init_params(config, jax.random.key(0), jnp.bfloat16), config)
    anchors = PipelineConfig(4, 2).default_anchors()
    draft = spd_jax.init_draft(
        target, DraftConfig(anchors, 2, n_layers=1, feature_norm="none"), jax.random.key(1)
    )
    temporary, compile_it = {}, Program.compile

    def compile_and_note(self, *args, **static):
        compiled = compile_it(self, *args, **static)
        temporary[self] = compiled.memory_analysis().temp_size_in_bytes
        return compiled

    monkeypatch.setattr(Program, "compile", compile_and_note)
    spd_jax.generate(target, [1, 2, 3], max_new_tokens=2)
    spd_jax.decode(target, draft, [1, 2, 3], max_new_tokens=2, mesh="virtual")
    n_bytes = sum(x.nbytes for x in jax.tree.leaves(target.params))
    assert len(temporary) == 4
    assert max(temporary.values()) < n_bytes / 2  # widened, all of them are twice n_bytes


def test_a_command_finds_what_an_earlier_one_compiled(tmp_path):
    """Also says so in one line where the folder cannot be."""
    code = (
        "import jax; from spd_jax.commandline import run\n"
        "jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)\n"
        "run(lambda: int(jax.jit(lambda x: x + 1)(1)) - 2)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}

    def execute(cache):
        return subprocess.run(
            [sys.executable, "-c", code],
            env=environment | {"SPD_CACHE": str(cache), "JAX_PLATFORMS": "cpu"},
            cwd=Path(__file__).parent.parent,
            capture_output=True,
            text=True,
            timeout=120,
        )

    first, kept = execute(tmp_path), []
    assert (first.returncode, first.stderr) == (0, "")
    kept = sorted((tmp_path / "programs").glob("*-cache"))
    assert kept
    assert execute(tmp_path).returncode == 0
    assert sorted((tmp_path / "programs").glob("*-cache")) == kept
    (tmp_path / "file").write_text("")
    blocked = execute(tmp_path / "file")
    assert blocked.returncode == 0
    assert blocked.stderr.startswith("note: compiled programs are not kept")
    assert blocked.stderr.count("\n") == 1
