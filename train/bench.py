"""Measures training: attention by depth against the dense mask, and whole steps.

    python -m train.bench                  # on SmolLM2; a table, and with --json a file
    python -m train.bench --target tiny --sizes 2x64 --attention-lens 64 128

Every figure is a median over steps of one process; tokens are random, all are scored, at fill N.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from spd_jax.checks import ConfigError
from spd_jax.commandline import parse_flags, run, say
from spd_jax.config import DraftConfig, PipelineConfig, TargetConfig
from spd_jax.models import draft as pdm
from spd_jax.models import visibility
from spd_jax.ops.attention import attend
from spd_jax.ops.depth_attention import attend_by_depth
from spd_jax.weights import load_target_files
from spd_jax.weights.files import check_writable, write_json
from train.config import TrainConfig
from train.optimizer import learning_rate, make_optimizer
from train.step import Sums, init_state, make_loss, make_train_step
from train.teacher import run_target

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class BenchConfig:
    """Measure attention of the draft's layers and whole training steps."""

    target: str = "smollm2-135m"
    """As in train.pdm."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Run dtype of target and draft."""
    n_stages: int = 5
    """Pipeline stages N."""
    n_types: int = 5
    """Row types M, at most N + 1: the embedding and the first M - 1 stage boundaries."""
    n_layers: int = 2
    """Decoder layers of the draft."""
    draft_vocab_sizes: tuple[int, ...] = (8192, 0)
    """Draft ids of the whole steps; 0 is the full vocabulary."""
    sizes: tuple[str, ...] = ("4x128", "2x256", "1x512", "1x1024")
    """Rows x tokens of the whole steps; () leaves them out."""
    attention_lens: tuple[int, ...] = (256, 512, 1024)
    """Tokens of the one row that attention is measured on; () leaves it out."""
    reps: int = 5
    """Timed repetitions of each, after one that compiles."""
    remat: bool = False
    """As in train.pdm."""
    json: Path | None = None
    """File for the figures."""

    def __post_init__(self) -> None:
        if self.reps < 1:
            raise ConfigError(f"reps must be at least 1, got {self.reps}")
        if not 1 <= self.n_types <= self.n_stages + 1:
            raise ConfigError(
                f"n_types must be from 1 to {self.n_stages + 1} (n_stages + 1), got {self.n_types}"
            )
        for size in self.sizes:
            parts = size.split("x")
            if len(parts) != 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
                raise ConfigError(f"sizes must look like 4x128 (rows x tokens), got {size!r}")
        if any(n < 2 for n in self.attention_lens):
            raise ConfigError("attention_lens must be 2 tokens or more")


@dataclasses.dataclass(frozen=True)
class Figures:
    """One measurement."""

    seconds: float  # median of a repetition
    spread: tuple[float, float]  # the fastest and the slowest
    temp_mib: float  # what XLA allocates beside arguments and results
    peak_mib: float  # highest resident memory of the process meanwhile


def measure(step: Callable[..., Any], state: Any, args: Sequence[Any], reps: int) -> Figures:
    """Compiles step(state, *args) -> state, which is donated, and runs it."""
    jax.clear_caches()  # programs of earlier measurements are not this one's memory
    compiled = jax.jit(step, donate_argnums=0).lower(state, *args).compile()
    state = jax.block_until_ready(compiled(state, *args))
    _forget_peak()
    seconds = []
    for _ in range(reps):
        began = time.perf_counter()
        state = jax.block_until_ready(compiled(state, *args))
        seconds.append(time.perf_counter() - began)
    memory = compiled.memory_analysis()
    return Figures(
        statistics.median(seconds),
        (min(seconds), max(seconds)),
        memory.temp_size_in_bytes / MIB,
        _peak_bytes() / MIB,
    )


def attention_steps(
    target: TargetConfig, draft: DraftConfig, n_tokens: int
) -> tuple[dict[str, Callable[..., Any]], list[jax.Array]]:
    """Returns the attention of all draft layers with its gradient, dense and by depth, and q, k, v.

    The first layers query with all row types, the last one with the newest.
    """
    pipeline, blocks = (
        PipelineConfig(target.n_layers, draft.n_stages),
        visibility.all_blocks(draft.anchors),
    )
    fill, config = draft.n_stages, pdm.layer_config(target, draft)
    seen, far_from = visibility.seen_blocks(pipeline, draft.anchors, fill, "exact", blocks)
    segments = jnp.ones((1, n_tokens), jnp.int32)

    def by_depth(q, k, v, newest):
        chosen = slice(-1, None) if newest else slice(None)
        return attend_by_depth(q, k, v, seen[chosen], far_from[chosen], segments)

    def dense(q, k, v, newest):
        mask = visibility.structural_mask(pipeline, draft.anchors, n_tokens, fill, "exact", blocks)
        mask = mask[None, -q.shape[1] :]
        return attend(q, k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3), mask)

    def all_layers(attend_rows, q, k, v):
        last = attend_rows(q[:, -n_tokens:], k, v, True)
        firsts = [attend_rows(q, k, v, False) for _ in range(draft.n_layers - 1)]
        return sum(jnp.sum(jnp.sin(out.astype(jnp.float32))) for out in (*firsts, last))

    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(
            rng.standard_normal((1, len(blocks) * n_tokens, heads, config.head_dim)), jnp.float32
        )
        for heads in (config.n_heads, config.n_kv_heads, config.n_kv_heads)
    )

    def step(attend_rows, grads, q, k, v):  # what was the state is overwritten
        return jax.grad(functools.partial(all_layers, attend_rows), argnums=(0, 1, 2))(q, k, v)

    steps = {
        name: functools.partial(step, attend_rows)
        for name, attend_rows in (("by depth", by_depth), ("dense", dense))
    }
    return steps, [q, k, v]


def whole_step(
    config: BenchConfig, target: TargetConfig, draft: DraftConfig, target_params: Any
) -> tuple[Callable[..., Any], Any]:
    """Returns (state, target_params, ids) -> state, and the first state, as the trainer has them.

    The target's pass, the draft's at fill N, its gradient and an AdamW update of float32 weights.
    """
    settings = TrainConfig()
    schedule = learning_rate(settings, 1000)
    optimizer = make_optimizer(settings, schedule)
    init = jax.jit(functools.partial(pdm.init_params, target, draft))
    params = init(target_params, jax.random.key(0))
    loss = jax.grad(make_loss(target, draft, remat=config.remat), has_aux=True)
    trainer = make_train_step(target, draft, optimizer, schedule, remat=config.remat)

    def step(state, target_params, ids):
        valid = jnp.ones_like(ids)
        states, best = run_target(target, draft, target_params, ids, valid, ids)
        batch = {"attention_mask": valid, "labels": ids, "states": states, "best": best}
        grads, counts = loss(state.params, target_params, batch, fill=draft.n_stages)
        one = jnp.ones((), jnp.int32)
        return trainer.update(state, Sums(grads, counts, draft.n_stages * one, one))[0]

    return step, init_state(params, optimizer, jax.random.key(1))


def bench_attention(config: BenchConfig, target: TargetConfig, draft: DraftConfig) -> list[dict]:
    """Measures attention at every length."""
    rows = []
    for n_tokens in config.attention_lens:
        steps, arrays = attention_steps(target, draft, n_tokens)
        for name, step in steps.items():
            figures = measure(step, tuple(map(jnp.zeros_like, arrays)), arrays, config.reps)
            rows.append({"tokens": n_tokens, "attention": name, **dataclasses.asdict(figures)})
    return rows


def bench_steps(
    config: BenchConfig, target: TargetConfig, draft: DraftConfig, target_params: Any
) -> list[dict]:
    """Measures whole steps at every size and draft vocabulary."""
    rows, rng = [], np.random.default_rng(0)
    sizes = (min(n, target.vocab_size) for n in config.draft_vocab_sizes)
    for n_ids in dict.fromkeys(0 if n == target.vocab_size else n for n in sizes):
        ids = tuple(np.sort(rng.permutation(target.vocab_size)[:n_ids]).tolist()) if n_ids else None
        with_ids = dataclasses.replace(draft, draft_ids=ids)
        for size in config.sizes:
            step, state = whole_step(config, target, with_ids, target_params)
            shape = tuple(map(int, size.split("x")))
            tokens = jnp.asarray(rng.integers(target.vocab_size, size=shape), jnp.int32)
            figures = measure(step, state, (target_params, tokens), config.reps)
            rate = tokens.size / figures.seconds
            rows.append(
                {
                    "draft_ids": n_ids or target.vocab_size,
                    "size": size,
                    "tokens_per_second": rate,
                    **dataclasses.asdict(figures),
                }
            )
            say(f"{n_ids or 'all'} draft ids, {size}: {rate:.0f} tokens a second")
    return rows


def print_table(title: str, rows: list[dict], console: Console) -> None:
    """Prints records of one form."""
    if not rows:
        return
    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*map(_shown, row.values()))
    console.print(table)


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " to ".join(f"{x:.3f}" for x in value)
    if isinstance(value, float):
        return f"{value:.3f}" if value < 10 else f"{value:.0f}"
    return str(value)


def _forget_peak() -> None:
    """Lets the kernel count the highest resident memory anew, without what is free (Linux)."""
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in status if line.startswith("VmHWM")))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    config = parse_flags(BenchConfig, "python -m train.bench", argv)
    if config.json is not None:
        check_writable(config.json)
    loaded = load_target_files(config.target, config.dtype)
    target = loaded.config
    starts = PipelineConfig(target.n_layers, config.n_stages).starts
    draft = DraftConfig(
        anchors=tuple(starts[: config.n_types]),
        n_stages=config.n_stages,
        n_layers=config.n_layers,
        qk_norm=target.qk_norm,
    )
    pdm.check_pair(target, draft)
    found = {
        "attention": bench_attention(config, target, draft),
        "steps": bench_steps(config, target, draft, loaded.place()) if config.sizes else [],
    }
    console = Console(highlight=False, width=120)
    print_table("whole steps: target, draft, gradient, update", found["steps"], console)
    title = "attention of all draft layers with its gradient, one row"
    print_table(title, found["attention"], console)
    if config.json is not None:
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(config).items()}
        found = {
            "config": settings,
            "jax": jax.__version__,
            "device": str(jax.devices()[0]),
            **found,
        }
        write_json(config.json, found)
    return 0


if __name__ == "__main__":
    run(main)
