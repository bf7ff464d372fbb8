"""Measures decoding: parts of a cycle, whole cycles, and text, against autoregressive decoding.

    python -m infer.bench                                    # SmolLM2; virtual mode
    python -m infer.bench --cpu-devices 6 --json bench.json --png bench.png
    python -m infer.bench --target tiny --reps 3             # no download
    python -m infer.bench --hf                               # HF transformers on torch beside it

All of it in one process, each figure a median over rounds in which everything is measured in turn.
Parts run in loops of their own on the device; one that fits into a cache is read from there.
"""

from __future__ import annotations

import dataclasses
import os
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
from rich.console import Console

from infer import bench_report
from infer.agreement import compare_tokens
from infer.bandwidth import readers
from infer.bench_loops import ARLoops, EngineLoops
from infer.hf_peer import hf_loops
from infer.startup import Subject, load_subject, start_devices
from infer.timing import Figure, Once, interleave, once_of, timed
from spd_jax.checks import ConfigError
from spd_jax.commandline import parse_flags, run, say
from spd_jax.config import SamplingConfig
from spd_jax.engines import build_engine
from spd_jax.models.cache import bucket_capacity, read_len
from spd_jax.pipeline.loop import Committed
from spd_jax.pipeline.programs import Engine
from spd_jax.prompts import prompt_ids
from spd_jax.requests import make_request
from spd_jax.results import ratio
from spd_jax.weights.files import check_writable, replace_file, write_json

Mode = Literal["virtual", "sharded"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchFlags:
    """Measure decoding: parts of a cycle, whole cycles, and text, against autoregression."""

    prompt: str = "Explain in simple words how a pipeline of workers can build cars faster."
    """One user turn; the target's chat template is put around it."""
    target: str = "smollm2-135m"
    """As in infer.decode."""
    draft: str | None = None
    """As in infer.decode. How well it drafts plays no part."""
    n_stages: int | None = None
    """Pipeline stages. None: as many as the draft head was trained for."""
    stage_layers: str | None = None
    """Layers of each stage, like 6,6,6,6,6. None: as even as possible."""
    modes: tuple[Mode, ...] = ("virtual", "sharded")
    """What to measure; sharded where there is a device for each stage and one more."""
    cpu_devices: int | None = None
    """Split the CPU into this many virtual devices. They share its cores: times of the sharded
    mode are then no times of devices of their own."""
    thinking: bool | None = None
    """As in infer.decode."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype that the target and the draft run in."""
    max_new_tokens: int = 128
    """Tokens of the texts that are decoded, and the most steps of a loop."""
    synthetic_acceptance: tuple[float, ...] = (0.8,)
    """Texts are decoded with drafts that are right with this probability; the draft module and
    both heads run as always. Several: one after the other."""
    chunk_cycles: tuple[int, ...] = (32, 1024)
    """Cycles to a dispatch, for the texts."""
    capacities: tuple[int, ...] = ()
    """Cache capacities, beside what the text needs, to measure steps and cycles with too."""
    reps: int = 7
    """Rounds; of each figure the median is taken."""
    seconds: float = 0.3
    """About how long a loop is to take."""
    hf: bool = False
    """Measure the target in HF transformers on torch too, where that is installed."""
    seed: int = 0
    """Seed of which synthetic drafts are right, and of a random head."""
    json: Path | None = None
    """File for the figures."""
    png: Path | None = None
    """File for a chart of what a cycle is made of."""

    def __post_init__(self) -> None:
        least = {"max_new_tokens": 2, "reps": 1}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ConfigError(f"{name} must be at least {value}, got {getattr(self, name)}")
        if not self.seconds > 0:
            raise ConfigError(f"seconds must be above 0, got {self.seconds}")
        if not self.modes:
            raise ConfigError("modes must name virtual or sharded, got none")
        if not all(0 <= value <= 1 for value in self.synthetic_acceptance):
            raise ConfigError(
                "synthetic_acceptance must be probabilities from 0 to 1, got "
                f"{self.synthetic_acceptance}"
            )
        if any(n < 1 for n in self.chunk_cycles):
            raise ConfigError(f"chunk_cycles must be at least 1, got {self.chunk_cycles}")


def engines(flags: BenchFlags, subject: Subject) -> dict[str, Engine]:
    """Returns the engine of each mode that can run here, and says which cannot."""
    found, n_needed = {}, subject.n_stages + 1
    settings = (subject.n_stages, subject.decode_settings["stage_layers"])
    for mode in dict.fromkeys(flags.modes):
        if mode == "sharded" and len(jax.devices()) < n_needed:
            say(f"not sharded: that needs {n_needed} devices, here are {len(jax.devices())}")
            continue
        where = ("virtual", "auto") if mode == "virtual" else (None, "dedicated")
        found[mode] = build_engine(subject.target, subject.draft, *settings, *where)
    if not found:
        raise ConfigError(
            f"nothing to measure: sharded needs {n_needed} devices, here are "
            f"{len(jax.devices())}; add --modes virtual"
        )
    return found


class Bench:
    """Everything that is measured, by name, and the sizes that go with it."""

    def __init__(self, flags: BenchFlags, subject: Subject):
        self.flags, self.subject = flags, subject
        target = subject.target
        (prompt,) = prompt_ids(target, flags.target, [flags.prompt])
        self.prompt = prompt
        request = make_request(target, [prompt], flags.max_new_tokens, (), flags.seed)
        n_used = len(prompt) + flags.max_new_tokens + subject.n_stages
        self.capacity = bucket_capacity(n_used)
        self.n_read = read_len(n_used, self.capacity)
        for capacity in flags.capacities:
            if capacity <= n_used:
                raise ConfigError(f"capacities must be above the {n_used} used, got {capacity}")
        self.engines = engines(flags, subject)
        peers = hf_loops(flags.target, prompt) if flags.hf else {}
        self.measures: dict[str, Once] = {}

        say("compiling the autoregressive loop ...")
        loops = ARLoops(target, request, self.n_read, self.capacity)
        self.text = loops.text()
        self._add(bench_report.AR, loops.steps, flags.max_new_tokens - 1)
        for capacity in flags.capacities:
            loops = ARLoops(target, request, self.n_read, capacity)
            name = f"{bench_report.AR}, capacity {capacity}"
            self._add(name, loops.steps, flags.max_new_tokens - 1)
        self.loops: dict[str, EngineLoops] = {}
        for mode, engine in self.engines.items():
            say(f"compiling the parts of a {mode} cycle ...")
            args = (engine, target, request, self.text, self.n_read)
            self.loops[mode] = loops = EngineLoops(*args)
            self._add_parts(mode, loops)
            for capacity in flags.capacities:
                room = capacity - 1 - len(prompt) - subject.n_stages + 2
                roomy = EngineLoops(*args, room)
                self._add(f"{mode} full cycle, capacity {capacity}", roomy.cycles, loops.n_cycles)
        self.weights = bench_report.weight_bytes(subject.target, subject.draft)
        for name, reader in readers(self.weights[bench_report.AR]).items():
            self._add(f"{bench_report.READING}{name}", reader)
        for name, decode in peers.items():
            self._add(f"{bench_report.PEER}{name}", timed(decode), flags.max_new_tokens - 1)

    def _add(self, name: str, run: Any, most: int | None = None) -> None:
        self.measures[name] = once_of(run, self.flags.seconds, most)

    def _add_parts(self, mode: str, loops: EngineLoops) -> None:
        n = self.subject.n_stages
        parts: dict[str, dict[str, Any]] = {
            **{f"stage {rank}": {"part": "rank", "rank": rank} for rank in range(n)},
            "draft module": {"part": "rank", "rank": n},
            "heads": {"part": "heads"},
            "draft head": {"part": "heads", "fill": 1},
            "exchange": {"part": "exchange"},
            **{f"cycle, fill {f}": {"part": "cycle", "fill": f} for f in range(1, n + 1)},
        }
        for name, settings in parts.items():
            say(f"  {name}")
            self._add(f"{mode} {name}", loops.part(**settings))
        self._add(f"{mode} full cycle", loops.cycles, loops.n_cycles)

    def run(self) -> dict[str, Figure]:
        """Measures everything."""
        say(f"measuring {len(self.measures)} loops, {self.flags.reps} rounds ...")
        return interleave(self.measures, self.flags.reps)

    def decode_texts(self) -> list[dict[str, Any]]:
        """Decodes the text with synthetic drafts, by mode, acceptance and chunk, in turn."""
        cells = [
            (mode, acceptance, chunk)
            for mode in self.loops
            for acceptance in self.flags.synthetic_acceptance
            for chunk in self.flags.chunk_cycles
        ]
        runs: dict[tuple, tuple[float, Committed]] = {}
        measures: dict[str, Once] = {}
        for cell in cells:
            mode, acceptance, chunk = cell

            def once(cell=cell, mode=mode, acceptance=acceptance, chunk=chunk) -> float:
                runs[cell] = self.loops[mode].decode(acceptance, chunk)
                return runs[cell][0]

            once()  # compiles
            measures[str(cell)] = once
        say(f"decoding {len(cells)} texts, {self.flags.reps} rounds ...")
        figures = interleave(measures, self.flags.reps)
        return [self._text_record(cell, runs[cell], figures[str(cell)]) for cell in cells]

    def _text_record(
        self, cell: tuple[str, float, int], run: tuple[float, Committed], figure: Figure
    ) -> dict[str, Any]:
        (mode, acceptance, chunk), (_, sequence) = cell, run
        agreement = compare_tokens(
            self.subject.target,
            self.prompt,
            sequence.tokens,
            self.text,
            SamplingConfig(),
            self.flags.seed,
        )
        n_verified = len(sequence.tokens) - 1
        return {
            "mode": mode,
            "acceptance": acceptance,
            "alpha": sum(sequence.accepted[1:]) / n_verified,
            "chunk_cycles": chunk,
            "cycles": sequence.cycles,
            "seconds": dataclasses.asdict(figure),
            "tokens_per_second": ratio(n_verified, figure.seconds),
            "milliseconds_per_cycle": ratio(1000 * figure.seconds, sequence.cycles),
            "identical": agreement.identical,
            "is_rounding": agreement.is_rounding,
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    flags = parse_flags(BenchFlags, "python -m infer.bench", argv)
    start_devices(flags.cpu_devices)
    if flags.json is not None:
        check_writable(flags.json)
    if flags.png is not None:
        check_writable(flags.png, "--png")
    settings = {"mesh": "virtual", "placement": "auto"}
    subject = load_subject(types.SimpleNamespace(**vars(flags), **settings))
    bench = Bench(flags, subject)
    figures, texts = bench.run(), bench.decode_texts()
    record = {
        "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(flags).items()},
        "machine": {
            "device": str(jax.devices()[0].device_kind),
            "devices": len(jax.devices()),
            "cores": os.cpu_count(),
            "jax": jax.__version__,
        },
        **bench_report.summarise(figures, bench.weights, list(bench.engines), subject.n_stages),
        "texts": texts,
        "memory": bench_report.memory(bench.weights, list(bench.engines)),
        "figures": {name: dataclasses.asdict(figure) for name, figure in figures.items()},
    }
    bench_report.print_tables(record, Console(highlight=False, width=110))
    if flags.json is not None:
        write_json(flags.json, record)
        say(f"wrote {flags.json}")
    if flags.png is not None:
        replace_file(flags.png, bench_report.draw(record))
        say(f"wrote {flags.png}")
    return 0 if all(text["identical"] or text["is_rounding"] for text in texts) else 1


if __name__ == "__main__":
    run(main)
