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
    """An array that `np.asarray` reads, each time anew."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        array = self.read()
        return array if dtype is None else array.astype(dtype, copy=False)
