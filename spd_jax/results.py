"""What decoding returns: the text and the figures of one sequence."""

from __future__ import annotations

import dataclasses


def ratio(numerator: float, denominator: float) -> float | None:
    """Returns a rate; None where it would divide by zero."""
    return numerator / denominator if denominator else None


@dataclasses.dataclass(frozen=True)
class DecodeStats:
    """Figures of one decoded sequence; a rate is None where it would divide by zero."""

    alpha: float | None  # accepted / verified drafts
    expected_alpha: float | None  # mean of sum(min(p, q)) over them, of rejection sampling only
    tokens_per_cycle: float | None  # N_new / cycles
    tau: float | None  # equivalent accept length = N * N_new / cycles = speedup S0
    speedup: float | None  # S = S0 * L / (L + D * L_s), D = 0: the draft runs beside the stages
    rejects: int | None  # drafts the verifier replaced
    prefill_seconds: float  # of the batch this sequence was part of
    decode_seconds: float  # of the batch, compilation excluded
    tokens_per_second: float | None  # this sequence's tokens after the first / decode_seconds
    mode: str  # "sharded" | "virtual"
    placement: str  # "dedicated" | "virtual"
    devices: int


@dataclasses.dataclass(frozen=True)
class DecodeResult:
    """One decoded sequence."""

    tokens: list[int]  # new ids; the stop token, where one ended it, is the last
    accepted: list[bool] | None  # per token: the first and accepted drafts True; None for AR
    cycles: int | None  # pipeline cycles; None for AR
    text: str | None  # None without a tokenizer
    finish_reason: str  # "stop" | "length"
    stats: DecodeStats


def make_stats(
    tokens: list[int],
    accepted: list[bool] | None,
    overlap: float | None,
    cycles: int | None,
    n_stages: int | None,
    prefill_seconds: float,
    decode_seconds: float,
    mode: str,
    placement: str,
    devices: int,
) -> DecodeStats:
    """Derives the figures of one sequence (design: tau = N * N_new / cycles)."""
    after_first = len(tokens) - 1
    rejects = None if accepted is None else accepted.count(False)
    tau = None if cycles is None else ratio(n_stages * len(tokens), cycles)
    return DecodeStats(
        alpha=None if accepted is None else ratio(after_first - rejects, after_first),
        expected_alpha=None if overlap is None else ratio(overlap, after_first),
        tokens_per_cycle=None if cycles is None else ratio(len(tokens), cycles),
        tau=tau,
        speedup=tau,
        rejects=rejects,
        prefill_seconds=prefill_seconds,
        decode_seconds=decode_seconds,
        tokens_per_second=ratio(after_first, decode_seconds),
        mode=mode,
        placement=placement,
        devices=devices,
    )
