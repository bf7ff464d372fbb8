"""Trains a Pipeline Draft Module; the same command resumes from the last checkpoint.

    python -m train.pdm --config smollm2_n5 [--field value ...]

target + rows -> draft -> train steps -> workdir/{checkpoints,heads}/<n>, metrics.jsonl, run.json
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from spd_jax.config import ConfigError, DraftConfig
from spd_jax.models.draft import check_pair, init_params
from spd_jax.weights import LoadedTarget, load_target_files
from train.checkpoint import has_checkpoint, restore_latest, save_state
from train.config import TrainConfig, parse_config
from train.data import Corpus, count_draft_ids, read_corpus, training_batches
from train.evaluate import evaluate, make_eval_step
from train.metrics import MeanMetrics, MetricsFile, TrainProgress
from train.optimizer import learning_rate, make_optimizer
from train.publish import save_run_head
from train.record import read_draft, write_record
from train.startup import run, say
from train.step import TrainState, init_state, make_train_step
from train.stop import StopRequest

MAX_SKIPPED = 20  # batches in a row without a valid position: something is wrong with the data


def main(argv: Sequence[str] | None = None) -> int:
    """Trains until the last step, a signal or the time limit; returns the exit code."""
    started = time.monotonic()
    config = parse_config("python -m train.pdm", sys.argv[1:] if argv is None else argv)
    workdir = Path(config.workdir)
    say(f"loading {config.target} ...")
    target = load_target_files(config.target, config.dtype)
    vocab_size = target.config.vocab_size
    corpus = read_corpus(config.train_data, vocab_size, config.sequence_len)
    say(f"{config.train_data}: {corpus.describe()}")
    heldout = None
    if config.heldout_data is not None:
        heldout = read_corpus(config.heldout_data, vocab_size, config.sequence_len)
        say(f"{config.heldout_data}: {heldout.describe()}")

    batches, n_epoch = training_batches(
        corpus.rows, config.sequence_len, config.batch_tokens, config.seed
    )
    n_steps = config.steps or math.ceil(config.epochs * n_epoch)
    draft = open_run(workdir, config, target, corpus)
    target_params = jax.device_put(target.params)
    init_key, train_key = jax.random.split(jax.random.key(config.seed))
    optimizer = make_optimizer(config, n_steps)
    params = init_params(target.config, draft, target_params, init_key)
    state = init_state(params, optimizer, train_key)
    state = restore_latest(workdir / "checkpoints", state) or state
    first = position = state.position
    say(f"{n_epoch} batches an epoch; {'resuming at' if first else 'starting,'} {first}/{n_steps}")

    loss_settings = {"temperature": config.temperature, "mask_mode": config.mask_mode}
    train_step = make_train_step(target.config, draft, optimizer, **loss_settings)
    eval_step = make_eval_step(target.config, draft, **loss_settings)
    lr_at = learning_rate(config, n_steps)
    metrics_file = MetricsFile(workdir / "metrics.jsonl", first)
    progress = TrainProgress(n_steps, first)
    window, n_skipped, figures, saved = MeanMetrics(), 0, None, first

    with StopRequest(started, config.max_minutes) as stop:
        while position < n_steps and not stop.reason:
            batch = batches[position]
            state, metrics = train_step(state, target_params, jax.device_put(batch))
            metrics = jax.device_get(metrics)  # waits: the CPU backend must not queue steps
            position += 1
            check_finite(metrics, position)
            n_skipped = 0 if metrics["n_valid"] else n_skipped + 1
            if n_skipped == MAX_SKIPPED:
                raise ConfigError(
                    f"{MAX_SKIPPED} batches in a row had no position to learn from; are the "
                    f"rows of {config.train_data} scored, and are their ids draft ids?"
                )
            window.add(metrics, n_tokens=int(batch["attention_mask"].sum()))
            progress.advance(position)
            if position % config.log_every == 0 or position == n_steps:
                record = {"step": position, **window.take(), "lr": float(lr_at(position - 1))}
                metrics_file.write(record)
                seconds_left = (n_steps - position) * record["seconds_per_step"]
                progress.show(record, seconds_left)
            if heldout and (position % config.eval_every == 0 or position == n_steps):
                figures = evaluate(
                    eval_step,
                    target_params,
                    state.params,
                    heldout.rows[: config.eval_rows],
                    config.sequence_len,
                    config.batch_tokens,
                )
                metrics_file.write({"step": position, "heldout": figures})
                progress.say(describe_figures(position, figures))
                window.restart_clock()
            if position % config.save_every == 0 or position == n_steps:
                save(workdir, config, draft, target, state, figures)
                saved = position
                window.restart_clock()
        reason = stop.reason
        if position > saved:
            save(workdir, config, draft, target, state, figures)
    progress.close()
    metrics_file.close()
    if position < n_steps:
        say(f"stopped by {reason} after {position}/{n_steps}; the same command goes on from there")
    say(f"the head is {workdir / 'heads' / str(position)}")
    return 0


def open_run(
    workdir: Path, config: TrainConfig, target: LoadedTarget, corpus: Corpus
) -> DraftConfig:
    """Returns the draft to train, of the run in `workdir` where there is one, and records it."""
    fresh = config.draft_config(target.config, None, target.sha256)
    if has_checkpoint(workdir / "checkpoints"):
        draft, notes = read_draft(workdir, config, fresh, corpus.sha256)
        for note in notes:
            say(f"note: {note}")
    else:
        draft = fresh
        if config.draft_vocab_size is not None:
            ids, mass = count_draft_ids(
                corpus.rows, config.draft_vocab_size, target.config.vocab_size, target.stop_ids
            )
            say(f"{len(ids)} draft ids cover {mass:.2%} of the scored training ids")
            draft = config.draft_config(target.config, ids, target.sha256)
    check_pair(target.config, draft)
    write_record(workdir, config, draft, corpus.sha256)
    return draft


def check_finite(metrics: dict[str, Any], position: int) -> None:
    """Raises ConfigError where the loss or the gradient is not a number any more."""
    if not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])):
        raise ConfigError(
            f"batch {position}: loss {metrics['loss']}, gradient norm {metrics['grad_norm']}; "
            "lower lr and resume from the last checkpoint"
        )


def save(
    workdir: Path,
    config: TrainConfig,
    draft: DraftConfig,
    target: LoadedTarget,
    state: TrainState,
    figures: dict[str, Any] | None,
) -> None:
    """Writes a checkpoint and the head directory beside it."""
    save_state(workdir / "checkpoints", state, config.keep)
    heads = workdir / "heads"
    save_run_head(heads, state.position, config, draft, target.config, state.params, figures)


def describe_figures(position: int, figures: dict[str, Any]) -> str:
    """Returns the held-out figures in one line."""
    parts = [
        f"{group}: loss {r['loss']:.3f}, agrees with target {r['agree_target']:.3f}, with text "
        f"{r['agree_text']:.3f} (lookup {r['lookup']:.3f})"
        for group, r in figures.items()
    ]
    return f"held out at {position}  " + "; ".join(parts)


if __name__ == "__main__":
    run(main)
