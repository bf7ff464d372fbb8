"""The whole command: a run that stops and resumes equals one that does not, bit for bit."""

import contextlib
import dataclasses
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import spd_jax
from spd_jax.checks import ConfigError
from spd_jax.weights import load_draft_file, load_target_files
from spd_jax.weights.files import sole_writer
from train import pdm
from train.checkpoint import checkpoint_numbers
from train.config import parse_config
from train.opening import check_begun, check_workdir
from train.stop import StopRequest

ROOT = Path(__file__).parents[2]
BEGUN = "begun from the weights of an earlier head"
ROWS = [
    {
        "input_ids": np.random.default_rng(seed).integers(97, 123, 20 + seed % 12).tolist(),
        "loss_mask": [0] * 5 + [1] * (15 + seed % 12),
        "temperature": 0.7,
    }
    for seed in range(18)
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("pdm") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def argv(data, workdir, *more):
    flags = ["--config", "tiny_n4", "--train-data", str(data), "--workdir", str(workdir)]
    flags += ["--sequence-len", "32", "--batch-tokens", "128", "--steps", "12", "--log-every", "2"]
    return [*flags, "--save-every", "4", *more]


def run_main(flags, exit_code=0):
    """Runs the command in this process; returns the last train state as numpy leaves."""
    kept = []
    original = pdm.train

    def train(this):
        result = original(this)
        kept.append(result[0])
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pdm, "train", train)
        assert pdm.main(flags) == exit_code
    (state,) = kept
    state = dataclasses.replace(state, key=jax.random.key_data(state.key))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


@pytest.fixture(scope="module")
def whole_run(data, tmp_path_factory):
    """A run of 12 updates without a break: its folder and its last state."""
    workdir = tmp_path_factory.mktemp("whole")
    flags = argv(data, workdir, "--heldout-data", str(data), "--eval-every", "6")
    return workdir, run_main(flags)


def read_metrics(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


class StopAfter:
    """Stands in for StopRequest: asks for a stop after some batches."""

    exit_code = 143

    def __init__(self, n_batches):
        self.left = n_batches + 1  # it is looked at once before the first

    def __call__(self, started, max_minutes):
        return contextlib.nullcontext(self)

    @property
    def reason(self):
        self.left -= 1
        return "SIGTERM" if self.left < 0 else None


def test_a_run_leaves_heads_checkpoints_metrics_and_its_record(whole_run):
    workdir, _ = whole_run
    names = {"checkpoints", "heads", "metrics.jsonl", "tensorboard", "run.json", ".lock"}
    assert {path.name for path in workdir.iterdir()} == names | {"best.json"}
    records = read_metrics(workdir)
    judged = {r["step"]: r["heldout"]["all"]["agree_target"] for r in records if "heldout" in r}
    best = json.loads((workdir / "best.json").read_text())
    assert best["figure"] == max(judged.values()) == judged[best["position"]]
    for name in ("checkpoints", "heads"):  # saves were at 4, 6, 8 and 12
        kept = sorted(int(path.name) for path in (workdir / name).iterdir())
        assert kept == sorted({8, 12, best["position"]})
    assert (workdir / best["head"] / "model.safetensors").is_file()
    losses = {r["step"]: r["loss"] for r in records if "loss" in r}
    assert list(losses) == [2, 4, 6, 8, 10, 12]
    assert losses[12] < losses[2]
    assert {"accuracy", "coverage", "tokens_per_second", "lr"} <= set(records[0])
    assert [r["step"] for r in records if "heldout" in r] == [6, 12]


def test_the_head_loads_and_is_bound_to_the_target(whole_run):
    directory = whole_run[0] / "heads" / "12"
    config, params, described = load_draft_file(directory)
    assert config.target_sha256 == load_target_files("tiny").sha256
    assert config.n_stages == 4 and len(config.draft_ids) == 192
    assert params["lm_head"]["weight"].shape == (192, described["d_model"])
    card = (directory / "README.md").read_text()
    assert "Pipeline draft module for tiny" in card and "2-gram lookup" in card


def test_a_run_starts_from_a_head_and_may_add_a_layer(data, whole_run, tmp_path, capsys):
    head = whole_run[0] / "heads" / "12"
    more = ("--start-from", str(head), "--n-layers", "2", "--heldout-data", str(data))
    run_main([*argv(data, tmp_path / "grown", *more), "--steps", "1", "--lr", "1e-9"])
    before = read_metrics(whole_run[0])[-1]["heldout"]
    (after,) = (r["heldout"] for r in read_metrics(tmp_path / "grown") if "heldout" in r)
    assert after["all"]["loss"] == pytest.approx(before["all"]["loss"], rel=0.02)  # bfloat16
    head = tmp_path / "grown" / "heads" / "1"
    assert load_draft_file(head)[0].n_layers == 2
    assert BEGUN in (head / "README.md").read_text()
    # Once begun, the run does not need that head, nor take another; its card still tells.
    more = ("--start-from", str(tmp_path / "gone"), "--n-layers", "2", "--steps", "2")
    run_main([*argv(data, tmp_path / "grown", "--heldout-data", str(data)), *more])
    assert "start_from is for a new run" in capsys.readouterr().err
    run_main([*argv(data, tmp_path / "grown"), "--n-layers", "2", "--steps", "3"])
    assert BEGUN in (head.parent / "3" / "README.md").read_text()


def test_a_run_that_began_from_the_target_says_nothing_else(data, whole_run, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(whole_run[0], workdir)
    run_main([*argv(data, workdir, "--start-from", str(workdir / "heads" / "12")), "--steps", "13"])
    assert BEGUN not in (workdir / "heads" / "13" / "README.md").read_text()


def contents(workdir):
    return {p: p.read_bytes() for p in workdir.rglob("*") if p.is_file() and p.name != ".lock"}


@pytest.mark.parametrize("removed", [["*"], ["*", "heads", "best.json"], ["[0-9]*"]])
def test_a_run_without_its_checkpoints_is_left_as_it_is(data, whole_run, tmp_path, removed):
    workdir = tmp_path / "run"
    shutil.copytree(whole_run[0], workdir)
    for path in (workdir / "checkpoints").iterdir():
        shutil.rmtree(path)
    if "*" in removed:
        (workdir / "checkpoints").rmdir()
    shutil.rmtree(workdir / "heads") if "heads" in removed else None
    (workdir / "best.json").unlink() if "best.json" in removed else None
    before = contents(workdir)
    with pytest.raises(ConfigError, match="whose checkpoints are gone; give a new workdir, or"):
        pdm.main(argv(data, workdir))
    assert contents(workdir) == before


def test_a_run_killed_between_its_first_head_and_checkpoint_starts_anew(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "heads" / "4").mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text('{"step": 2}\n')
    check_begun(tmp_path)
    check_begun(tmp_path / "none")


@pytest.mark.parametrize(
    ("name", "is_file", "message"),
    [
        ("checkpoints", True, "checkpoints: must be a folder"),
        ("heads", True, "heads: must be a folder"),
        ("heads/8/own.txt", True, "heads/8: holds files that are no head's"),
        ("a[1]/heads", False, r"without \[ and \]"),
    ],
)
def test_a_folder_that_fails_at_the_first_save_is_refused_first(
    data, tmp_path, name, is_file, message, capsys
):
    path, workdir = tmp_path / name, tmp_path / "a[1]" if "[" in name else tmp_path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch() if is_file else path.mkdir()
    with pytest.raises(ConfigError, match=message):
        pdm.main(argv(data, workdir))
    assert "loading" not in capsys.readouterr().err


def test_what_is_in_the_heads_of_a_run_so_far_does_not_matter(whole_run, tmp_path):
    workdir = shutil.copytree(whole_run[0], tmp_path / "run")
    (workdir / "heads" / "12" / "own.txt").touch()
    check_workdir(workdir)


@pytest.mark.parametrize("content", [None, "{", "[" * 200_000])
def test_without_its_record_a_run_says_what_to_do(data, whole_run, tmp_path, content):
    workdir = shutil.copytree(whole_run[0], tmp_path / "run")
    (workdir / "run.json").unlink()
    if content is not None:
        (workdir / "run.json").write_text(content)
    with pytest.raises(ConfigError, match="put it back from a backup, or give a new workdir"):
        pdm.main(argv(data, workdir))


def test_a_garbled_record_of_a_run_that_has_not_begun_says_what_to_do(data, tmp_path):
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ConfigError, match="remove it to start anew"):
        pdm.main(argv(data, tmp_path))


def test_a_stop_asked_for_while_loading_ends_before_anything_is_written(data, tmp_path, capsys):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pdm, "read_data", interrupted(pdm.read_data))
        assert pdm.main(argv(data, tmp_path)) == 130
    assert "stopping: SIGINT; nothing was changed" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_signal_that_comes_after_the_last_update_leaves_a_finished_run(data, tmp_path, capsys):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pdm, "StopRequest", StopAfter(1))
        run_main([*argv(data, tmp_path), "--steps", "1"])
    assert checkpoint_numbers(tmp_path / "checkpoints") == [1]
    assert "stopping" not in capsys.readouterr().err


def interrupted(read_data):
    def read(*args):
        os.kill(os.getpid(), signal.SIGINT)
        return read_data(*args)

    return read


def test_checkpoints_that_cannot_be_read_are_not_passed_over(data, whole_run, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(whole_run[0], workdir)
    for path in (workdir / "checkpoints").iterdir():
        shutil.rmtree(path)
    (workdir / "checkpoints" / "7").mkdir()
    with pytest.raises(ConfigError, match="no checkpoint is readable; give a new workdir"):
        pdm.main(argv(data, workdir))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax's reads
def test_a_garbled_checkpoint_costs_the_updates_since_the_one_before(
    data, whole_run, tmp_path, capsys
):
    workdir, want = tmp_path / "run", read_metrics(whole_run[0])
    shutil.copytree(whole_run[0], workdir)
    files = [path for path in (workdir / "checkpoints" / "12").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 16
    largest.write_bytes(content)
    state = run_main(argv(data, workdir, "--heldout-data", str(data), "--eval-every", "6"))
    err = capsys.readouterr().err
    assert "note: checkpoint 12 in" in err and "is not readable" in err
    assert "goes on at 8/12" in err
    for expected, got in zip(whole_run[1], state, strict=True):
        np.testing.assert_array_equal(got, expected)
    assert [r["step"] for r in read_metrics(workdir)] == [r["step"] for r in want]
    gc.collect()


def test_a_run_stopped_before_its_first_checkpoint_keeps_its_start(
    data, whole_run, tmp_path, capsys
):
    head = whole_run[0] / "heads" / "12"
    flags = argv(data, tmp_path, "--steps", "1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pdm, "StopRequest", StopAfter(0))
        assert pdm.main([*flags, "--start-from", str(head)]) == 143
    assert checkpoint_numbers(tmp_path / "checkpoints") == []
    assert pdm.main(flags) == 0
    assert f"note: it starts from {head}, as before" in capsys.readouterr().err
    assert BEGUN in (tmp_path / "heads" / "1" / "README.md").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": []}, "config must be an object, got"),
        ({"draft": None}, "draft must be an object, got"),
        ({"version": 1}, "must be of version 2, got 1: .*give a new workdir"),
        ({"version": None}, "must be of version 2, got None"),
        ({"draft": {"draft_ids": [*range(1, 193)]}}, "its draft is not the one this run trains"),
    ],
)
def test_a_damaged_or_older_record_is_one_line(data, whole_run, tmp_path, change, message):
    workdir = tmp_path / "run"
    shutil.copytree(whole_run[0], workdir)
    record = json.loads((workdir / "run.json").read_text())
    for name, value in change.items():
        if isinstance(value, dict):
            value = record[name] | value
        record[name] = value
    (workdir / "run.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=f"run.json: {message}"):
        pdm.main(argv(data, workdir))


def test_a_head_of_another_target_is_no_start(data, whole_run, tmp_path):
    head = tmp_path / "head"
    shutil.copytree(whole_run[0] / "heads" / "12", head)
    text = (head / "config.json").read_text()
    sha256 = load_target_files("tiny").sha256
    (head / "config.json").write_text(text.replace(sha256, "0" * 64))
    with pytest.raises(ConfigError, match="give a head of this target"):
        pdm.main([*argv(data, tmp_path / "run"), "--start-from", str(head)])


def test_a_v10_head_is_no_start(data, golden, tmp_path):
    head = golden / "qwen3" / "v10_n4"
    with pytest.raises(ConfigError, match="start_from .* a v10 head .* not trained further"):
        pdm.main([*argv(data, tmp_path / "run"), "--start-from", str(head)])


def test_only_one_process_trains_in_a_workdir(data, tmp_path):
    with (
        sole_writer(tmp_path / ".lock"),
        pytest.raises(ConfigError, match="another process is writing there"),
    ):
        pdm.main(argv(data, tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize("state_cache", ["False", "True"])
def test_a_resumed_run_equals_an_uninterrupted_one(data, whole_run, tmp_path, capsys, state_cache):
    flags = argv(data, tmp_path, "--state-cache", state_cache)
    for n_batches in (3, 4):  # stops after 3 and after 7 batches, both between two saves
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pdm, "StopRequest", StopAfter(n_batches))
            run_main(flags, exit_code=143)
    assert "7 of 12 updates done; the same command goes on" in capsys.readouterr().err
    state = run_main(flags)
    assert "goes on at 7/12" in capsys.readouterr().err
    for expected, got in zip(whole_run[1], state, strict=True):
        np.testing.assert_array_equal(got, expected)
    clocks = {"tokens_per_second", "scored_per_second", "seconds_per_step"}
    want, got = (
        [{k: v for k, v in r.items() if k not in clocks} for r in read_metrics(d) if "loss" in r]
        for d in (whole_run[0], tmp_path)
    )
    assert got == want  # those whose batches lie on both sides of a stop too


def test_evaluations_and_decodes_leave_training_as_it_is(data, whole_run, tmp_path, capsys):
    more = ["--heldout-data", str(data), "--eval-every", "6", "--eval-stages", "2", "6"]
    more += ["--decode-every", "1", "--decode-rows", "2", "--decode-tokens", "8"]
    state = run_main(argv(data, tmp_path, *more))
    for expected, got in zip(whole_run[1], state, strict=True):
        np.testing.assert_array_equal(got, expected)
    first, last = (r["heldout"]["all"] for r in read_metrics(tmp_path) if "heldout" in r)
    assert first["decode"]["identical"] == last["decode"]["identical"] == 2
    assert list(last["alpha_by_stages"]) == ["2", "6"] and "alpha_by_stages" not in first
    assert "the text of generate in 2 of 2" in capsys.readouterr().err
    assert "identical to plain decoding" in (tmp_path / "heads" / "12" / "README.md").read_text()


def test_a_finished_run_started_again_does_nothing(data, whole_run, tmp_path, capsys):
    workdir, state = shutil.copytree(whole_run[0], tmp_path / "run"), whole_run[1]
    before = (workdir / "metrics.jsonl").read_bytes()
    for expected, got in zip(state, run_main(argv(data, workdir)), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert (workdir / "metrics.jsonl").read_bytes() == before
    assert f"the head is {workdir / 'heads' / '12'}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--n-layers", "2"], "trains a draft with n_layers 1, the settings say 2"),
        (["--n-stages", "5"], "trains a draft with anchors"),
        (["--draft-vocab-size", "9"], "draft_vocab_size 192, the settings say 9"),
        (["--ema", "0.5"], "has ema None, the settings say 0.5"),
    ],
)
def test_a_run_is_not_resumed_with_another_draft(data, whole_run, more, message):
    with pytest.raises(ConfigError, match=message) as error:
        pdm.main(argv(data, whole_run[0], *more))
    assert "give a new workdir" in str(error.value)


def test_a_run_with_ids_of_a_file_is_resumed_with_that_file_alone(data, whole_run, tmp_path):
    workdir = shutil.copytree(whole_run[0], tmp_path / "run")
    record = json.loads((workdir / "run.json").read_text())
    record["config"] |= {"draft_vocab": "ids.json", "draft_vocab_size": None}
    (workdir / "run.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="has draft_vocab ids.json, the settings say None; "):
        pdm.main(argv(data, workdir, "--draft-vocab-size", "None"))


def test_what_changes_at_a_resume_is_said(data, whole_run, tmp_path, capsys):
    other = tmp_path / "other.jsonl"
    other.write_text(data.read_text().splitlines(keepends=True)[0] * 4)
    workdir = shutil.copytree(whole_run[0], tmp_path / "run")
    assert pdm.main(argv(other, workdir, "--lr", "0.5", "--seed", "3")) == 0
    err = capsys.readouterr().err
    assert "note: the training data differ" in err
    assert "note: lr was 0.001 and is 0.5: this holds from here on" in err
    assert "note: seed was 0 and is 3: batches come in another order from here on" in err


def test_more_updates_than_can_be_counted_are_an_error():
    config = parse_config("test", ["--config", "tiny_n4", "--epochs", "1e9"])
    assert pdm.planned_updates(dataclasses.replace(config, accumulate=4), 3) == 750_000_000
    with pytest.raises(ConfigError, match="epochs must give at most .* lower epochs"):
        pdm.planned_updates(config, 3)


def test_the_average_is_what_is_judged_and_published(data, tmp_path):
    """One update at a decay: the average of one is that one, of two it lies between."""
    flags = argv(data, tmp_path, "--heldout-data", str(data), "--ema", "0.5", "--lr", "0.1")
    state = run_main(
        [
            *flags,
            "--steps",
            "2",
            "--save-every",
            "1",
            "--tensorboard",
            "False",
            "--draft-vocab-size",
            "150",
        ]
    )
    assert not (tmp_path / "tensorboard").exists()
    heads = [load_draft_file(tmp_path / "heads" / n)[1]["lm_head"]["weight"] for n in "12"]
    checkpoint = [leaf for leaf in state if leaf.shape == heads[0].shape]
    weight, _, second, average = checkpoint  # by TrainState: params, mu, nu, average
    assert (second >= 0).all()
    # weights of the average: (1/3, 2/3) after two updates
    np.testing.assert_allclose(heads[1], (heads[0] + 2 * weight) / 3, rtol=0.02, atol=1e-3)
    assert np.abs(heads[1] - weight).max() > 0.01
    np.testing.assert_allclose(heads[1], average / 0.75, rtol=0.01, atol=1e-3)


def test_batches_without_anything_to_learn_end_the_run(data, tmp_path):
    flags = argv(data, tmp_path, "--draft-vocab-size", "1", "--steps", "40")
    with pytest.raises(ConfigError, match="20 updates in a row had no position to learn from"):
        pdm.main(flags)


@pytest.mark.parametrize(
    ("metrics", "saved", "message"),
    [
        ({"loss": float("nan")}, 0, "update 7: loss nan.*; lower lr and give the command again$"),
        ({"loss": float("nan")}, 5, "lower lr and .* again: it goes on from checkpoint 5$"),
        ({"grad_norm": float("inf")}, 6, "lower lr and remove checkpoints/6 to go on from the"),
        ({"weights_rms": float("nan")}, 6, "weights is nan, .* it goes on from checkpoint 6$"),
        ({"weights_rms": 1e4}, 6, "weights is 10000.0, must be below 1000; lower lr"),
    ],
)
def test_an_update_that_went_wrong_ends_the_run_with_what_helps(metrics, saved, message):
    fine = {"loss": 1.0, "grad_norm": 1.0, "weights_rms": 0.5}
    pdm.check_step(fine, 7, 0, saved)
    with pytest.raises(ConfigError, match=message):
        pdm.check_step(fine | metrics, 7, 0, saved)


def test_weights_that_went_wrong_are_never_saved(data, tmp_path):
    more = ("--lr", "1000", "--weight-decay", "1000", "--save-every", "1", "--tensorboard", "False")
    with pytest.raises(ConfigError, match="update 1: the root mean square of the weights is"):
        pdm.main([*argv(data, tmp_path, *more), "--steps", "2", "--warmup-steps", "0"])
    assert checkpoint_numbers(tmp_path / "checkpoints") == []
    run_main([*argv(data, tmp_path), "--steps", "1"])  # its advice helps


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_or_the_time_limit_asks_for_a_stop(number):
    before = signal.getsignal(number)
    with StopRequest(time.monotonic(), None) as stop:
        assert stop.reason is None
        os.kill(os.getpid(), number)
        assert stop.reason == signal.Signals(number).name
        assert stop.exit_code == 128 + number
    assert signal.getsignal(number) is before
    with StopRequest(time.monotonic() - 61, 1.0) as stop:
        assert (stop.reason, stop.exit_code) == ("max_minutes", 0)
    with StopRequest(time.monotonic(), 1.0) as stop:
        assert stop.reason is None


INTERRUPTED_TWICE = """
import os, signal, time
from train.stop import StopRequest
try:
    with StopRequest(time.monotonic(), None):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
finally:
    print("an exception was raised")
"""


@pytest.mark.timeout(60)
def test_a_second_interrupt_ends_at_once_and_raises_nothing():
    command = [sys.executable, "-c", INTERRUPTED_TWICE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "stopped at once; what is saved is whole\n"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hybrid", "mixture"])
def test_a_head_for_an_hf_directory_is_trained_and_decodes(kind, rows_file, tmp_path, request):
    source = request.getfixturevalue(f"{kind}_directory")
    flags = argv(rows_file, tmp_path, "--target", str(source), "--draft-vocab-size", "40")
    assert pdm.main([*flags, "--steps", "3", "--d-ff", "24", "--n-stages", "2"]) == 0
    target = spd_jax.load_target(source)
    draft = spd_jax.load_draft(tmp_path / "heads" / "3", target)
    width = target.config.d_model
    assert draft.params["layers"][0]["mlp"]["down"]["weight"].shape == (width, 24)
    more = {"max_new_tokens": 12, "stop_ids": ()}
    result = spd_jax.decode(target, draft, [5, 6, 7], mesh="virtual", **more)
    assert result.tokens == spd_jax.generate(target, [5, 6, 7], **more).tokens


@pytest.mark.slow
def test_sigterm_saves_and_the_same_command_goes_on(data, tmp_path):
    command = [sys.executable, "-m", "train.pdm", *argv(data, tmp_path, "--steps", "100000")]
    lines = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        for line in process.stderr:
            lines.append(line)
            if line.startswith("step 2/"):
                process.send_signal(signal.SIGTERM)
    assert process.returncode == 143
    assert "stopping: SIGTERM\n" in lines
    (done,) = [line.split()[0] for line in lines if "the same command goes on" in line]
    assert (tmp_path / "checkpoints" / done).is_dir()
    assert (tmp_path / "heads" / done / "model.safetensors").is_file()
