"""What is kept of the saves of a run, and that a save that fails is an error, not a loss."""

import dataclasses
import errno
import json
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spd_jax.checks import ConfigError
from train.checkpoint import checkpoint_numbers, restore_latest
from train.config import TrainConfig
from train.saver import Saver, kept_numbers
from train.step import TrainState, init_state


def make_state(step: int) -> TrainState:
    params = {"lm_head": {"weight": jnp.full((3, 2), float(step))}}
    state = init_state(params, optax.sgd(0.1), jax.random.key(5))
    return dataclasses.replace(state, step=state.step + step)


class Folder:
    """A run's folder, with heads that are a number in a file."""

    def __init__(self, workdir: Path, **fields):
        self.workdir = workdir
        self.config = TrainConfig(workdir=str(workdir), **fields)

    def write_head(self, position, params, judged):
        head = self.workdir / "heads" / str(position)
        head.mkdir(parents=True, exist_ok=True)
        (head / "model.safetensors").write_text(str(float(params["lm_head"]["weight"][0, 0])))

    def saver(self, position: int = 0) -> Saver:
        return Saver(self.config, position, self.write_head)

    def numbers(self) -> list[int]:
        heads = checkpoint_numbers(self.workdir / "heads")
        assert heads == checkpoint_numbers(self.workdir / "checkpoints")
        return heads


def notes(step: int, figure: float | None, loss: float = 0.0) -> dict:
    judged = None if figure is None else [step, {"all": {"agree_target": figure, "loss": loss}}]
    return {"judged": judged, "window": None, "n_skipped": 0}


def save_all(saver: Saver, figures: dict[int, float | None]) -> None:
    for step, figure in figures.items():
        state = make_state(step)
        saver.save(state, state.params, notes(step, figure, loss=figure or 0.0))


FIGURES = {1: 0.1, 2: 0.5, 3: 0.5, 4: None, 5: 0.3, 6: 0.2}


@pytest.mark.parametrize(
    ("fields", "kept", "best"),
    [
        ({"keep": 1, "keep_best": 1}, [2, 6], 2),
        ({"keep": 2, "keep_best": 2}, [2, 3, 5, 6], 2),
        ({"keep": 3, "keep_best": 0}, [4, 5, 6], None),
        ({"keep": 1, "keep_best": 1, "best_by": "loss"}, [1, 6], 1),
    ],
)
def test_the_newest_and_the_best_are_kept_with_their_heads(tmp_path, fields, kept, best):
    folder = Folder(tmp_path, **fields)
    with folder.saver() as saver:
        save_all(saver, FIGURES)
    assert folder.numbers() == kept
    marked = tmp_path / "best.json"
    assert marked.exists() == (best is not None)
    if best is not None:
        fields = json.loads(marked.read_text())
        assert (fields["position"], fields["figure"]) == (best, FIGURES[best])
        assert (tmp_path / fields["head"] / "model.safetensors").read_text() == str(float(best))


def test_a_saver_that_goes_on_knows_the_figures_of_before(tmp_path):
    folder = Folder(tmp_path, keep=1)
    with folder.saver() as saver:
        save_all(saver, {1: 0.9, 2: 0.1})
    # What kills leave: a mark not yet set, a save half removed, a head half written.
    (tmp_path / "best.json").unlink()
    for name in (
        "checkpoints/.7.old",
        "heads/.3.new-0a1b2c3d",
        "checkpoints/3.orbax-checkpoint-tmp",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / ".run.json.a1b2c3_d").write_text("{")
    (tmp_path / ".lock").write_text("")
    with folder.saver(2) as saver:
        assert json.loads((tmp_path / "best.json").read_text())["position"] == 1
        save_all(saver, {3: 0.2})
    assert folder.numbers() == [1, 3]
    assert not [p for p in tmp_path.glob("*/*") if not p.name.isdecimal()]
    names = {"checkpoints", "heads", "best.json", ".lock"}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_files_of_others_are_never_removed(tmp_path, capsys):
    folder = Folder(tmp_path, keep=1, keep_best=0)
    with folder.saver() as saver:
        save_all(saver, {1: None})
    own = ["heads/1/notes.txt", "heads/.3.new-x", ".run.json.swp", ".metrics.jsonl.before-it-broke"]
    for name in own:
        (tmp_path / name).write_text("mine")
    with folder.saver(1) as saver:
        save_all(saver, {2: None, 3: None})
    assert all((tmp_path / name).read_text() == "mine" for name in own)
    assert checkpoint_numbers(tmp_path / "heads") == [1, 3]
    (line,) = capsys.readouterr().err.strip().split("\n")
    assert (
        line == f"note: {tmp_path / 'heads' / '1'} is not removed: it holds files that are no "
        "head's"
    )


def test_saves_of_later_updates_are_not_removed_until_the_run_passes_them(tmp_path):
    folder = Folder(tmp_path, keep=1, keep_best=0)
    with folder.saver() as saver:
        save_all(saver, {9: None})
    with folder.saver(2) as saver:
        save_all(saver, {3: None, 4: None})
    assert folder.numbers() == [4, 9]
    with folder.saver(4) as saver:
        save_all(saver, {8: None, 10: None})
    assert folder.numbers() == [10]


def test_a_save_that_could_not_be_read_takes_no_place_of_a_good_one(tmp_path):
    with Folder(tmp_path, keep=3).saver() as saver:
        save_all(saver, {3: 0.2, 6: 0.1, 7: 0.9})
    folder = Folder(tmp_path, keep=2, keep_best=1)
    with folder.saver(6) as saver:  # 7 was damaged: the run goes on from 6
        assert json.loads((tmp_path / "best.json").read_text())["position"] == 3
        save_all(saver, {9: 0.1})
        saver.wait()
        assert folder.numbers() == [3, 6, 9]
        save_all(saver, {12: 0.1})
    assert folder.numbers() == [3, 9, 12]
    assert json.loads((tmp_path / "best.json").read_text())["position"] == 3


def test_what_is_written_is_the_state_at_the_save_and_the_caller_does_not_wait(tmp_path):
    folder, may_write = Folder(tmp_path), threading.Event()
    write_head = folder.write_head
    folder.write_head = lambda *args: (may_write.wait(30), write_head(*args))
    donating = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    with folder.saver() as saver:
        state = make_state(3)
        saver.save(state, state.params, notes(3, None))
        params = donating(state.params)  # while nothing is written yet
        assert not (tmp_path / "heads").exists()
        saver.check()
        may_write.set()
    assert float(params["lm_head"]["weight"][0, 0]) == 4
    got, _ = restore_latest(tmp_path / "checkpoints", make_state(0))
    np.testing.assert_array_equal(got.params["lm_head"]["weight"], np.full((3, 2), 3.0))
    assert (tmp_path / "heads" / "3" / "model.safetensors").read_text() == "3.0"


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("what", "left"),
    [("train.checkpoint.ocp.save", [1]), ("train.saver.replace_file", [1, 2])],
)
def test_a_disk_that_is_full_is_one_line_and_the_save_before_remains(tmp_path, what, left):
    folder = Folder(tmp_path, keep=2)
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(ConfigError, match="cannot .*No space left"),
        folder.saver() as saver,
    ):
        save_all(saver, {1: 0.5})
        saver.wait()
        patch.setattr(what, full)
        save_all(saver, {2: 0.7})
    assert checkpoint_numbers(tmp_path / "checkpoints") == left
    got, _ = restore_latest(tmp_path / "checkpoints", make_state(0))
    assert got.position == left[-1]
    with folder.saver(left[-1]) as saver:  # the disk has room again
        save_all(saver, {2: 0.7})
    assert folder.numbers() == [1, 2]
    assert json.loads((tmp_path / "best.json").read_text())["position"] == 2


def refuse(*_):
    raise ConfigError("the disk refuses")


def test_an_error_of_a_save_is_raised_by_the_next_look(tmp_path):
    folder = Folder(tmp_path)
    folder.write_head = refuse
    saver = folder.saver()
    save_all(saver, {1: None})
    saver._executor.shutdown()
    with pytest.raises(ConfigError, match="the disk refuses"):
        saver.check()
    saver.check()  # said once
    assert checkpoint_numbers(tmp_path / "checkpoints") == []  # none without its head


def test_the_error_of_the_body_comes_first(tmp_path):
    folder = Folder(tmp_path)
    folder.write_head = refuse
    with pytest.raises(ValueError, match="first"), folder.saver() as saver:
        save_all(saver, {1: None})
        raise ValueError("first")


def test_equal_figures_keep_the_earlier():
    assert kept_numbers({1: 0.5, 2: 0.5, 3: None}, 1, 1) == ({3}, [1])
    assert kept_numbers({}, 2, 1) == (set(), [])
