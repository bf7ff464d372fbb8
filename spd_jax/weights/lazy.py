"""Arrays that stay on disk until they are wanted.

A tree of them is a model that takes no memory: whoever places it takes leaf by leaf, and each is
freed before the next is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class LazyArray:
    """An array that `np.asarray` reads, each time anew, and of which x[rows] reads those rows."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]
    read_rows: Callable[[np.ndarray], np.ndarray] | None = None  # None: all are read for some

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        return self.read()[rows] if self.read_rows is None else self.read_rows(rows)

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        array = self.read()
        return array if dtype is None else array.astype(dtype, copy=False)
