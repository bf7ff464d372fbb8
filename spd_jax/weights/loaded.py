"""What every target reader returns, and the cast of stored weights to the run dtype."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from spd_jax.checks import ConfigError
from spd_jax.config import TargetConfig
from spd_jax.weights.lazy import LazyArray
from spd_jax.weights.tokenizer import ChatTokenizer

RUN_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


class LoadedTarget(NamedTuple):
    """A target model as read from disk."""

    config: TargetConfig
    params: dict[str, Any]  # tree in the run dtype, matrices [out, in]; np.asarray reads a leaf
    tokenizer: ChatTokenizer | None  # None: the files name none that can be built
    stop_ids: tuple[int, ...]  # sorted, unique; () for a model that names no end ids
    sha256: str  # of the weights' content

    def place(self) -> dict[str, Any]:
        """Returns the parameters on the default device; each is on the host only on its way."""

        def put(leaf: np.ndarray | LazyArray) -> jax.Array:
            return jax.block_until_ready(jnp.asarray(np.asarray(leaf)))

        return jax.tree.map(put, self.params)


def run_dtype(name: str) -> np.dtype:
    """Returns the numpy dtype of a run dtype's name."""
    if name not in RUN_DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(RUN_DTYPES)}, got {name!r}")
    return RUN_DTYPES[name]
