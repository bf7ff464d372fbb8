"""A dry run counts what real arrays weigh, compares it with the device memory, touches nothing."""

import dataclasses
import functools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spd_jax
from spd_jax.checks import ConfigError
from spd_jax.commandline import run
from spd_jax.config import SamplingConfig
from spd_jax.engines import build_engine
from spd_jax.models import target as model
from spd_jax.models.bundle import Draft
from spd_jax.models.cache import init_cache
from spd_jax.models.draft import check_pair, check_row_types, init_params
from spd_jax.ops.sampling import plan
from spd_jax.pipeline.programs import cache_capacity, prefill
from spd_jax.pipeline.state import Inputs
from spd_jax.weights import load_target_config, load_target_files
from spd_jax.weights.heads import save_head
from spd_jax.weights.tiny import TINY_CONFIG
from train import dry_run, memory, pdm
from train.config import config_names, named_config
from train.optimizer import make_average, make_optimizer
from train.step import init_state, make_loss
from train.teacher import run_target

PROG = "python -m train.pdm"
ROOT = Path(__file__).parents[2]


def settings(*flags):
    return dry_run.parse_dry_run(PROG, ["--config", "tiny_n4", "--dry-run", *flags])


def device_bytes(tree) -> list[int]:
    """What each device really holds of a tree of arrays."""
    held = Counter()
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device.id] += shard.data.nbytes
    return [held[device.id] for device in jax.devices()]


def mesh_settings(directory, *flags):
    """Settings for eight stages on the nine devices, and the engine of real arrays for them."""
    flags = ("--target", str(directory), "--n-stages", "8", "--draft-vocab-size", "40", *flags)
    config = settings(*flags, "--n-layers", "3", "--decode-batch", "2", "--context-len", "128")
    target = spd_jax.load_target(directory)
    draft_config = config.draft_config(target.config, tuple(range(40)), None)
    init = functools.partial(init_params, target.config, draft_config)
    shapes = jax.eval_shape(init, target.params, jax.random.key(0))
    draft = Draft(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), draft_config)
    return config, build_engine(target, draft, None, None, None, "dedicated")


@pytest.mark.parametrize("head", ["own", "target"])
def test_counted_weights_are_those_of_real_arrays_on_nine_devices(hybrid_directory, head):
    config, engine = mesh_settings(hybrid_directory, "--head", head)
    counted, weights = dry_run.make_plan(config).ranks, engine.weights
    parts = {"layers": weights.ranks, "heads": weights.heads, "projs": weights.projs}
    for name, part in parts.items():
        assert device_bytes(part) == [getattr(counted, name)] * 9, name


@pytest.mark.slow
def test_counted_caches_and_state_are_those_of_a_decode_on_nine_devices(hybrid_directory):
    config, engine = mesh_settings(hybrid_directory)
    counted = dry_run.make_plan(config).ranks
    lens, keys = jnp.full(2, 64, jnp.int32), jax.random.split(jax.random.key(0), 2)
    method, knobs = plan(SamplingConfig(1.0), engine.spec.target.vocab_size)
    inputs = Inputs(lens, keys, jnp.array([-1]), jnp.int32(1), knobs, method)
    state = prefill(engine, np.ones((2, 64), np.int32), inputs, 64)()
    (caches,) = state.caches
    assert device_bytes(caches["attention"]) == [counted.kv_caches] * 9
    assert device_bytes(caches["delta"]) == [counted.state_rings] * 9
    assert device_bytes((engine.weights, state)) == [counted.total] * 9


def test_padding_is_what_a_rank_has_no_layer_for(hybrid_directory):
    flags = ("--target", str(hybrid_directory), "--draft-vocab-size", "40", "--n-stages", "8")
    plan = dry_run.make_plan(settings(*flags))
    spec, ranks, half = plan.spec, plan.ranks, plan.config.context_len // 2
    capacity = cache_capacity(spec, half, half, half)
    for rank, kinds in enumerate(spec.rank_kinds):
        config = spec.target if rank < 8 else spec.draft_layer
        layers = [model.layer_shapes(config, kind) for kind in kinds]
        caches = [
            init_cache(spec.target, kind.mixer, 1, capacity, 8, jnp.float32) for kind in kinds
        ]
        used = sum(4 * leaf.size for leaf in jax.tree.leaves(layers))
        assert ranks.layers - ranks.wasted_layers[rank] == used
        used = sum(leaf.nbytes for leaf in jax.tree.leaves(caches))
        assert ranks.caches - ranks.wasted_caches[rank] == used
    assert len(set(ranks.wasted_layers)) > 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_trainer_is_counted_as_its_arrays_weigh(hybrid_directory, dtype):
    flags = ("--target", str(hybrid_directory), "--draft-vocab-size", "40", "--ema", "0.9")
    config = settings(*flags, "--dtype", dtype, "--accumulate", "3")
    plan = dry_run.make_plan(config)
    target = spd_jax.load_target(hybrid_directory, dtype)
    init = jax.jit(functools.partial(init_params, target.config, plan.spec.draft))
    params = init(target.params, jax.random.key(0))
    optimizer = make_optimizer(config, lambda step: 0.1)
    state = init_state(params, optimizer, jax.random.key(0), make_average(config))
    trees = (target.params, state.params, state.opt_state, state.average)
    want = [sum(x.nbytes for x in jax.tree.leaves(tree)) for tree in trees]
    counted = plan.trainer
    assert [counted.target, counted.draft, counted.optimizer, counted.average] == want
    assert counted.gradients == 2 * want[1]
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}


def test_what_a_backward_pass_keeps_leaves_arguments_out():
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((5, 3), (3, 7)))
    loss = lambda w, x: (jnp.sum(jnp.sin(x @ w)), None)  # noqa: E731
    assert memory._kept_bytes(loss, w, x) == 5 * 7 * 4  # the cosine, and not x


def test_the_backward_estimate_is_near_what_the_compiler_allocates():
    config = settings("--sequence-len", "128", "--batch-tokens", "512")
    plan = dry_run.make_plan(config)
    target, draft = plan.spec.target, plan.spec.draft
    params = model.param_shapes(target, jnp.float32)
    init = functools.partial(init_params, target, draft)
    draft_params = jax.eval_shape(init, params, jax.random.key(0))
    batch = memory._longest_batch(config)
    outputs = functools.partial(run_target, target, draft)
    inputs = (batch[name] for name in ("input_ids", "attention_mask", "labels"))
    states, best = jax.eval_shape(outputs, params, *inputs)
    batch |= {"states": states, "best": best}
    loss = functools.partial(make_loss(target, draft), fill=draft.n_stages)
    compiled = jax.jit(jax.grad(loss, has_aux=True)).lower(draft_params, params, batch).compile()
    allocated = compiled.memory_analysis().temp_size_in_bytes
    assert 0.7 < plan.trainer.backward / allocated < 1.3


def test_the_trainer_cuts_the_target_where_the_run_would():
    """As `find_devices` decides: by the memory where the settings leave it open."""
    fields = named_config("tiny_n4")
    fields = {f.name: getattr(fields, f.name) for f in dataclasses.fields(fields)}
    config = dry_run.DryRunConfig(**fields | {"devices": 4})
    params = model.param_shapes(TINY_CONFIG, jnp.float32)
    whole = sum(4 * x.size for x in jax.tree.leaves(params))
    counted = []
    for cut, size in ((None, None), (None, 1.9 * whole), (None, 2.1 * whole), (True, None)):
        one = dataclasses.replace(config, cut_target=cut, device_memory=size and size / dry_run.GIB)
        counted.append(dry_run.make_plan(one).trainer.target)
    assert counted[0] == counted[2] == whole
    assert counted[1] == counted[3] < whole


def test_a_dry_run_writes_nothing_and_says_no_limit_was_given(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert pdm.main(["--dry-run", "--config", "tiny_n4"]) == 0
    out = capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert "row types   0 1 2 3 4 at depths 0 to 4" in out
    assert "device_memory is not given: nothing is compared with it" in out


def test_what_does_not_fit_is_one_line_and_exit_code_2(capsys):
    flags = ["--dry-run", "--config", "tiny_n4", "--device-memory"]
    with pytest.raises(SystemExit) as stop:
        run(lambda: pdm.main([*flags, "0.001"]))
    assert stop.value.code == 2
    captured = capsys.readouterr()
    (line,) = captured.err.strip().split("\n")
    assert "in all" in captured.out  # the report is there all the same
    assert line.startswith("error: device_memory is 0.001 GiB, but rank 0 and the 4 others need 3.")
    assert "the trainer needs" in line and "weights, moments and gradients; cut the target" in line
    trainer = dry_run.make_plan(settings()).trainer
    assert 0 < trainer.fixed < trainer.total
    between = (trainer.fixed + trainer.total) / 2 / dry_run.GIB
    with pytest.raises(ConfigError, match="lower sequence_len or batch_tokens, or set remat True"):
        pdm.main([*flags, str(between)])
    assert pdm.main([*flags, "0.1"]) == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--context-len", "4097"], "context_len must be at most 4096"),
        (["--draft-vocab-size", "257"], "draft_vocab_size must be at most .* 256, got 257"),
        (["--anchors", "0", "1", "2"], "are the deepest at no depth"),
        (["--target", "Qwen/Qwen3-7B"], "no config.json of 'Qwen/Qwen3-7B' is at hand"),
        (["--start-from", "tests/absent"], "draft 'tests/absent' is not there"),
    ],
)
def test_settings_that_cannot_be_are_errors(flags, message):
    with pytest.raises(ConfigError, match=message):
        dry_run.make_plan(settings(*flags))


@pytest.mark.parametrize("field", ["context_len", "decode_batch", "device_memory"])
def test_sizes_that_cannot_be_are_errors(field):
    with pytest.raises(ConfigError, match=f"{field} must be"):
        dry_run.DryRunConfig(**{field: 0})


@pytest.mark.parametrize("value", [10**12, 10**30])
@pytest.mark.parametrize("field", ["context_len", "decode_batch", "d_ff", "steps", "n_layers"])
def test_absurd_sizes_are_errors(field, value):
    with pytest.raises(ConfigError, match=f"{field} must be .* got {value}"):
        dry_run.DryRunConfig(**{field: value})


@pytest.mark.parametrize("field", ["head_dim", "num_hidden_layers", "linear_value_head_dim"])
def test_a_target_of_absurd_sizes_is_an_error(hybrid_directory, tmp_path, field):
    fields = json.loads((hybrid_directory / "config.json").read_text())
    fields.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(fields | {field: 2**30}))
    if field == "num_hidden_layers":  # a list of its layers would be as long
        target = dataclasses.replace(TINY_CONFIG, n_layers=2**13)
        with pytest.raises(ConfigError, match="x: n_layers must be at most 4096, got 8192"):
            dry_run.check_sizes("x", target)
        return
    with pytest.raises(ConfigError, match=f"must be at most {2**24}, got {2**30}; correct its"):
        dry_run.make_plan(settings("--target", str(tmp_path), "--draft-vocab-size", "40"))


def test_the_context_is_the_targets_where_that_is_less(monkeypatch):
    short = dataclasses.replace(TINY_CONFIG, max_context=128)
    monkeypatch.setattr(dry_run, "load_target_config", lambda source: (short, None))
    assert dry_run.make_plan(settings()).config.context_len == 128


def test_a_head_to_start_from_is_checked_as_training_does(golden, tmp_path):
    with pytest.raises(ConfigError, match="start_from .* a v10 head .* not trained further"):
        dry_run.make_plan(settings("--start-from", str(golden / "qwen3" / "v10_n4")))
    target = load_target_files("tiny")
    start = settings("--d-ff", "16").draft_config(target.config, tuple(range(9, 250)), None)
    params = init_params(target.config, start, target.place(), jax.random.key(0))
    save_head(tmp_path / "head", start, target.config, jax.device_get(params), "")
    with pytest.raises(ConfigError, match="d_ff must be that of the head to start from, 16"):
        dry_run.make_plan(settings("--start-from", str(tmp_path / "head")))
    plan = dry_run.make_plan(settings("--start-from", str(tmp_path / "head"), "--d-ff", "16"))
    assert plan.spec.draft.draft_ids == tuple(range(9, 9 + 192))


@pytest.mark.timeout(120)
def test_a_reader_that_has_gone_is_no_traceback():
    command = [sys.executable, "-m", "train.pdm", "--config", "tiny_n4", "--dry-run"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


@pytest.mark.parametrize("name", config_names())
def test_the_draft_of_every_config_fits_its_target(name):
    config = named_config(name)
    target, _ = load_target_config(config.target)
    draft = config.draft_config(target, None, None)
    check_pair(target, draft)
    check_row_types(target, draft)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "n_inferred"), [("qwen4b_n16", 1), ("qwen9b_n8", 0)])
def test_the_qwen_configs_are_built_from_shapes(name, n_inferred, capsys):
    config = dry_run.parse_dry_run(PROG, ["--config", name])
    plan = dry_run.make_plan(config)
    assert capsys.readouterr().err.count("is inferred") == n_inferred
    d, f = (2560, 9216) if "4b" in name else (4096, 12288)
    assert plan.n_params[0] == (4_205_751_296 if "4b" in name else 8_953_803_264)
    layer = 2 * d + 2 * 256 + d * (2 * 4096 + 2 * 1024) + 4096 * d + 3 * d * f
    assert plan.n_params[1] == 15 * d * d + 32000 * d + config.n_layers * layer
    assert plan.spec.draft.qk_norm
