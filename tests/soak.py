"""Thousands of requests in one process, run by hand.

    python -m tests.soak --requests 2000

Batches of random sizes, lengths, temperatures, filters, verifiers, stop ids and chunks go through
one random target; each result is compared with that of its request alone, and its greedy or coupled
text with `generate`. After a warm-up nothing may be compiled, and memory may not grow.
"""

import argparse
import dataclasses
import gc
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=9")

import jax
import numpy as np

import spd_jax
from spd_jax.config import SamplingConfig
from spd_jax.models import reference
from spd_jax.pipeline import programs
from tests.expected import Comparison, expected_cycles
from tests.pipeline.conftest import MESHES
from tests.random_models import full_config, make_draft, make_prompt, make_target

N, LAYERS, MAX_NEW, LONGEST = 3, 4, 60, 60
BATCHES = (1, 2, 3, 4)
STOPS = (0, 1, 3, 4)
MIB = 1 << 20
PROGRAMS = (programs.PREFILL, programs.CHUNK, programs.COMPACT, reference.start_ar,
            reference.continue_ar)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Asked:
    """One request: a batch and its settings."""

    prompts: list[list[int]]
    seeds: list[int]
    options: dict  # of decode and generate
    chunk_cycles: int
    mode: str


def random_request(rng: np.random.Generator) -> Asked:
    """Draws everything that a caller may vary."""
    n = int(rng.choice(BATCHES))
    lens = rng.integers(1, LONGEST, size=n)
    temperature = float(rng.choice([0.0, 0.0, rng.uniform(0.2, 1.5)]))
    sampling = SamplingConfig(
        temperature,
        top_k=int(rng.choice([0, 0, rng.integers(1, 30)])),
        top_p=float(rng.choice([1.0, 1.0, rng.uniform(0.3, 1.0)])),
        verifier=str(rng.choice(["rejection", "coupled"])),
    )
    stops = rng.integers(1, 97, size=rng.choice(STOPS)).tolist()
    return Asked(
        [make_prompt(int(length), seed=int(rng.integers(1000))) for length in lens],
        rng.integers(2**40, size=n).tolist(),
        {"max_new_tokens": int(rng.integers(1, MAX_NEW)), "sampling": sampling, "stop_ids": stops},
        int(rng.integers(1, 50)),
        str(rng.choice([*MESHES])),
    )


def n_compiled() -> int:
    """How many programs this process has compiled."""
    return sum(program.n_compiled for program in PROGRAMS)


def resident_mib() -> float:
    """MiB of memory that the process holds."""
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS"))) / 1024


class Soak:
    """A target, a draft module that is right about half of the time, and what was found."""

    def __init__(self):
        self.target = make_target(LAYERS, seed=N)
        self.draft = make_draft(self.target, full_config(LAYERS, N), "even")
        self.comparison, self.faults, self.n_sequences = Comparison(), [], 0

    def decode(self, asked: Asked, prompts: list[list[int]], seeds: list[int]) -> list:
        options = asked.options | {"chunk_cycles": asked.chunk_cycles, "mesh": MESHES[asked.mode]}
        return spd_jax.decode(self.target, self.draft, prompts, seed=seeds, **options)

    def check(self, asked: Asked) -> None:
        """Decodes a request, and its sequences alone."""
        sampling = asked.options["sampling"]
        for b, result in enumerate(self.decode(asked, asked.prompts, asked.seeds)):
            self.n_sequences += 1
            prompt, seed = asked.prompts[b : b + 1], asked.seeds[b : b + 1]
            (alone,) = self.decode(asked, prompt, seed)
            texts = [(result.tokens, alone.tokens)]
            if sampling.temperature == 0 or sampling.verifier == "coupled":
                (plain,) = spd_jax.generate(self.target, prompt, seed=seed, **asked.options)
                texts.append((result.tokens, plain.tokens))
            for got, want in texts:
                self.comparison.add(self.target, prompt[0], got, want, sampling, seed[0])
            if result.cycles != expected_cycles(N, result.accepted):
                self.faults.append(f"{result.cycles} cycles for {result.accepted}")


def main() -> int:
    """Runs the soak; returns 1 where anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--warm-up", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    soak, rng, began = Soak(), np.random.default_rng(args.seed), time.perf_counter()
    memory: list[float] = []
    for i in range(args.warm_up + args.requests):
        if i == args.warm_up:
            compiled = n_compiled()
        soak.check(random_request(rng))
        if i >= args.warm_up and (i - args.warm_up) % 100 == 0:
            memory.append(resident_mib())
            arrays = sum(x.nbytes for x in jax.live_arrays()) / MIB
            print(
                f"{i - args.warm_up} requests, {soak.n_sequences} sequences, "
                f"{time.perf_counter() - began:.0f} s: {memory[-1]:.0f} MiB, "
                f"{arrays:.1f} of arrays, {n_compiled() - compiled} compiled since the warm-up",
                file=sys.stderr, flush=True,
            )  # fmt: skip
    grown, late = memory[-1] - memory[len(memory) // 2], n_compiled() - compiled
    near = [f"{gap:.1e}" for gap in soak.comparison.gaps]
    print(
        f"{args.requests} requests after {args.warm_up}: {soak.n_sequences} sequences, parted at "
        f"gaps of {', '.join(near) or 'none'}; {late} programs compiled late; memory "
        f"{memory[0]:.0f} to {memory[-1]:.0f} MiB, {grown:+.0f} in the second half"
    )
    for fault in soak.faults:
        print(f"FAULT {fault}")
    fine = soak.comparison.is_fair and not soak.faults and late == 0
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
