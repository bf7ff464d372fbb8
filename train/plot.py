"""Draws the curves of runs into one PNG.

    python -m train.plot runs/smollm2_n5 runs/smollm2_n5_export --out curves.png

metrics.jsonl of each run -> one panel per figure of MAIN that any run has; with --all, of all the
tables below. Figures that are not in a table are left out.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tyro

from spd_jax.checks import ConfigError
from spd_jax.commandline import parse_flags, run, say
from spd_jax.weights.files import check_out, found_at, one_line, replace_file
from train.metrics import NAME as METRICS_NAME

# Figure: title of its panel. Of training records, by update.
TRAINING = {
    "loss": "training loss (per position)",
    "accuracy": "training accuracy (share of positions)",
}
# Of a group of held-out records, by update.
HELDOUT = {
    "loss": "held-out loss (per position)",
    "kl": "held-out KL (nats per position)",
    "agree_target": "agreement with the target (share)",
    "agree_text": "agreement with the text (share)",
    "alpha": "held-out alpha (accepted / verified)",
    "tau": "held-out tau (x one device)",
    "acceptance": "acceptance at T = 1 (expected alpha)",
    "decode_alpha": "alpha of decoding held-out prompts",
    "decode_tau": "tau of decoding held-out prompts",
}
BASELINES = {  # drawn dashed beside the figure; the held-out rows alone decide them
    "agree_target": "lookup",
    "agree_text": "lookup",
    "alpha": "lookup_alpha",
    "tau": "lookup_tau",
}
BASELINE_STYLE = {"color": "0.4", "linestyle": "--", "linewidth": 1.2}  # no run's colour
BY_FILL = ("agree_target_by_fill", "agree_text_by_fill", "kl_by_fill")  # one entry a stage
N_DIGITS = 9  # of the names of a profile's figures
LARGEST = 1e30  # of what is drawn: the axes of larger numbers overflow


class Profile(NamedTuple):
    """A list of figures, or figures by number, as a run has it last: its panel."""

    label: str
    x_label: str


PROFILES = {
    "loss_by_fill": Profile("held-out loss by fill (per position)", "tokens in flight"),
    "agree_target_by_fill": Profile("agreement with the target by fill", "tokens in flight"),
    "agree_text_by_fill": Profile("agreement with the text by fill", "tokens in flight"),
    "acceptance_by_fill": Profile("acceptance at T = 1 by fill", "tokens in flight"),
    "kl_by_fill": Profile("held-out KL by fill (nats per position)", "tokens in flight"),
    "alpha_by_stages": Profile("held-out alpha by stages", "stages"),
    "tau_by_stages": Profile("held-out tau by stages", "stages"),
}
# The panels that tell how a run does; few enough to be read.
MAIN = {TRAINING["loss"]}
MAIN |= {HELDOUT[name] for name in ("kl", "agree_target", "alpha", "tau", "acceptance")}
MAIN |= {
    PROFILES[name].label for name in ("agree_target_by_fill", "alpha_by_stages", "tau_by_stages")
}
LEAST_SPAN = 0.05  # of a profile's axis: less would show noise as a slope


@dataclasses.dataclass(frozen=True)
class PlotFlags:
    """Draw the training and held-out curves of runs into one PNG."""

    runs: tyro.conf.Positional[tuple[str, ...]]
    """Folders of runs (their workdir), or metrics.jsonl files."""
    out: str = "curves.png"
    """The PNG to write; one that is there is replaced."""
    group: str = "all"
    """Which held-out rows: all, or those written at one temperature, like T=0.7."""
    all: bool = False
    """Draw every figure there is, in place of the few that tell most."""


@dataclasses.dataclass(frozen=True)
class RunCurves:
    """The records of one run in order of their steps."""

    name: str
    training: list[dict[str, Any]]
    heldout: list[dict[str, Any]]  # of the group that is drawn, each with its step


class Line(NamedTuple):
    """One line of a panel."""

    run: int
    x: list[float]
    y: list[float]
    is_baseline: bool = False
    is_noisy: bool = False


class Panel(NamedTuple):
    """One set of axes."""

    label: str
    x_label: str
    lines: list[Line]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    flags = parse_flags(PlotFlags, "python -m train.plot", argv)
    if not flags.runs:
        raise ConfigError("give the folder of at least one run, like runs/smollm2_n5")
    out = Path(flags.out)
    if out.suffix != ".png":
        raise ConfigError(f"--out must end in .png, got {flags.out!r}")
    check_out(out)
    curves = read_runs(flags.runs, flags.group)
    try:
        panels = panels_of(curves)
        if not flags.all:
            panels = [panel for panel in panels if panel.label in MAIN] or panels
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(out, draw([run.name for run in curves], panels))
    except OSError as error:
        raise ConfigError(f"{out}: cannot write the plot ({one_line(error)})") from None
    say(f"{out}: {len(curves)} run{'s' if len(curves) > 1 else ''}")
    return 0


def read_runs(paths: Sequence[str], group: str) -> list[RunCurves]:
    """Reads runs; each is named by its folder, by the path as given where two are called alike.

    Raises:
      ConfigError: one has no metrics, or no figure to draw.
    """
    for path in paths:
        found_at(Path(path))  # one line where the system cannot look there
    files = [Path(p) / METRICS_NAME if Path(p).is_dir() else Path(p) for p in paths]
    names = [file.resolve().parent.name for file in files]
    names = [n if names.count(n) == 1 else p for n, p in zip(names, paths, strict=True)]
    curves = []
    for name, file in zip(names, files, strict=True):
        records = _records(file)
        groups = [(r["step"], r["heldout"]) for r in records if isinstance(r.get("heldout"), dict)]
        found = [_flat(g[group]) | {"step": s} for s, g in groups if isinstance(g.get(group), dict)]
        if groups and not found:
            known = ", ".join(sorted({str(name) for _, g in groups for name in g}))
            raise ConfigError(f"{file}: no held-out group {group!r}; there are {known}")
        training = [record for record in records if "heldout" not in record]
        this = RunCurves(name, training, found)
        if not panels_of([this]):
            raise ConfigError(f"{file}: holds no figure to draw; is it the metrics of train.pdm?")
        curves.append(this)
    return curves


def _flat(rates: dict[str, Any]) -> dict[str, Any]:
    """A group's figures: those of a true decode among them, the own stages among the others."""
    decode = rates.get("decode")
    decode = decode if isinstance(decode, dict) else {}
    rates = rates | {f"decode_{name}": value for name, value in decode.items()}
    fills = next((rates[name] for name in BY_FILL if isinstance(rates.get(name), list)), None)
    for name in ("alpha", "tau"):
        others = rates.get(f"{name}_by_stages")
        if fills and isinstance(others, dict):
            rates[f"{name}_by_stages"] = others | {str(len(fills)): rates.get(name)}
    return rates


def _records(file: Path) -> list[dict[str, Any]]:
    """The records of a file by step; lines that are none (a killed writer's) are left out."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise ConfigError(
            f"{file}: no metrics to read ({one_line(error.strerror or error)}); give the workdir "
            "of a run"
        ) from None
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and _is_drawable(record.get("step")):
            records.append(record)
    return sorted(records, key=lambda record: record["step"])


def _is_drawable(value: Any) -> bool:
    """Whether a value of JSON is a number that axes can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def panels_of(runs: Sequence[RunCurves]) -> list[Panel]:
    """Returns the panels that these runs have something for, in the order of the tables."""
    panels = []
    for figure, label in TRAINING.items():
        lines = [Line(i, *_series(r.training, figure), is_noisy=True) for i, r in enumerate(runs)]
        panels.append(Panel(label, "updates", lines))
    for figure, label in HELDOUT.items():
        lines = [Line(i, *_series(r.heldout, figure)) for i, r in enumerate(runs)]
        if figure in BASELINES:
            baselines = [_series(run.heldout, BASELINES[figure]) for run in runs]
            lines += [Line(i, *series, is_baseline=True) for i, series in enumerate(baselines)]
        panels.append(Panel(label, "updates", lines))
    for figure, profile in PROFILES.items():
        lines = [Line(i, *_last_profile(r, figure)) for i, r in enumerate(runs)]
        panels.append(Panel(profile.label, profile.x_label, lines))
    panels = [panel._replace(lines=[line for line in panel.lines if line.x]) for panel in panels]
    return [panel for panel in panels if any(not line.is_baseline for line in panel.lines)]


def _series(records: list[dict[str, Any]], figure: str) -> tuple[list[float], list[float]]:
    """The steps and values of the records that have a figure."""
    pairs = [(r["step"], r[figure]) for r in records if _is_drawable(r.get(figure))]
    return [float(x) for x, _ in pairs], [float(y) for _, y in pairs]


def _last_profile(run: RunCurves, figure: str) -> tuple[list[float], list[float]]:
    """What a list's entries stand for, and their values, as the run has it last."""
    for record in reversed(run.heldout):
        pairs = _numbered(record.get(figure))
        if pairs:
            return [x for x, _ in pairs], [y for _, y in pairs]
    return [], []


def _numbered(values: Any) -> list[tuple[int, float]]:
    """The numbers of a list, from 1, or of an object whose names are numbers, with their places."""
    if isinstance(values, list):
        pairs = list(enumerate(values, 1))
    elif isinstance(values, dict):
        known = {n: v for n, v in values.items() if n.isdecimal() and len(n) <= N_DIGITS}
        pairs = sorted(((int(n), v) for n, v in known.items()), key=lambda pair: pair[0])
    else:
        pairs = []
    return [(x, float(y)) for x, y in pairs if _is_drawable(y)]


def draw(names: Sequence[str], panels: Sequence[Panel]) -> bytes:
    """Returns a PNG: a grid of panels, a colour for each run, one legend."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    n_columns = min(3, len(panels))
    n_rows = -(-len(panels) // n_columns)
    figure = Figure(figsize=(4.6 * n_columns, 3.2 * n_rows + 0.6), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.06)
    FigureCanvasAgg(figure)
    grid = figure.subplots(n_rows, n_columns, squeeze=False).ravel()
    for panel, axes in zip(panels, grid, strict=False):
        for level in {line.y[-1] for line in panel.lines if line.is_baseline}:
            axes.axhline(level, **BASELINE_STYLE)
        for line in panel.lines:
            if not line.is_baseline:
                _draw_line(axes, line)
        if panel.x_label != "updates":
            low, high = axes.get_ylim()
            more = max(0.0, LEAST_SPAN - (high - low)) / 2
            axes.set_ylim(low - more, high + more)
        axes.set_xlabel(panel.x_label)
        axes.set_title(panel.label, fontsize="medium")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.grid(alpha=0.3)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    handles = [Line2D([], [], color=f"C{i % 10}", label="run") for i in range(len(names))]
    if any(line.is_baseline for panel in panels for line in panel.lines):
        handles.append(Line2D([], [], **BASELINE_STYLE, label="2-gram lookup"))
    legend = figure.legend(handles=handles, loc="outside upper center", ncols=min(4, len(handles)))
    # A label would be left out where it begins with "_", and be read as mathematics between "$".
    for text, name in zip(legend.get_texts(), names, strict=False):
        text.set_parse_math(False)
        text.set_text(os.fsencode(name).decode(errors="replace"))
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=130)
    return file.getvalue()


def _draw_line(axes: Any, line: Line) -> None:
    colour = f"C{line.run % 10}"
    if line.is_noisy:
        axes.plot(line.x, line.y, color=colour, alpha=0.25, linewidth=0.8)
        marker = "o" if len(line.x) == 1 else None
        axes.plot(*_smoothed(line), color=colour, linewidth=1.6, marker=marker)
    else:
        axes.plot(line.x, line.y, color=colour, linewidth=1.6, marker="o", markersize=3.5)


def _smoothed(line: Line) -> tuple[np.ndarray, np.ndarray]:
    """Running means over a 30th of the points, each at the middle of its window."""
    width = max(1, len(line.x) // 30)
    window = np.full(width, 1 / width)
    return tuple(np.convolve(values, window, mode="valid") for values in (line.x, line.y))


if __name__ == "__main__":
    run(main)
