"""Kills a training run again and again: what it ends with is what a run never killed ends with.

    python -m tests.kill_and_resume --kills 20

Starts train.pdm on the tiny target, sends SIGKILL at moments drawn from --seed (by turns between
updates, in the midst of a save, and anywhere from its start on), starts it again until it is done,
and compares bytes: parameters, moments, average, notes, heads, best.json and metrics.jsonl (its
clocks aside). A run that ends before all kills are spent is followed by another.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
from orbax.checkpoint import v1 as ocp

ROOT = Path(__file__).parent.parent
CLOCKS = ("tokens_per_second", "scored_per_second", "seconds_per_step", "seconds")
KINDS = ("step", "save", "start")  # of kills, in turn
N_STEPS = 48
FLAGS = ["--config", "tiny_n4", "--sequence-len", "32", "--batch-tokens", "128"]
FLAGS += ["--state-cache", "True", "--seed", "3"]
FLAGS += ["--accumulate", "2", "--ema", "0.9", "--weight-decay", "0.01"]
FLAGS += ["--log-every", "5", "--save-every", "3", "--eval-every", "8", "--steps", str(N_STEPS)]


def main() -> int:
    """Reads the flags, runs, prints the figures; the exit code is 1 where bytes differ."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kill-and-resume-") as work:
        return kill_and_resume(Path(work), flags.kills, flags.seed)


def kill_and_resume(work: Path, n_kills: int, seed: int) -> int:
    """Spends the kills on runs below `work`; returns 0 where each ends as the one not killed."""
    rng = random.Random(seed)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(work / "compiled"))
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    write_rows(work / "rows.jsonl")
    whole = work / "whole"
    run_to_the_end(work, whole, environment)
    want = contents(whole)
    began = time.monotonic()
    run_to_the_end(work, work / "again", environment)  # all is compiled: how long does one take?
    seconds = time.monotonic() - began
    if differences(want, contents(work / "again")):
        raise SystemExit("two runs that were never killed differ: nothing can be compared")

    kinds, left, n_runs = Counter(), n_kills, 0
    while left:
        workdir, n_runs = work / "killed", n_runs + 1
        done = False
        while not done:
            process = start(work, workdir, environment)
            if left:
                kind = KINDS[(n_kills - left) % len(KINDS)]
                if wait_for(kind, process, workdir, rng, seconds):
                    process.kill()
                    kinds[kind], left = kinds[kind] + 1, left - 1
            code = process.wait()
            done = code == 0
            if code not in (0, -9):
                raise SystemExit(f"a run ended with code {code}: {(work / 'log').read_text()}")
        different = differences(want, contents(workdir))
        if different:
            print(f"run {n_runs} differs after {sum(kinds.values())} kills: {different[:5]}")
            return 1
        shutil.rmtree(workdir)
    kills = ", ".join(f"{count} at a {kind}" for kind, count in sorted(kinds.items()))
    print(
        f"{n_kills} kills ({kills}) in {n_runs} runs of {N_STEPS} updates: each ended with the "
        f"bytes of a run never killed ({len(want)} files and arrays compared)"
    )
    return 0


def write_rows(path: Path) -> None:
    """Writes training rows of random letters."""
    rng = random.Random(1)
    lens = [20 + i % 12 for i in range(18)]
    rows = [
        {
            "input_ids": [rng.randrange(97, 123) for _ in range(n)],
            "loss_mask": [0] * 5 + [1] * (n - 5),
            "temperature": 0.7,
        }
        for n in lens
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def start(work: Path, workdir: Path, environment: dict[str, str]) -> subprocess.Popen:
    """Starts the run, or goes on with it; its words go to work/log."""
    rows = str(work / "rows.jsonl")
    flags = [*FLAGS, "--train-data", rows, "--heldout-data", rows, "--workdir", str(workdir)]
    with open(work / "log", "w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "train.pdm", *flags], stderr=log, cwd=ROOT, env=environment
        )


def run_to_the_end(work: Path, workdir: Path, environment: dict[str, str]) -> None:
    """Runs without a kill."""
    code = start(work, workdir, environment).wait()
    if code or not (workdir / "checkpoints" / str(N_STEPS)).is_dir():
        raise SystemExit(f"a run ended with code {code}: {(work / 'log').read_text()}")


def wait_for(
    kind: str, process: subprocess.Popen, workdir: Path, rng: random.Random, seconds: float
) -> bool:
    """Waits for a moment of a kind; False where the run was over before it came.

    "start": anywhere in the time that a whole run takes; "step": at some time after the first
    updates of this process; "save": while a head or a checkpoint is half written, or one that is
    kept no longer half removed.
    """
    if kind == "start":
        return not _ends_within(process, rng.uniform(0, seconds))
    begun = time.time()
    log = workdir / "metrics.jsonl"
    while not (log.exists() and log.stat().st_mtime > begun):
        if _ends_within(process, 0.002):
            return False
    if kind == "step":
        return not _ends_within(process, rng.uniform(0, 0.2))
    name = rng.choice((".*.new-*", ".*.old", "*orbax-checkpoint-tmp*"))
    while not any(workdir.glob(f"*/{name}")):
        if process.poll() is not None:
            return False
    time.sleep(rng.uniform(0, 0.02))
    return process.poll() is None


def _ends_within(process: subprocess.Popen, seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def contents(workdir: Path) -> dict[str, bytes | str]:
    """Returns everything that a run leaves, by name."""
    found: dict[str, bytes | str] = {"best.json": (workdir / "best.json").read_bytes()}
    for path in sorted((workdir / "heads").rglob("*")):
        if path.is_file():  # a card tells the command, which names the folder
            content = path.read_bytes().replace(str(workdir).encode(), b"workdir")
            found[str(path.relative_to(workdir))] = content
    for path in sorted((workdir / "checkpoints").iterdir()):
        notes = ocp.metadata(path).custom_metadata["notes"]
        found[f"checkpoints/{path.name} notes"] = json.dumps(_without_clocks(notes))
        _flatten(f"checkpoints/{path.name}", ocp.load(path), found)
    for i, line in enumerate((workdir / "metrics.jsonl").read_text().splitlines()):
        found[f"metrics.jsonl:{i}"] = json.dumps(_without_clocks(json.loads(line)))
    return found


def differences(want: dict[str, bytes | str], got: dict[str, bytes | str]) -> list[str]:
    """Returns the names of what is not the same."""
    return sorted(name for name in want.keys() | got.keys() if want.get(name) != got.get(name))


def _flatten(name: str, tree: object, found: dict[str, bytes | str]) -> None:
    """Adds the bytes of each array of a tree."""
    if isinstance(tree, dict):
        for key, below in tree.items():
            _flatten(f"{name}/{key}", below, found)
    elif isinstance(tree, list | tuple):
        for i, below in enumerate(tree):
            _flatten(f"{name}/{i}", below, found)
    elif tree is not None:
        array = np.asarray(tree)
        found[name] = repr((array.shape, str(array.dtype))).encode() + array.tobytes()


def _without_clocks(value: object) -> object:
    if not isinstance(value, dict):
        return value
    return {k: _without_clocks(v) for k, v in value.items() if k not in CLOCKS}


if __name__ == "__main__":
    sys.exit(main())
