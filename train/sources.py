"""Files of data -> records, one by one: JSONL and parquet, of which no row can be fatal.

A row that holds no record is handed on with the reason, for `train.tally` to count. Nothing but
the row at hand is kept decoded.
"""

from __future__ import annotations

import dataclasses
import glob
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from spd_jax.checks import ConfigError
from spd_jax.weights.files import one_line

SUFFIXES = (".jsonl", ".parquet")  # of the files that are taken from a folder, in any case
BOM = b"\xef\xbb\xbf"
COLUMNS = (
    "input_ids", "loss_mask", "temperature", "target_sha256", "messages", "conversations", "text",
    "turns",
)  # fmt: skip
MAX_LINE = 16 * 2**20  # bytes; more than any context holds
PARQUET_BATCH = 64  # rows decoded at once


class UnusableError(Exception):
    """A record cannot be used; the text is the reason that is counted."""


@dataclasses.dataclass(frozen=True)
class Record:
    """One row of a file: an object, or the reason why there is none."""

    number: int  # of its line, or of its row in a parquet file; from 1
    value: dict[str, Any] | None
    reason: str = ""

    def fields(self) -> dict[str, Any]:
        """Returns what was read.

        Raises:
          UnusableError: there is nothing.
        """
        if self.value is None:
            raise UnusableError(self.reason)
        return self.value


def find_files(names: str | Path | Iterable[str | Path]) -> list[Path]:
    """Returns the files that are meant by files, folders (searched whole) and glob patterns.

    Raises:
      ConfigError: there are none, or a name cannot be looked up.
    """
    names = [names] if isinstance(names, str | Path) else list(names)
    found: dict[Path, None] = {}
    for name in names:
        try:
            files, wanted = _files_of(name)
        except OSError as error:  # no right to look there, or too long to be a name
            shown = one_line(str(name))[:80]
            raise ConfigError(
                f"{shown}: cannot look for data there ({error.strerror}); name another place"
            ) from None
        if not files:
            raise ConfigError(f"{name}: expected {wanted}, found none; name another place")
        found |= dict.fromkeys(files)
    if not found:
        raise ConfigError("expected one or more files of data, got none")
    return list(found)


def _files_of(name: str | Path) -> tuple[list[Path], str]:
    """Returns the files that one name means, and what was looked for."""
    path = Path(name)
    if path.is_dir():
        inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
        files = [p for p in inside if not any(map(_hidden, p.relative_to(path).parts))]
        return files, f"{' or '.join(SUFFIXES)} files in it"
    if path.exists() and not path.is_file():  # it is read twice, and may never end
        raise ConfigError(
            f"{name}: expected a file or a folder, got a pipe or device; save it first"
        )
    if path.exists() or not glob.has_magic(str(name)):
        return [path], ""
    files = sorted(Path(p) for p in glob.glob(str(name), recursive=True))
    return [p for p in files if p.is_file()], "files of that pattern"


def _hidden(part: str) -> bool:
    return part.startswith(".")


def row_unit(path: Path) -> str:
    """Returns what the rows of a file are called in messages."""
    return "row" if is_parquet(path) else "line"


def is_parquet(path: Path) -> bool:
    """Whether a file holds rows of columns, by its name."""
    return path.suffix.lower() == ".parquet"


def read_records(path: Path) -> Iterator[Record]:
    """Yields the rows of a file, blank lines left out.

    Raises:
      ConfigError: the file cannot be read at all.
    """
    try:
        yield from (_parquet if is_parquet(path) else _jsonl)(path)
    except OSError as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise ConfigError(
            f"{path}: cannot read the data ({reason}); give JSONL or parquet files"
        ) from None


def _jsonl(path: Path) -> Iterator[Record]:
    with open(path, "rb") as file:
        for number in itertools.count(1):
            line = file.readline(MAX_LINE + 1)
            if not line:
                return
            if len(line) > MAX_LINE and not line.endswith(b"\n"):
                _skip_line(file)
                yield Record(number, None, f"larger than {MAX_LINE >> 20} MiB")
                continue
            if number == 1:
                line = line.removeprefix(BOM)
            if line.strip():
                yield _parsed(number, line)


def _skip_line(file: IO[bytes]) -> None:
    while chunk := file.readline(MAX_LINE):
        if chunk.endswith(b"\n"):
            return


def _parsed(number: int, line: bytes) -> Record:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return Record(number, None, "not UTF-8")
    except (ValueError, RecursionError):  # also absurd numbers and absurd nesting
        # Without a line feed it is the last line, of a writer that was stopped or still writes.
        return Record(number, None, "not JSON" if line.endswith(b"\n") else "not JSON, cut short")
    if not isinstance(value, dict):
        return Record(number, None, "not a JSON object")
    return Record(number, value)


def _parquet(path: Path) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = [name for name in COLUMNS if name in file.schema_arrow.names]
            if not names:
                raise ConfigError(
                    f"{path}: expected one of the columns {', '.join(COLUMNS)}, got "
                    f"{', '.join(file.schema_arrow.names)[:200]}"
                )
            twice = [name for name in names if file.schema_arrow.names.count(name) > 1]
            if twice:
                raise ConfigError(f"{path}: has two columns {twice[0]}; drop one of them")
            for batch in file.iter_batches(PARQUET_BATCH, columns=names):
                for i in range(batch.num_rows):
                    number += 1
                    try:
                        value = {name: batch.column(name)[i].as_py() for name in names}
                    except UnicodeDecodeError:
                        yield Record(number, None, "not UTF-8")
                    # A time out of range or of an unknown zone, a field that is there twice.
                    except (ValueError, OverflowError, LookupError, pyarrow.ArrowException):
                        yield Record(number, None, "a value that Python has no form for")
                    else:
                        yield Record(number, value)
    except pyarrow.ArrowException as error:
        after = f" after row {number}" if number else ""
        raise ConfigError(
            f"{path}: damaged parquet{after} ({one_line(error)}); get it anew"
        ) from None
