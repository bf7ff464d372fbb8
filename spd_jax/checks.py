"""Checks of settings: the one error type, its words, and dataclasses read from mappings."""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import operator
from collections.abc import Iterable
from typing import Any


class ConfigError(ValueError):
    """A setting, file or input the person at the keyboard can correct; its text is one line."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def as_int(name: str, value: Any) -> int:
    """Returns an integer of any kind as Python's; a boolean or a float is an error."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise ConfigError(f"{name} must be an integer, got {value!r}")


def as_ints(name: str, values: Any) -> tuple[int, ...]:
    """Returns integers of any kind as a hashable tuple.

    Raises:
      ConfigError: not a sequence of integers; a boolean or a float is none.
    """
    if not isinstance(values, Iterable):
        raise ConfigError(f"{name} must be a sequence of integers, got {values!r}")
    return tuple(as_int(f"each of {name}", value) for value in values)


def check_counts(config: Any, *names: str, least: int = 1) -> None:
    """Makes fields plain integers of at least `least`, in place."""
    for name in names:
        value = as_int(name, getattr(config, name))
        require(value >= least, f"{name} must be at least {least}, got {value}")
        object.__setattr__(config, name, value)


def is_number(value: Any) -> bool:
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_real and abs(value) < math.inf  # isfinite refuses integers beyond a float


def suggest(name: str, known: Iterable[str]) -> str:
    """Returns the end of a message about an unknown name: the close one, else all there are."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"


def from_fields(cls: type, fields: dict[str, Any], source: str) -> Any:
    """Builds the dataclass `cls` from a mapping; an unknown name is an error that suggests one.

    Raises:
      ConfigError: a field is unknown, missing or invalid; `source` names where it was read.
    """
    known = {field.name: field for field in dataclasses.fields(cls)}
    for name in fields:
        if name not in known:
            hint = suggest(name, known)
            raise ConfigError(f"{source}: unknown field {name!r} of {cls.__name__}; {hint}")
    missing = [
        name
        for name, field in known.items()
        if name not in fields
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    require(not missing, f"{source}: {cls.__name__} lacks {', '.join(missing)}; add it")
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
