"""Checkpoints come back bit for bit, and a killed or damaged save costs only itself."""

import dataclasses
import gc
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest

from spd_jax.checks import ConfigError
from train import checkpoint
from train.checkpoint import checkpoint_numbers, read_notes, restore_latest, save_state, snapshot
from train.step import TrainState, init_state

ROOT = Path(__file__).parents[2]
NOTES = {"judged": [20, {"all": {"loss": 0.1 + 0.2}}], "window": None}

# A load that fails leaves its other reads unfinished, which the collector reports.
orbax_leaves_loads_behind = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(autouse=True)
def collected():
    """Garbage of one test is not reported in another."""
    yield
    gc.collect()


def make_state(step: int, skipped: int = 0, is_averaged: bool = True) -> TrainState:
    params = {"layers": [{"w": jax.random.normal(jax.random.key(step), (300, 40))}]}
    average = optax.ema(0.9) if is_averaged else None
    state = init_state(params, optax.adamw(1e-3), jax.random.key(5), average)
    return dataclasses.replace(
        state,
        opt_state=jax.tree.map(lambda leaf: leaf + step, state.opt_state),
        step=state.step + step,
        skipped=state.skipped + skipped,
    )


def save(directory: Path, step: int, skipped: int = 0, is_averaged: bool = True) -> None:
    save_state(directory, snapshot(make_state(step, skipped, is_averaged)), NOTES)


def restored(directory: Path) -> TrainState:
    state, notes = restore_latest(directory, make_state(0))
    assert notes == NOTES
    return state


def assert_equal(a: TrainState, b: TrainState) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("is_averaged", [False, True])
def test_the_newest_comes_back_bit_for_bit_with_its_notes(tmp_path, is_averaged):
    directory = tmp_path / "checkpoints"
    like = make_state(0, is_averaged=is_averaged)
    assert restore_latest(directory, like) is None and checkpoint_numbers(directory) == []
    for step in (10, 20, 30):
        save(directory, step, 2, is_averaged)
    assert checkpoint_numbers(directory) == [12, 22, 32]
    state, notes = restore_latest(directory, like)
    assert_equal(state, make_state(30, 2, is_averaged))
    assert notes == NOTES == read_notes(directory, 22)
    assert read_notes(directory, 99) == {}


def test_a_snapshot_is_not_changed_by_what_donates_the_state():
    state = make_state(3)
    copy = snapshot(state)
    want = [np.copy(leaf) for leaf in jax.tree.leaves(copy)]
    donating = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    for _ in range(3):
        state = donating(dataclasses.replace(state, key=jax.random.key_data(state.key)))
        state = dataclasses.replace(state, key=jax.random.wrap_key_data(state.key))
    jax.block_until_ready(state)
    for expected, got in zip(want, jax.tree.leaves(copy), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_a_save_killed_half_way_leaves_the_one_before(tmp_path):
    save(tmp_path, 10)
    # What a kill leaves: Orbax writes under a temporary name and renames at the end.
    unfinished = tmp_path / f"20{checkpoint.UNFINISHED}-3"
    shutil.copytree(tmp_path / "10", unfinished)
    next(unfinished.rglob("_METADATA")).unlink()
    assert_equal(restored(tmp_path), make_state(10))
    save(tmp_path, 20)
    assert_equal(restored(tmp_path), make_state(20))


def test_a_kill_in_the_middle_of_a_save_leaves_a_name_that_is_known(tmp_path):
    """The name that `saver` clears away is the one Orbax gives."""
    seen = []

    def rename(*paths, **kwargs):
        seen.extend(p.name for p in tmp_path.iterdir())
        raise OSError("killed")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError, match="killed"):
        for name in ("rename", "replace"):
            patch.setattr(os, name, rename)
            patch.setattr(Path, name, rename)
        save(tmp_path, 10)
    assert seen and all(checkpoint.UNFINISHED in name for name in seen)


@orbax_leaves_loads_behind
@pytest.mark.parametrize("damage", ["truncate", "garble", "delete", "empty"])
def test_a_damaged_checkpoint_is_passed_over_with_one_line(tmp_path, damage, capsys):
    for step in (10, 20):
        save(tmp_path, step)
    files = sorted(p for p in (tmp_path / "20").rglob("*") if p.is_file())
    largest = max(files, key=lambda path: path.stat().st_size)
    if damage == "truncate":
        largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    elif damage == "garble":
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 1
        largest.write_bytes(content)
    elif damage == "delete":
        largest.unlink()
    else:
        for path in files:
            path.unlink()
    assert_equal(restored(tmp_path), make_state(10))
    (line,) = capsys.readouterr().err.strip().split("\n")
    assert line.startswith(f"note: checkpoint 20 in {tmp_path} is not readable")
    save(tmp_path, 20)  # the resumed run gets there again
    assert_equal(restored(tmp_path), make_state(20))


@orbax_leaves_loads_behind
def test_no_readable_checkpoint_is_an_error_not_a_fresh_start(tmp_path):
    save(tmp_path, 10)
    for path in [p for p in (tmp_path / "10").rglob("*") if p.is_file()]:
        path.write_bytes(b"")
    with pytest.raises(ConfigError, match="no checkpoint is readable; give a new workdir"):
        restore_latest(tmp_path, make_state(0))


@orbax_leaves_loads_behind
def test_edited_notes_are_not_believed(tmp_path, capsys):
    save(tmp_path, 10)
    files = [p for p in (tmp_path / "10").rglob("*") if p.is_file()]
    (path,) = [p for p in files if b"judged" in p.read_bytes()]
    path.write_text(path.read_text().replace("0.30000000000000004", "0.4"))
    with pytest.raises(ConfigError, match="no checkpoint is readable"):
        restore_latest(tmp_path, make_state(0))
    assert "its content is not what was written" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "n_shown"), [("Event loop is closed", 0), ("loop", 1)])
def test_only_what_late_writers_raise_is_not_shown(tmp_path, monkeypatch, text, n_shown):
    shown = []
    monkeypatch.setattr(sys, "unraisablehook", shown.append)
    save(tmp_path, 1)  # twice: it is wrapped once
    save(tmp_path, 2)
    for error in (RuntimeError(text), ValueError("Event loop is closed")):
        sys.unraisablehook(SimpleNamespace(exc_value=error))
    assert len(shown) == n_shown + 1


FULL_DISK = """
import resource, sys
from pathlib import Path
from spd_jax.commandline import run
from tests.train.test_checkpoint import save
directory = Path(sys.argv[1])
save(directory, 10)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # of 48,000 bytes a matrix
run(lambda: save(directory, 20))
"""


@pytest.mark.timeout(120)
def test_a_file_that_cannot_grow_is_an_error_line_and_exit_code_2(tmp_path):
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    env = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}  # a file too
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    # Threads of the checkpoint library that still write may leave a folder that the next run clears
    # away.
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {tmp_path}: cannot save checkpoint 20 (")
    assert "File too large" in line and "make room" in line
    assert checkpoint_numbers(tmp_path) == [10]
    assert_equal(restored(tmp_path), make_state(10))
