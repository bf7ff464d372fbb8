"""Measures a draft head on files of prompts: acceptance, losslessness, and the lookup baseline.

    python -m infer.evaluate --prompts infer/prompts.jsonl --max-new-tokens 128 --json out.json

Each line of a file is {"turns": [...]}; the first turn is the prompt. Definitions: `--help`.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import track

import spd_jax
from infer.agreement import compare_tokens, first_difference
from infer.figures import Sample, set_figures, table_rows
from infer.report import print_figures
from infer.startup import SamplingFlags, Subject, load_subject, start_devices
from infer.teacher_forcing import draft_agreement
from spd_jax.checks import ConfigError
from spd_jax.commandline import parse_flags, run, say
from spd_jax.ops.lookup import lookup_hits
from spd_jax.prompts import PromptRow, checked_prompt_ids, read_prompts
from spd_jax.weights.files import check_writable, write_json


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateFlags(SamplingFlags):
    """Measure a draft head on files of prompts.

    alpha: accepted / verified drafts of decoding, greedy unless --temperature is given; every new
    token but the first is one verified draft. Expected alpha, of the rejection verifier: the mean
    of sum(min(p, q)) over the same drafts. Lookup: what a 2-gram lookup in prompt and text would
    have got right at the same positions. tau: stages x tokens / cycles. Sampled rows: text drawn
    from the target at --sampled-temperature; the share of its tokens (but the first) that the
    draft's best guess names, fed the true text, averaged over fills 1..N; lookup is scored on the
    same tokens. bfloat16 match: tokens before the first difference between greedy decoding in
    bfloat16 and in float32, over all float32 tokens.
    """

    prompts: tuple[str, ...]
    """JSONL files with `turns`."""
    target: str = "smollm2-135m"
    """As in infer.decode."""
    draft: str | None = None
    """As in infer.decode."""
    max_new_tokens: int = 128
    """New tokens per prompt at most."""
    n_stages: int | None = None
    """Pipeline stages. None: as many as the draft head was trained for."""
    stage_layers: str | None = None
    """Layers of each stage, like 6,6,6,6,6. None: as even as possible."""
    mesh: Literal["auto", "virtual"] = "auto"
    """auto: one device per stage where there are enough; virtual: all stages on one device."""
    placement: Literal["auto", "dedicated", "virtual"] = "auto"
    """As in infer.decode."""
    cpu_devices: int | None = None
    """Split the CPU into this many virtual devices."""
    thinking: bool | None = None
    """As in infer.decode."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype that the target and the draft run in; bfloat16 match is for float32 only."""
    limit: int | None = None
    """Read only the first so many prompts of each file."""
    batch_size: int = 8
    """Prompts decoded together."""
    seed: int = 0
    """Seed of sampled text: prompt i draws from seed + i."""
    sampled_temperature: float = 0.7
    """Temperature of the sampled rows; 0 leaves them out."""
    skip_generate: bool = False
    """Do not compare with autoregressive decoding (leaves out bfloat16 too)."""
    skip_bf16: bool = False
    """Do not measure the float32-to-bfloat16 token match."""
    json: Path | None = None
    """Write the figures to this file, per set, pooled and per prompt."""


def evaluate_batch(
    flags: EvaluateFlags,
    subject: Subject,
    bf16_target: Any,
    rows: Sequence[PromptRow],
    prompts: list[list[int]],
    first_seed: int,
) -> Iterator[Sample]:
    """Decodes one batch in every way asked for; yields the counts of each prompt, in order."""
    limit = {"max_new_tokens": flags.max_new_tokens}
    drawn = {"sampling": flags.sampling, "seed": first_seed}
    decoded = spd_jax.decode(
        subject.target, subject.draft, prompts, **drawn, **limit, **subject.decode_settings
    )
    plain = bf16 = sampled = [None] * len(rows)
    if not flags.skip_generate:
        plain = spd_jax.generate(subject.target, prompts, **drawn, **limit)
    if bf16_target is not None:
        bf16 = spd_jax.generate(bf16_target, prompts, **drawn, **limit)
    if flags.sampled_temperature:
        sampling = spd_jax.SamplingConfig(temperature=flags.sampled_temperature)
        sampled = spd_jax.generate(
            subject.target, prompts, sampling=sampling, seed=first_seed, **limit
        )

    for i, (row, prompt, result, ar, low, text) in enumerate(
        zip(rows, prompts, decoded, plain, bf16, sampled, strict=True)
    ):
        sample = Sample(
            path=row.path,
            line=row.line,
            tokens=len(result.tokens),
            cycles=int(result.cycles),
            verified=len(result.tokens) - 1,
            accepted=sum(map(bool, result.accepted[1:])),
            lookup_hits=sum(lookup_hits(prompt, result.tokens)),
            tau=result.stats.tau,
        )
        if result.stats.expected_alpha is not None:
            sample.expected = result.stats.expected_alpha * sample.verified
        if ar is not None:
            agreement = compare_tokens(
                subject.target, prompt, result.tokens, ar.tokens, flags.sampling, first_seed + i
            )
            sample.identical, sample.gap = agreement.identical, agreement.gap
            sample.is_rounding = agreement.is_rounding
        if ar is not None and low is not None:
            first = first_difference(ar.tokens, low.tokens)
            sample.bf16_total = len(ar.tokens)
            sample.bf16_matched = len(ar.tokens) if first is None else first
        if text is not None:
            sample.sampled_positions = len(text.tokens) - 1
            sample.sampled_lookup_hits = sum(lookup_hits(prompt, text.tokens))
            sample.sampled_agreed = draft_agreement(
                subject.target,
                subject.draft,
                prompt,
                text.tokens,
                subject.n_stages,
                subject.decode_settings["stage_layers"],
            )
        yield sample


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code: 1 where a difference is not a rounding one."""
    flags = parse_flags(EvaluateFlags, "python -m infer.evaluate", argv)
    if not flags.skip_generate:
        flags.check_comparable("comparing with generate (--skip-generate leaves it out)")
    start_devices(flags.cpu_devices)
    for name in ("max_new_tokens", "batch_size", "limit"):
        value = getattr(flags, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if not 0 <= flags.sampled_temperature < math.inf:
        raise ConfigError(
            f"--sampled-temperature must be a number >= 0, got {flags.sampled_temperature}"
        )
    if flags.json is not None:
        check_writable(flags.json)
    paths = list(dict.fromkeys(flags.prompts))
    if not paths:
        raise ConfigError("--prompts needs at least one JSONL file, got none")
    rows = [row for path in paths for row in read_prompts(path, flags.limit)]
    subject, bf16_target = load_subject(flags), None
    if flags.dtype == "float32" and not (flags.skip_bf16 or flags.skip_generate):
        bf16_target = spd_jax.load_target(flags.target, dtype="bfloat16")
    named = [(f"{row.path}:{row.line}", row.text) for row in rows]
    prompts = checked_prompt_ids(subject.target, flags.target, named, flags.max_new_tokens)

    samples = []
    starts = range(0, len(rows), flags.batch_size)
    for start in track(starts, "evaluating", console=Console(stderr=True)):
        batch = slice(start, start + flags.batch_size)
        samples += evaluate_batch(
            flags, subject, bf16_target, rows[batch], prompts[batch], flags.seed + start
        )

    sets = {
        path: set_figures([s for s in samples if s.path == path], subject.n_stages)
        for path in paths
    }
    pooled = set_figures(samples, subject.n_stages)
    names = column_names(paths)
    columns = {names[path]: table_rows(figures) for path, figures in sets.items()}
    print_figures({**columns, "pooled": table_rows(pooled)}, sys.stdout)
    if flags.json:
        record = {
            "settings": dataclasses.asdict(flags) | {"json": str(flags.json)},
            "sets": sets,
            "pooled": pooled,
            "samples": [dataclasses.asdict(sample) for sample in samples],
        }
        write_json(flags.json, record)
        say(f"wrote {flags.json}")
    return 1 if pooled["other_differences"] else 0


def column_names(paths: Sequence[str]) -> dict[str, str]:
    """Returns a short name for each file: its own, else its folder's, else the whole path."""
    for short in (lambda p: Path(p).stem, lambda p: Path(p).parent.name):
        names = {path: short(path) for path in paths}
        if all(names.values()) and len({*names.values(), "pooled"}) == len(names) + 1:
            return names
    return {path: path for path in paths}


if __name__ == "__main__":
    run(main)
