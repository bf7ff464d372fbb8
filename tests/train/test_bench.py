"""The benchmark measures the trainer's own step, and writes what it printed."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from spd_jax.checks import ConfigError
from train import bench


def test_records_are_complete_and_written(tmp_path, capsys):
    out = tmp_path / "bench.json"
    flags = ["--target", "tiny", "--n-stages", "3", "--n-types", "3", "--sizes", "2x16"]
    flags += ["--attention-lens", "32", "--draft-vocab-sizes", "50", "0", "--reps", "1"]
    assert bench.main([*flags, "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert [row["draft_ids"] for row in found["steps"]] == [50, 256]
    assert [row["attention"] for row in found["attention"]] == ["by depth", "dense"]
    for row in (*found["steps"], *found["attention"]):
        assert row["seconds"] > 0 and row["temp_mib"] > 0 and row["peak_mib"] > 0
    rate = found["steps"][0]["tokens_per_second"]
    assert rate == pytest.approx(32 / found["steps"][0]["seconds"])
    assert "whole steps" in capsys.readouterr().out


def test_both_attentions_have_the_same_gradient(small):
    steps, (q, k, v) = bench.attention_steps(small.target, small.draft, 24)
    got, want = (jax.jit(steps[name])(None, q, k, v) for name in ("by depth", "dense"))
    jax.tree.map(lambda a, b: jnp.allclose(a, b, atol=1e-4) or pytest.fail("differ"), got, want)


def test_a_step_updates_float32_weights_from_bfloat16_ones(small):
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), small.target_params)
    config = bench.BenchConfig(target="tiny", dtype="bfloat16")
    draft = dataclasses.replace(small.draft, draft_ids=None)
    step, state = bench.whole_step(config, small.target, draft, params)
    ids = jax.random.randint(jax.random.key(0), (2, 24), 0, 64)
    after = jax.jit(step)(state, params, ids)
    assert {x.dtype for x in jax.tree.leaves(after.params)} == {jnp.dtype(jnp.float32)}
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), after.params, state.params)
    assert all(jax.tree.leaves(moved["projs"])) and int(after.step) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sizes": ("4*128",)}, "sizes must look like 4x128"),
        ({"n_types": 9}, "n_types must be from 1 to 6"),
        ({"reps": 0}, "reps must be at least 1"),
        ({"attention_lens": (1,)}, "attention_lens must be 2 tokens or more"),
    ],
)
def test_settings_that_cannot_be_are_one_line(fields, message):
    with pytest.raises(ConfigError, match=message):
        bench.BenchConfig(**fields)
