"""Trains a Pipeline Draft Module; the same command resumes from the last checkpoint.

    python -m train.pdm --config smollm2_n5 [--field value ...]
    python -m train.pdm --config qwen4b_n8 --dry-run     # what it needs, from shapes alone
    python -m train.pdm ... --coordinator 10.0.0.1:7654 --num-processes 4 --process-id 2  # hosts

target + rows -> draft -> updates -> workdir/{checkpoints,heads}/<n>, metrics.jsonl, tensorboard,
best.json, run.json
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from spd_jax.checks import ConfigError
from spd_jax.commandline import run, say
from spd_jax.config import DraftConfig
from spd_jax.models.draft import grow_params, init_params
from spd_jax.processes import Processes, joined
from spd_jax.weights import LoadedTarget, load_target_files
from spd_jax.weights.files import sole_writer
from train.batches import training_batches
from train.chats import ChatReader
from train.checkpoint import restore_latest, snapshot, with_key
from train.config import MOST, TrainConfig
from train.data import Corpus, count_shared, last_answers, read_corpus
from train.dry_run import DRY_RUN_FLAGS, DRY_RUN_HELP, dry_run, parse_dry_run
from train.judge import Judge
from train.launch import check_data, check_settings, parse_run
from train.metrics import MeanMetrics
from train.opening import check_workdir, open_together
from train.optimizer import learning_rate, make_average, make_optimizer, read_average
from train.parallel import Devices, find_devices
from train.publish import save_run_head
from train.saver import Judged, best_note
from train.step import TrainState, init_state, make_train_step
from train.stop import StopRequest, agreed_reason
from train.teacher import StateCache, Teacher
from train.writer import Writer

PROG = "python -m train.pdm"
MAX_WEIGHTS_RMS = 1000.0  # weights begin below 1; such a draft comes back from there no more
MAX_SKIPPED = 20  # updates in a row without a valid position: something is wrong with the data
FRESH = {"judged": None, "window": None, "n_skipped": 0}  # the notes of a run that has not begun


@dataclasses.dataclass(frozen=True)
class Run:
    """What stays the same from the first step of a run to its last."""

    config: TrainConfig
    devices: Devices
    target: LoadedTarget
    target_params: Any  # on the devices
    draft: DraftConfig
    start: tuple[DraftConfig, Any] | None  # a head to begin from and its parameters
    corpus: Corpus
    heldout: Corpus | None
    stop: StopRequest
    processes: Processes

    @property
    def workdir(self) -> Path:
        """The folder of the run."""
        return Path(self.config.workdir)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains until the last step, a signal or the time limit; returns the exit code."""
    started = time.monotonic()
    argv = list(sys.argv[1:] if argv is None else argv)
    if any(flag in argv for flag in DRY_RUN_FLAGS):
        return dry_run(parse_dry_run(PROG, argv))
    config, launch = parse_run(PROG, argv, DRY_RUN_HELP)
    with StopRequest(started, config.max_minutes) as stop, joined(launch) as processes:
        return run_training(config, stop, processes)


def run_training(config: TrainConfig, stop: StopRequest, processes: Processes) -> int:
    """Loads, trains until the last step or until asked to stop, and says what is there then.

    Returns the exit code: 0 after the last step, else that of the stop, in whichever process.
    """
    check_settings(config, processes)
    if processes.is_first:
        check_workdir(Path(config.workdir))
    say(f"loading {config.target} ...")
    target = load_target_files(config.target, config.dtype)
    corpus = read_data(config.train_data, config, target)
    heldout = None
    if config.heldout_data:
        heldout = last_answers(read_data(config.heldout_data, config, target))
        n_shared = count_shared(heldout, corpus)
        if n_shared:
            say(f"note: {n_shared} of {len(heldout.rows)} held-out rows are trained on too")
    check_data(target, corpus, heldout, processes)
    if reason := agreed_reason(stop, processes):
        say(f"stopping: {reason}; nothing was changed")
        return max(processes.gather(stop.exit_code))
    with contextlib.ExitStack() as stack:
        if processes.is_first:
            stack.enter_context(sole_writer(Path(config.workdir) / ".lock"))
        config, draft, start = open_together(config, target, corpus, processes)
        devices = find_devices(config.devices, config.cut_target, target.params, processes)
        say(devices.describe())
        params = devices.place_target(target)
        data = corpus, heldout
        this = Run(config, devices, target, params, draft, start, *data, stop, processes)
        state, n_steps = train(this)
    position = state.position
    if position < n_steps:
        say(f"{position} of {n_steps} updates done; the same command goes on from there")
    if position:
        say(f"the head is {this.workdir / 'heads' / str(position)}{best_note(this.workdir)}")
    return max(processes.gather(stop.exit_code)) if position < n_steps else 0


def train(this: Run) -> tuple[TrainState, int]:
    """Runs the training loop; returns the last state, which is saved, and the planned updates."""
    config = this.config
    batches, n_epoch = batches_of(config, this.corpus)
    n_steps = planned_updates(config, n_epoch)
    schedule = learning_rate(config, n_steps)
    optimizer, average = make_optimizer(config, schedule), make_average(config)
    state, notes = starting_state(this, optimizer, average)
    position = saved = state.position
    say(
        f"{n_epoch} batches an epoch, {config.accumulate} an update; "
        f"{'goes on' if position else 'starts'} at {position}/{n_steps}"
    )
    update, judge = make_update(this, batches, optimizer, schedule, average), make_judge(this)
    window, n_skipped, judged = MeanMetrics(notes["window"]), notes["n_skipped"], notes["judged"]

    writing = functools.partial(write_head, this), this.processes.is_first
    with (
        Writer(config, position, n_steps, *writing) as writer,
        jax.transfer_guard_host_to_device("disallow"),
    ):

        def save() -> None:
            kept = {"judged": judged, "window": window.so_far(), "n_skipped": n_skipped}
            writer.save(state, result_params(config, state), kept)
            window.restart_clock()

        while not (reason := agreed_reason(this.stop, this.processes)) and position < n_steps:
            state, metrics, n_tokens = update(state, position)
            position += 1
            n_skipped = 0 if metrics["n_valid"] else n_skipped + 1
            check_step(metrics, position, n_skipped, saved)
            writer.advance(position)
            window.add(metrics, n_tokens)
            is_last = position == n_steps
            if position % config.log_every == 0 or is_last:
                writer.log({"step": position, **window.take(), "lr": float(metrics["lr"])})
            is_judged = judge is not None and (position % config.eval_every == 0 or is_last)
            if is_judged:
                figures = judge(result_params(config, state), position, is_last)
                judged = position, figures
                writer.log_heldout(position, figures)
                window.restart_clock()
            may_be_best = is_judged and config.keep_best > 0
            if position % config.save_every == 0 or is_last or may_be_best:
                save()
                saved = position
        if position < n_steps:
            writer.say(f"stopping: {reason}")
        if position > saved:
            save()
    return state, n_steps


def make_update(
    this: Run,
    batches: Sequence[dict[str, np.ndarray]],
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    average: optax.GradientTransformation | None,
) -> Callable[[TrainState, int], tuple[TrainState, dict[str, Any], int]]:
    """Returns (state, position) -> (state, metrics on the host, tokens read without padding)."""
    config = this.config
    train_step = make_train_step(
        this.target.config,
        this.draft,
        optimizer,
        schedule,
        average=average,
        expected_alpha=config.expected_alpha,
        devices=this.devices,
        **config.scoring,
    )
    teacher = make_teacher(this, this.corpus)

    def update(state: TrainState, position: int) -> tuple[TrainState, dict[str, Any], int]:
        numbers = range(position * config.accumulate, (position + 1) * config.accumulate)
        chosen = [batches[number] for number in numbers]
        state, metrics = train_step(state, this.target_params, map(teacher, chosen))
        metrics = jax.device_get(metrics)  # waits: the CPU backend must not queue steps
        return state, metrics, sum(int((batch["attention_mask"] > 0).sum()) for batch in chosen)

    return update


def batches_of(config: TrainConfig, corpus: Corpus) -> tuple[Sequence[dict[str, np.ndarray]], int]:
    """Returns the batches of a run by number, and how many make an epoch."""
    return training_batches(
        corpus.rows,
        config.sequence_len,
        config.batch_tokens,
        config.seed,
        packing=config.packing,
    )


def planned_updates(config: TrainConfig, n_epoch: int) -> int:
    """Returns the updates of a run whose epoch has `n_epoch` batches."""
    n_steps = config.steps or math.ceil(config.epochs * n_epoch / config.accumulate)
    if n_steps > MOST["steps"]:
        raise ConfigError(
            f"epochs must give at most {MOST['steps']} updates, got {config.epochs:g} of {n_epoch} "
            "batches; lower epochs"
        )
    return n_steps


def starting_state(
    this: Run, optimizer: optax.GradientTransformation, average: optax.GradientTransformation | None
) -> tuple[TrainState, dict[str, Any]]:
    """Returns the state and the notes of the last checkpoint, else those of a new run."""
    config, processes = this.config, this.processes
    init_key, train_key = jax.random.split(jax.random.key(config.seed))
    # Compiled as one: its hundreds of small programs would stay in memory.
    init = functools.partial(
        init_params, this.target.config, this.draft, copy=config.init == "target"
    )
    params = jax.jit(init, out_shardings=this.devices.whole)(this.target_params, init_key)
    if this.start is not None:
        params = grow_params(
            this.target.config, this.draft, params, this.target_params, *this.start
        )
    state = init_state(params, optimizer, train_key, average)
    notes: dict[str, Any] = FRESH
    if processes.is_first:  # no other needs to see its disk
        state, notes = restore_latest(this.workdir / "checkpoints", state) or (state, FRESH)
    notes = processes.gather(notes)[0]
    if processes.n > 1:
        state = with_key(processes.broadcast(snapshot(state)), state.key)
    return this.devices.put_whole(state), notes


def result_params(config: TrainConfig, state: TrainState) -> Any:
    """Returns the parameters to evaluate and to write as head: their average where one is kept."""
    if config.ema is None:
        return state.params
    return read_average(state.params, state.average, config.ema)


def make_judge(this: Run) -> Judge | None:
    """Returns what makes held-out figures of draft parameters; None without held-out rows."""
    if not this.heldout:
        return None
    teacher, rows = make_teacher(this, this.heldout), this.heldout.rows[: this.config.eval_rows]
    return Judge(
        this.config, this.target, this.target_params, this.draft, teacher, rows, this.devices
    )


def read_data(names: Sequence[str], config: TrainConfig, target: LoadedTarget) -> Corpus:
    """Reads files of rows and says what they hold."""
    say(f"reading {', '.join(names)} ...")
    reader = ChatReader(target.tokenizer, target.stop_ids, config.thinking)
    corpus = read_corpus(
        names,
        target.config.vocab_size,
        config.sequence_len,
        reader,
        config.overflow,
        target.sha256,
    )
    for line in corpus.describe():
        say(line)
    return corpus


def make_teacher(this: Run, corpus: Corpus) -> Teacher:
    """Returns the source of the target's outputs for a corpus, cached where the settings say."""
    target, cache = this.target, None
    if this.config.state_cache:
        states, dtype = this.workdir / "states", this.target_params["embed"]["weight"].dtype
        cache = StateCache(states, corpus, target.config, this.draft, dtype, target.sha256)
        say(f"state cache: {cache.n_bytes / 1e9:.2f} GB, {cache.n_done} rows done")
    return Teacher(target.config, this.draft, this.target_params, corpus, cache, this.devices)


def check_step(metrics: dict[str, Any], position: int, n_skipped: int, saved: int) -> None:
    """Raises ConfigError where going on makes no sense: no checkpoint is made of what came of it.

    Args:
      position: of the update that gave the metrics.
      saved: position of the last checkpoint, 0 where there is none.
    """
    again = "give the command again" + (f": it goes on from checkpoint {saved}" if saved else "")
    if not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])):
        # The loss is that of the weights before the update. Were they saved, no lr helps them.
        advice = f"lower lr and {again}"
        if saved and saved == position - 1:
            advice = (
                f"checkpoint {saved} holds the weights that gave them: lower lr and remove "
                f"checkpoints/{saved} to go on from the one before; without one give a new workdir"
            )
        raise ConfigError(
            f"update {position}: loss {metrics['loss']}, gradient norm {metrics['grad_norm']} must "
            f"be finite; {advice}"
        )
    if not metrics["weights_rms"] < MAX_WEIGHTS_RMS:
        raise ConfigError(
            f"update {position}: the root mean square of the weights is {metrics['weights_rms']}, "
            f"must be below {MAX_WEIGHTS_RMS:g}; lower lr (or weight_decay) and {again}"
        )
    if n_skipped == MAX_SKIPPED:
        raise ConfigError(
            f"{MAX_SKIPPED} updates in a row had no position to learn from (up to update "
            f"{position}); raise draft_vocab_size or look at the rows of train_data"
        )


def write_head(this: Run, position: int, params: Any, judged: Judged | None) -> None:
    """Writes the head directory of a checkpoint."""
    heads, target = this.workdir / "heads", this.target.config
    data = this.corpus, this.heldout
    save_run_head(heads, position, this.config, this.draft, target, params, judged, data)


if __name__ == "__main__":
    run(main)
