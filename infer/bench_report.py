"""The figures of `infer.bench`: what is derived from the times, its tables and its chart."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from infer.timing import Figure
from spd_jax.models import draft as pdm
from spd_jax.models.bundle import Draft, Target
from spd_jax.results import ratio

MIB, GB = 1 << 20, 1e9
AR, READING, PEER = "autoregressive", "reading ", "HF on torch, "
COLOURS = {
    "stages": "C0",
    "slowest rank": "C0",
    "draft module": "C1",
    "heads": "C2",
    "exchange": "C3",
    "rest": "0.7",
}


def weight_bytes(target: Target, draft: Draft) -> dict[str, int]:
    """Bytes of weights: held, and read by an autoregressive step and by a full cycle.

    Of the embedding a step reads one row, unless it is the head too. Caches are not counted.
    """
    params = target.params
    head = params["embed" if target.config.tied_embeddings else "lm_head"]
    step = _n_bytes([params["layers"], params["final_norm"], head])
    rows = pdm.head_weight(draft.config, draft.params, params)
    module = _n_bytes([draft.params["projs"], draft.params["layers"]])
    return {
        "target": _n_bytes(params),
        "draft": _n_bytes(draft.params),
        AR: step,
        "cycle": step + module + _n_bytes(rows),
    }


def summarise(
    figures: Mapping[str, Figure], weights: Mapping[str, int], modes: Sequence[str], n_stages: int
) -> dict[str, Any]:
    """Derives rates, shares of the read bandwidth and overheads from the times."""
    reading = {
        name.removeprefix(READING): weights[AR] / figure.seconds / GB
        for name, figure in figures.items()
        if name.startswith(READING)
    }
    best = max(reading.values())
    step = figures[AR].seconds

    def rate(n_bytes: int, seconds: float) -> dict[str, float]:
        gb_per_second = n_bytes / seconds / GB
        return {
            "milliseconds": 1000 * seconds,
            "gb_read": n_bytes / GB,
            "gb_per_second": gb_per_second,
            "share_of_bandwidth": gb_per_second / best,
        }

    peers = {
        name.removeprefix(PEER): figure.seconds
        for name, figure in figures.items()
        if name.startswith(PEER)
    }
    found: dict[str, Any] = {
        "read_gb_per_second": reading,
        AR: {"tokens_per_second": 1 / step, **rate(weights[AR], step)},
        "hf": {
            "tokens_per_second": {name: 1 / seconds for name, seconds in peers.items()},
            "autoregressive_over_hf": ratio(min(peers.values()), step) if peers else None,
        },
        "capacities": {
            name: figure.seconds / figures[name.split(",")[0]].seconds
            for name, figure in figures.items()
            if ", capacity " in name
        },
        "modes": {},
    }
    for mode in modes:
        of = _of_mode(figures, mode)
        stages = [of[f"stage {s}"] for s in range(n_stages)]
        parts = breakdown(figures, mode, n_stages)
        full = of["full cycle"]
        found["modes"][mode] = {
            "full_cycle": rate(weights["cycle"], full),
            "cycle_milliseconds_by_fill": [
                1000 * of[f"cycle, fill {fill}"] for fill in range(1, n_stages + 1)
            ],
            "full_cycle_over_step_and_draft": full / (step + of["draft module"]),
            "fill_1_over_step_and_draft": of["cycle, fill 1"] / (step + of["draft module"]),
            "overhead": full / max(*stages, of["draft module"]),
            "over_sum_of_parts": full / (full - parts[-1]["rest"] / 1000),
            "breakdown_by_fill": parts,
        }
    return found


def breakdown(figures: Mapping[str, Figure], mode: str, n_stages: int) -> list[dict[str, float]]:
    """Milliseconds of the parts of a cycle at each fill from 1 to N; the rest is what is left.

    On one device the ranks work one after the other, on a mesh at once: then the part is that of
    the slowest. The target's head has work in a full pipeline alone.
    """
    of = {name: 1000 * seconds for name, seconds in _of_mode(figures, mode).items()}
    rows = []
    for fill in range(1, n_stages + 1):
        stages = [of[f"stage {s}"] for s in range(fill)]
        if mode == "virtual":
            parts = {"stages": sum(stages), "draft module": of["draft module"]}
        else:
            parts = {"slowest rank": max(*stages, of["draft module"])}
        parts["heads"] = of["heads" if fill == n_stages else "draft head"]
        parts["exchange"] = of["exchange"]
        whole = of[f"cycle, fill {fill}" if fill < n_stages else "full cycle"]
        rows.append({"fill": fill, **parts, "rest": whole - sum(parts.values())})
    return rows


def memory(weights: Mapping[str, int], modes: Sequence[str]) -> dict[str, Any]:
    """Bytes of weights as computed, of arrays as jax has them, and of the process (Linux)."""
    once = weights["target"] + weights["draft"]
    live = {x.unsafe_buffer_pointer(): x.nbytes for a in jax.live_arrays() for x in _buffers(a)}
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    resident = [1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS")]
    return {
        "weights_mib": once / MIB,
        "layouts_held": 1 + ("sharded" in modes),
        "arrays_mib": sum(live.values()) / MIB,
        "process_mib": resident[0] / MIB if resident else None,
    }


def print_tables(record: dict[str, Any], console: Console) -> None:
    """Prints what there is."""
    times = Table(title="milliseconds: median, fastest to slowest", title_justify="left")
    for name in ("", "median", "fastest", "slowest"):
        times.add_column(name, justify="right" if name else "left")
    for name, figure in record["figures"].items():
        times.add_row(name, *(f"{1000 * x:.3f}" for x in figure.values()))
    console.print(times)
    derived = Table(title="derived", title_justify="left", show_header=False)
    for name, value in _derived(record):
        derived.add_row(name, value)
    console.print(derived)
    texts = Table(title="texts with synthetic drafts", title_justify="left")
    for name in ("mode", "acceptance", "alpha", "chunk", "cycles", "ms a cycle", "tokens/s",
                 "x AR", "identical"):  # fmt: skip
        texts.add_column(name, justify="right")
    for text in record["texts"]:
        texts.add_row(
            text["mode"],
            f"{text['acceptance']:.2f}",
            f"{text['alpha']:.3f}",
            str(text["chunk_cycles"]),
            str(text["cycles"]),
            f"{text['milliseconds_per_cycle']:.3f}",
            f"{text['tokens_per_second']:.1f}",
            f"{text['tokens_per_second'] / record[AR]['tokens_per_second']:.2f}",
            "yes" if text["identical"] else "but for rounding" if text["is_rounding"] else "NO",
        )
    console.print(texts)


def _derived(record: dict[str, Any]) -> list[tuple[str, str]]:
    step, memory = record[AR], record["memory"]
    reading = ", ".join(f"{k} {v:.1f}" for k, v in record["read_gb_per_second"].items())
    rows = [
        ("read bandwidth, GB/s, of an array as large as the weights", reading),
        ("autoregressive tokens/s", f"{step['tokens_per_second']:.1f}"),
        ("  GB read a token; share of the best bandwidth", _share(step)),
    ]
    if record["hf"]["autoregressive_over_hf"] is not None:
        rates = record["hf"]["tokens_per_second"].items()
        rows += [
            ("HF on torch, tokens/s", ", ".join(f"{name}: {rate:.1f}" for name, rate in rates)),
            ("  autoregressive / the best of HF", f"{record['hf']['autoregressive_over_hf']:.2f}"),
        ]
    for mode, of in record["modes"].items():
        if mode == "virtual":
            rows.append((f"{mode}: GB read a full cycle; share", _share(of["full_cycle"])))
        over = of["full_cycle_over_step_and_draft"], of["fill_1_over_step_and_draft"]
        rows += [
            (f"{mode}: full cycle / (AR step + draft module)", f"{over[0]:.3f}"),
            (f"{mode}: cycle at fill 1 / (AR step + draft module)", f"{over[1]:.3f}"),
            (f"{mode}: overhead, full cycle / max(stage, draft module)", f"{of['overhead']:.3f}"),
            (f"{mode}: full cycle / sum of its parts", f"{of['over_sum_of_parts']:.3f}"),
        ]
    rows += [
        (f"{name} / that of the text's", f"{x:.3f}") for name, x in record["capacities"].items()
    ]
    process = memory["process_mib"]
    rows += [
        ("MiB of weights, computed", f"{memory['weights_mib']:.0f}"),
        ("  layouts of them held here", str(memory["layouts_held"])),
        ("MiB of all arrays of jax, measured", f"{memory['arrays_mib']:.0f}"),
        ("MiB of the process, resident", "-" if process is None else f"{process:.0f}"),
    ]
    return rows


def draw(record: dict[str, Any]) -> bytes:
    """Returns a PNG of what cycles are made of: a stacked bar for each fill, a panel a mode."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    modes = record["modes"]
    figure = Canvas(figsize=(6 * len(modes), 5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(modes), squeeze=False)[0]
    for axes, (mode, of) in zip(panels, modes.items(), strict=True):
        rows = of["breakdown_by_fill"]
        names, bottom = [f"fill {row['fill']}" for row in rows], [0.0] * len(rows)
        for part in [name for name in rows[0] if name != "fill"]:
            heights = [max(row[part], 0.0) for row in rows]
            axes.bar(names, heights, bottom=bottom, label=part, color=COLOURS[part])
            bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
        step = record[AR]["milliseconds"]
        axes.axhline(step, color="0.3", linestyle="--", label="autoregressive step")
        axes.set_title(f"{mode}: a cycle of {len(rows)} stages")
        axes.set_ylabel("milliseconds")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3, fontsize="small")
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=130)
    return file.getvalue()


def _of_mode(figures: Mapping[str, Figure], mode: str) -> dict[str, float]:
    """Median seconds by the name of the part."""
    return {
        name.removeprefix(f"{mode} "): figure.seconds
        for name, figure in figures.items()
        if name.startswith(f"{mode} ")
    }


def _share(rate: dict[str, float]) -> str:
    return f"{rate['gb_read']:.3f}; {100 * rate['share_of_bandwidth']:.1f}%"


def _n_bytes(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def _buffers(array: jax.Array) -> list[jax.Array]:
    return [shard.data for shard in array.addressable_shards]
