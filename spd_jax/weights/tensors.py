"""Named tensors in a safetensors file, one at a time, with errors that name file and tensor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import safetensors
from safetensors import SafetensorError

from spd_jax.checks import ConfigError
from spd_jax.weights.files import one_line

FLOAT_TYPES = ("F32", "BF16", "F16", "F64")


class TensorFile:
    """An open safetensors file."""

    def __init__(self, path: Path):
        """Opens the file.

        Raises:
          ConfigError: it is absent, cut short or not safetensors.
        """
        self.path = path
        try:
            self._file = safetensors.safe_open(str(path), framework="numpy")
        except FileNotFoundError:
            raise ConfigError(f"{path}: no such file; get it, or correct the path") from None
        except (SafetensorError, OSError, ValueError) as error:
            raise ConfigError(
                f"{path}: not a whole safetensors file ({one_line(error)}); get it anew"
            ) from None
        self.names: frozenset[str] = frozenset(self._file.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape without reading it."""
        return tuple(self._slice(name).get_shape())

    def take(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Returns a float tensor in its stored dtype, its shape checked."""
        view = self._slice(name)
        found, kind = tuple(view.get_shape()), view.get_dtype()
        if found != shape:
            raise ConfigError(f"{self.path}: {name} should have shape {shape}, has {found}")
        if kind not in FLOAT_TYPES:
            raise ConfigError(f"{self.path}: {name} has dtype {kind}; only floats are supported")
        return self._file.get_tensor(name)

    def take_ints(self, name: str) -> np.ndarray:
        """Returns a one-dimensional integer tensor."""
        view = self._slice(name)
        if len(view.get_shape()) != 1 or view.get_dtype() not in ("I32", "I64"):
            raise ConfigError(f"{self.path}: {name} must be a vector of int32 or int64")
        return self._file.get_tensor(name)

    def _slice(self, name: str):
        if name not in self.names:
            raise ConfigError(f"{self.path}: no tensor {name}; the file is not complete")
        return self._file.get_slice(name)
