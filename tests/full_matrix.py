"""The full lossless matrix, run by hand; tests/pipeline/test_lossless.py is its covering subset.

    python -m tests.full_matrix --decodes 2000         # random tiny targets: so many of all
    python -m tests.full_matrix                        # all 16,032
    python -m tests.full_matrix --target smollm2-135m  # the real model with the shipped head

Every decode is compared with `generate`, token for token, and its cycles with its flags.
"""

import argparse
import collections
import itertools
import math
import os
import random
import sys
import time

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=9")

import spd_jax
from spd_jax.prompts import read_prompts
from tests.expected import GAP, Comparison, expected_cycles
from tests.pipeline.test_lossless import BATCH, CHUNKS, LIMITS, MESHES, STAGES, layers_for
from tests.random_models import KINDS, full_config, make_draft, make_prompt, make_target

SMOLLM2_STAGES = (2, 3, 5, 6, 10)


class Tally:
    """Counts decodes and what differed."""

    def __init__(self):
        self.comparison = Comparison()
        self.counts = collections.Counter()
        self.faults: list[str] = []

    def check(self, target, prompt, result, want, n_stages, group: str) -> None:
        """Compares one decoded sequence with the oracle's tokens."""
        self.counts[group] += 1
        gap = self.comparison.add(target, prompt, result.tokens, want)
        if gap is not None and not gap < GAP:
            self.faults.append(f"{group}: {result.tokens} for {want}, gap {gap}")
        if result.cycles != expected_cycles(n_stages, result.accepted):
            self.faults.append(f"{group}: {result.cycles} cycles for flags {result.accepted}")

    def report(self, seconds: float) -> int:
        """Prints the table; returns the exit code."""
        for group, count in sorted(self.counts.items()):
            print(f"{group:<28} {count:>6} decodes")
        near = [f"{gap:.1e}" for gap in self.comparison.gaps]
        print(f"{sum(self.counts.values())} decodes in {seconds:.0f} s")
        print(f"{len(near)} differ from generate, at gaps of {', '.join(near) or 'none'}")
        for fault in self.faults:
            print(f"FAULT {fault}")
        return 1 if self.faults or not self.comparison.is_fair else 0


def tiny_cases(n: int, share: float) -> list[tuple]:
    """Settings at N stages: mode, drafter, prompt lengths, limit, chunk size; a share of all."""
    lens = range(1, 2 * n + 2)
    batches = [tuple((b + i) % (2 * n + 1) + 1 for i in range(BATCH)) for b in lens[::BATCH]]
    groups = [(length,) for length in lens] + batches
    cases = list(itertools.product(MESHES, KINDS, groups, LIMITS, CHUNKS))
    random.Random(n).shuffle(cases)
    wanted = math.ceil(share * sum(len(case[2]) for case in cases))
    counts = itertools.accumulate(len(case[2]) for case in cases)
    n_cases = next(i for i, count in enumerate(counts, start=1) if count >= wanted)
    return sorted(cases[:n_cases], key=lambda case: (case[0], len(case[2])))  # program by program


def n_tiny(n: int) -> int:
    """Sequences in all settings at N stages."""
    return sum(len(case[2]) for case in tiny_cases(n, 1))


def run_tiny(tally: Tally, stages: list[int], n_decodes: int | None) -> None:
    """Decodes on random targets, at least n_decodes sequences or all."""
    share = min(1, n_decodes / sum(map(n_tiny, stages))) if n_decodes else 1
    for n in stages:
        target = make_target(layers_for(n), seed=n)
        prompts = {length: make_prompt(length) for length in range(1, 2 * n + 2)}
        oracle = spd_jax.generate(target, [*prompts.values()], max_new_tokens=40, stop_ids=())
        texts = dict(zip(prompts, (r.tokens for r in oracle), strict=True))
        config = full_config(target.config.n_layers, n)
        for mode, kind, lens, limit, chunk in tiny_cases(n, share):
            results = spd_jax.decode(
                target,
                make_draft(target, config, kind),
                [prompts[length] for length in lens],
                max_new_tokens=limit,
                stop_ids=(),
                mesh=MESHES[mode],
                chunk_cycles=chunk,
            )
            for length, result in zip(lens, results, strict=True):
                assert result.stats.mode == mode
                group = f"N={n} {mode} batch of {len(lens)}"
                tally.check(target, prompts[length], result, texts[length][:limit], n, group)
        print(f"N={n}: {sum(tally.counts.values())} decodes so far", file=sys.stderr, flush=True)


def run_smollm2(tally: Tally, stages: list[int], paths: list[str], limit: int, n_new: int) -> None:
    """Decodes prompts of files with the shipped head, alone and as batches of five."""
    target = spd_jax.load_target("smollm2-135m")
    draft = spd_jax.load_draft(None, target)
    rows = [row for path in paths for row in read_prompts(path, limit)]
    prompts = [target.tokenizer.encode_chat(row.text) for row in rows]
    texts = [r.tokens for r in spd_jax.generate(target, prompts, max_new_tokens=n_new)]
    for n in stages:
        for size in (1, BATCH):
            for start in range(0, len(prompts), size):
                batch = slice(start, start + size)
                results = spd_jax.decode(
                    target, draft, prompts[batch], max_new_tokens=n_new, n_stages=n, mesh="virtual"
                )
                for prompt, result, want in zip(prompts[batch], results, texts[batch], strict=True):
                    tally.check(target, prompt, result, want, n, f"N={n} virtual batch of {size}")
        print(f"N={n} done", file=sys.stderr, flush=True)


def main() -> int:
    """Runs the matrix; returns 1 where a decode differs by more than rounding."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=("tiny", "smollm2-135m"), default="tiny")
    parser.add_argument("--decodes", type=int, help="of random targets, at least; default: all")
    parser.add_argument("--stages", type=int, nargs="+", help="N to run; default: all")
    parser.add_argument("--prompts", nargs="+", default=["infer/prompts.jsonl"])
    parser.add_argument("--limit", type=int, default=5, help="prompts per file")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    args = parser.parse_args()
    tally, began = Tally(), time.perf_counter()
    if args.target == "tiny":
        run_tiny(tally, args.stages or list(STAGES), args.decodes)
    else:
        stages = args.stages or list(SMOLLM2_STAGES)
        run_smollm2(tally, stages, args.prompts, args.limit, args.max_new_tokens)
    return tally.report(time.perf_counter() - began)


if __name__ == "__main__":
    sys.exit(main())
