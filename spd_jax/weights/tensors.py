"""Named tensors in a safetensors file, read when wanted, with errors that name file and tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from safetensors import SafetensorError

from spd_jax.checks import ConfigError
from spd_jax.weights.files import Unchanged, one_line
from spd_jax.weights.lazy import LazyArray

FLOAT_TYPES = ("F32", "BF16", "F16", "F64")


class TensorFile:
    """What a safetensors file holds.

    It is opened for each tensor anew: an open one is mapped, and every page that was read would
    count as this process's memory.
    """

    def __init__(self, path: Path):
        """Reads the file's header.

        Raises:
          ConfigError: it is absent, cut short or not safetensors.
        """
        self.path = path
        self._file = Unchanged(path)
        with self._open() as file:
            views = {name: file.get_slice(name) for name in file.keys()}
            self._kinds = {name: view.get_dtype() for name, view in views.items()}
            self._shapes = {name: tuple(view.get_shape()) for name, view in views.items()}
        self.names: frozenset[str] = frozenset(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape without reading it."""
        if name not in self.names:
            raise ConfigError(f"{self.path}: no tensor {name}; the file is not complete")
        return self._shapes[name]

    def take(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> LazyArray:
        """Returns a float tensor to be read as dtype, its shape checked now."""
        found, kind = self.shape(name), self._kinds[name]
        if found != shape:
            raise ConfigError(f"{self.path}: {name} should have shape {shape}, has {found}")
        if kind not in FLOAT_TYPES:
            raise ConfigError(f"{self.path}: {name} has dtype {kind}; only floats are supported")
        return LazyArray(
            shape,
            dtype,
            lambda: self.read(name).astype(dtype, copy=False),
            lambda rows: self.read_rows(name, rows).astype(dtype, copy=False),
        )

    def take_ints(self, name: str) -> np.ndarray:
        """Returns a one-dimensional integer tensor."""
        if len(self.shape(name)) != 1 or self._kinds[name] not in ("I32", "I64"):
            raise ConfigError(f"{self.path}: {name} must be a vector of int32 or int64")
        return self.read(name)

    def read(self, name: str) -> np.ndarray:
        """Returns a copy of a tensor, in its stored dtype.

        Raises:
          ConfigError: the file has changed since it was opened.
        """
        self._file.check()
        with self._open() as file:
            return file.get_tensor(name)

    def read_rows(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Returns copies of rows int [n], in the stored dtype; of the others nothing is read.

        Raises:
          ConfigError: the file has changed since it was opened.
        """
        self._file.check()
        with self._open() as file:
            whole = file.get_slice(name)
            return np.concatenate([whole[row : row + 1] for row in rows.tolist()])

    def _open(self) -> Any:
        try:
            return safetensors.safe_open(str(self.path), framework="numpy")
        except FileNotFoundError:
            raise ConfigError(f"{self.path}: no such file; get it, or correct the path") from None
        except (SafetensorError, OSError, ValueError) as error:
            raise ConfigError(
                f"{self.path}: not a whole safetensors file ({one_line(error)}); get it anew"
            ) from None
