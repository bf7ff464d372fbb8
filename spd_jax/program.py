"""A jitted function whose programs are compiled on request, kept, and can be counted and read.

Compiling ahead of the call keeps compile time out of every measured second.
"""

from __future__ import annotations

import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

# Each compiled program of the CPU backend takes hundreds of memory maps, about 800 for a decode
# cycle of 30 layers. Linux gives a process 65,530 by default; past that, jaxlib crashes.
MAX_PROGRAMS = 40  # more are kept while there are fewer maps than MANY_MAPS
MANY_MAPS = 30_000
MAX_KEPT_BYTES = 4 << 30  # on disk; those used least lately go first

# XLA's CPU backend computes bfloat16 products from float32 copies of the weights. Its default
# scheduler, which looks for work to do side by side, makes them all beforehand: twice the model.
CPU_OPTIONS = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}

_KEPT: OrderedDict[tuple, jax.stages.Compiled] = OrderedDict()  # the one used last comes last


def _signature(leaf: Any) -> tuple:
    array = leaf if hasattr(leaf, "dtype") else jax.numpy.asarray(leaf)
    weak = bool(getattr(array, "weak_type", False))
    return array.shape, str(array.dtype), weak, getattr(array, "sharding", None)


class Program:
    """Wraps `fn(*args, **static)`: positional arguments are traced, keywords are static.

    MAX_PROGRAMS of all instances together are kept, those that were used last, and more where
    memory maps do not run out.
    """

    def __init__(self, fn: Callable, *, donate: tuple[int, ...] = ()):
        self._fn, self._donate = fn, donate
        self.n_compiled = 0  # ever, those no longer kept included

    def compile(self, *args, **static) -> jax.stages.Compiled:
        """Returns the compiled program for arguments like these, compiling it if it is not kept."""
        leaves, treedef = jax.tree.flatten(args)
        signature = tuple(_signature(x) for x in leaves)
        key = (self, treedef, signature, tuple(sorted(static.items())))
        if key not in _KEPT:
            jitted = jax.jit(
                lambda *arrays: self._fn(*arrays, **static), donate_argnums=self._donate
            )
            options = CPU_OPTIONS if jax.default_backend() == "cpu" else None
            _KEPT[key] = jitted.lower(*args).compile(options)
            self.n_compiled += 1
            if len(_KEPT) > MAX_PROGRAMS and _has_many_maps():
                _KEPT.popitem(last=False)
        _KEPT.move_to_end(key)
        return _KEPT[key]

    def shapes(self, *args, **static) -> Any:
        """Returns the shapes of the results for arguments like these; only traces."""
        return jax.eval_shape(lambda *arrays: self._fn(*arrays, **static), *args)

    def __call__(self, *args, **static) -> Any:
        return self.compile(*args, **static)(*args)


def _has_many_maps() -> bool:
    """True where memory maps may run out, or cannot be counted."""
    maps = Path("/proc/self/maps")
    return not maps.exists() or maps.read_text().count("\n") > MANY_MAPS


def keep_on_disk(folder: Path) -> None:
    """Keeps compiled programs in a folder, for later processes; a user's own setting stays.

    Raises:
      OSError: the folder cannot be made or written to.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):  # jax would warn at every program
        pass
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", MAX_KEPT_BYTES)


def is_traced(tree: object) -> bool:
    """True inside `jax.jit` or `jax.grad`."""
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))
