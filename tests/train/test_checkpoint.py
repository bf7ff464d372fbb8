"""Checkpoints come back bit for bit, and a killed or damaged save costs only itself."""

import gc
import shutil

import jax
import numpy as np
import optax
import pytest

from spd_jax.checks import ConfigError
from train.checkpoint import has_checkpoint, restore_latest, save_state
from train.step import TrainState, init_state

# A load that fails leaves its other reads unfinished, which the collector reports.
orbax_leaves_loads_behind = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(autouse=True)
def collected():
    """Garbage of one test is not reported in another."""
    yield
    gc.collect()


def make_state(step: int, skipped: int = 0) -> TrainState:
    params = {"layers": [{"w": jax.random.normal(jax.random.key(step), (300, 40))}]}
    state = init_state(params, optax.adamw(1e-3), jax.random.key(5))
    return TrainState(
        params,
        jax.tree.map(lambda leaf: leaf + step, state.opt_state),
        state.step + step,
        state.skipped + skipped,
        state.key,
    )


def assert_equal(a: TrainState, b: TrainState) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def steps(directory):
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal())


def test_the_newest_comes_back_bit_for_bit_and_older_ones_go(tmp_path):
    directory = tmp_path / "checkpoints"
    assert restore_latest(directory, make_state(0)) is None
    assert not has_checkpoint(directory)
    for step in (10, 20, 30):
        save_state(directory, make_state(step, skipped=2), keep=2)
    assert steps(directory) == [22, 32] and has_checkpoint(directory)
    assert_equal(restore_latest(directory, make_state(0)), make_state(30, skipped=2))


def test_a_save_killed_half_way_leaves_the_one_before(tmp_path):
    save_state(tmp_path, make_state(10), keep=2)
    whole = tmp_path / "10"
    # What a kill leaves: Orbax writes under a temporary name and renames at the end.
    shutil.copytree(whole, tmp_path / "20.orbax-checkpoint-tmp")
    next((tmp_path / "20.orbax-checkpoint-tmp").rglob("_METADATA")).unlink()
    assert_equal(restore_latest(tmp_path, make_state(0)), make_state(10))
    save_state(tmp_path, make_state(20), keep=2)
    assert_equal(restore_latest(tmp_path, make_state(0)), make_state(20))
    assert [p.name for p in tmp_path.iterdir() if "tmp" in p.name] == []


@orbax_leaves_loads_behind
@pytest.mark.parametrize("damage", ["truncate", "delete", "empty"])
def test_a_damaged_checkpoint_is_passed_over_with_one_line(tmp_path, damage, capsys):
    for step in (10, 20):
        save_state(tmp_path, make_state(step), keep=3)
    files = sorted(p for p in (tmp_path / "20").rglob("*") if p.is_file())
    if damage == "truncate":
        largest = max(files, key=lambda path: path.stat().st_size)
        largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    elif damage == "delete":
        max(files, key=lambda path: path.stat().st_size).unlink()
    else:
        for path in files:
            path.unlink()
    assert_equal(restore_latest(tmp_path, make_state(0)), make_state(10))
    (line,) = capsys.readouterr().err.strip().split("\n")
    assert line.startswith(f"note: checkpoint 20 in {tmp_path} is not readable")
    save_state(tmp_path, make_state(20), keep=3)  # the resumed run gets there again
    assert_equal(restore_latest(tmp_path, make_state(0)), make_state(20))


@orbax_leaves_loads_behind
def test_no_readable_checkpoint_is_an_error_not_a_fresh_start(tmp_path):
    save_state(tmp_path, make_state(10), keep=2)
    for path in [p for p in (tmp_path / "10").rglob("*") if p.is_file()]:
        path.write_bytes(b"")
    with pytest.raises(ConfigError, match="no checkpoint is readable; give a new workdir"):
        restore_latest(tmp_path, make_state(0))
