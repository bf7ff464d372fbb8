"""The folder that models and compiled programs are kept in."""

from __future__ import annotations

import os
from pathlib import Path

from spd_jax.checks import ConfigError


def cache_directory() -> Path:
    """Returns $SPD_CACHE, else spd_jax under $XDG_CACHE_HOME or ~/.cache."""
    own, xdg = os.environ.get("SPD_CACHE"), os.environ.get("XDG_CACHE_HOME", "")
    if own:
        try:
            return Path(own).expanduser().absolute()
        except RuntimeError as error:  # ~ of an unknown user
            raise ConfigError(f"SPD_CACHE={own}: {error}; name another folder") from None
    base = Path(xdg) if os.path.isabs(xdg) else Path(os.path.expanduser("~/.cache"))
    return base / "spd_jax"
