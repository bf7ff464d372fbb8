"""A jitted function whose programs are compiled on request, kept, and can be counted and read.

Compiling ahead of the call keeps compile time out of every measured second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def _signature(leaf: Any) -> tuple:
    array = leaf if hasattr(leaf, "dtype") else jax.numpy.asarray(leaf)
    weak = bool(getattr(array, "weak_type", False))
    return array.shape, str(array.dtype), weak, getattr(array, "sharding", None)


class Program:
    """Wraps `fn(*args, **static)`: positional arguments are traced, keywords are static."""

    def __init__(self, fn: Callable, *, donate: tuple[int, ...] = ()):
        self._fn, self._donate = fn, donate
        self._compiled: dict[tuple, Any] = {}

    def __len__(self) -> int:
        """How many programs have been compiled."""
        return len(self._compiled)

    def compile(self, *args, **static) -> jax.stages.Compiled:
        """Returns the compiled program for arguments like these, compiling it once."""
        leaves, treedef = jax.tree.flatten(args)
        key = (treedef, tuple(_signature(x) for x in leaves), tuple(sorted(static.items())))
        if key not in self._compiled:
            jitted = jax.jit(
                lambda *arrays: self._fn(*arrays, **static), donate_argnums=self._donate
            )
            self._compiled[key] = jitted.lower(*args).compile()
        return self._compiled[key]

    def __call__(self, *args, **static) -> Any:
        return self.compile(*args, **static)(*args)
