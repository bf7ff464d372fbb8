"""What became of the rows of a file: how many were used, how many skipped, and why."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from spd_jax.checks import ConfigError
from train.sources import row_unit

N_NUMBERS = 5  # row numbers shown of a reason
N_REASONS = 6  # reasons shown of a file


@dataclasses.dataclass
class Tally:
    """Counts of one file, while it is read and after."""

    path: Path
    n_records: int = 0
    n_tokens: int = 0
    n_scored: int = 0
    n_cut: int = 0  # tokens beyond sequence_len
    n_unscored: int = 0  # answers of used records that are not scored at all
    reasons: dict[str, tuple[int, list[int]]] = dataclasses.field(default_factory=dict)

    @property
    def n_skipped(self) -> int:
        """Records that were not used."""
        return sum(count for count, _ in self.reasons.values())

    @property
    def n_used(self) -> int:
        """Records of which something was used."""
        return self.n_records - self.n_skipped

    def place(self, number: int) -> str:
        """Returns where a row is: "file.jsonl:4", "file.parquet:row 4"."""
        return f"{self.path}:{number if row_unit(self.path) == 'line' else f'row {number}'}"

    def skip(self, number: int, reason: str) -> None:
        """Counts a record that cannot be used."""
        count, numbers = self.reasons.get(reason, (0, []))
        self.reasons[reason] = count + 1, [*numbers, number][:N_NUMBERS]

    def describe_skipped(self) -> str:
        """Returns "3 skipped: 2 not UTF-8 (lines 4, 9), 1 not JSON (line 12)"."""
        ranked = sorted(self.reasons.items(), key=lambda item: -item[1][0])
        parts = []
        for reason, (count, numbers) in ranked[:N_REASONS]:
            unit = row_unit(self.path) + ("s" if count > 1 else "")
            shown = ", ".join(map(str, numbers)) + (", ..." if count > len(numbers) else "")
            parts.append(f"{count} {reason} ({unit} {shown})")
        rest = self.n_skipped - sum(count for _, (count, _) in ranked[:N_REASONS])
        parts += [f"{rest} for other reasons"] if rest else []
        return f"{self.n_skipped} skipped: {', '.join(parts)}"

    def describe(self) -> str:
        """Returns one line of counts."""
        text = f"{self.path}: {self.n_used} rows, {self.n_tokens} tokens, {self.n_scored} scored"
        text += f"; {self.n_cut} tokens beyond sequence_len cut" if self.n_cut else ""
        if self.n_unscored:
            text += (
                f"; {self.n_unscored} answers unscored (by the template, sequence_len or length)"
            )
        return text + (f"; {self.describe_skipped()}" if self.n_skipped else "")

    def check(self, advice: str) -> None:
        """Raises ConfigError where no record was used: why, and what to change."""
        if not self.n_used:
            why = self.describe_skipped() if self.n_records else "it has no rows"
            raise ConfigError(f"{self.path}: no usable row; {why}; {advice}")
