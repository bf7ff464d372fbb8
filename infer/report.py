"""The figures of a decode and how they are shown: one table, one JSON object."""

from __future__ import annotations

import json
from typing import IO, Any

from rich.console import Console
from rich.table import Table

MISSING = "-"


def shown(value: float | int | str | None, digits: int = 3) -> str:
    """Formats one figure; None (a rate without a denominator) is a dash."""
    if value is None:
        return MISSING
    if isinstance(value, float):
        return f"{value:.{digits}f}"
    return str(value)


def decode_figures(result: Any) -> dict[str, str]:
    """Returns the rows of the closing table of one decode, in order, ready to print."""
    stats = result.stats
    return {
        "tokens": shown(len(result.tokens)),
        "cycles": shown(result.cycles),
        "rejects": shown(stats.rejects),
        "alpha (accepted / verified drafts)": shown(stats.alpha),
        **(
            {"alpha expected: mean of sum(min(p, q))": shown(stats.expected_alpha)}
            if stats.expected_alpha is not None
            else {}
        ),
        "tokens per cycle": shown(stats.tokens_per_cycle),
        "tau (equivalent accept length)": shown(stats.tau, 2),
        "S (theoretical speedup)": shown(stats.speedup, 2),
        "prefill seconds": shown(stats.prefill_seconds, 2),
        "decode seconds": shown(stats.decode_seconds, 2),
        "tokens per second": shown(stats.tokens_per_second, 1),
        "mode": shown(stats.mode),
        "placement": shown(stats.placement),
        "devices": shown(stats.devices),
    }


def print_figures(columns: dict[str, dict[str, str]], file: IO[str]) -> None:
    """Prints one table: a column per entry of `columns`, a row per figure of the first one."""
    table = Table()
    table.add_column("", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", overflow="fold")
    for row in next(iter(columns.values())):
        table.add_row(row, *(figures.get(row, MISSING) for figures in columns.values()))
    Console(file=file, highlight=False).print(table)


def decode_json(result: Any, identical: bool | None = None) -> str:
    """Returns the one-line JSON object of a decode; `identical` is there when it was compared."""
    stats = result.stats
    record = {
        "text": result.text,
        "tokens": [int(i) for i in result.tokens],
        "cycles": result.cycles,
        "rejects": stats.rejects,
        "alpha": stats.alpha,
        "expected_alpha": stats.expected_alpha,
        "tau": stats.tau,
        "mode": stats.mode,
        "placement": stats.placement,
        "finish_reason": result.finish_reason,
    }
    if identical is not None:
        record["identical"] = identical
    return json.dumps(record)  # ASCII: any stdout takes it
