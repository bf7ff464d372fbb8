"""How fast this machine reads memory: the roof of decoding, which reads all weights for a token."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from infer.timing import Run, timed

WIDTH = 1024  # of the matrix whose product with a vector is timed


def readers(n_bytes: int) -> dict[str, Run]:
    """Returns ways to read an array of about n_bytes.

    A product of a matrix and a vector and a sum, as XLA compiles them, and on a CPU also numpy's
    maximum, the fastest of its reductions, a thread to each core.
    """
    n_rows = max(n_bytes // (4 * WIDTH), 1)
    array = jnp.ones((n_rows, WIDTH), jnp.float32)

    def product(array, n):
        def again(_, x):
            return x + 1e-30 * jnp.mean(lax.dot_general(array, x, (((1,), (0,)), ((), ()))))

        return lax.fori_loop(0, n, again, jnp.ones(WIDTH, jnp.float32))

    def total(array, n):
        return lax.fori_loop(0, n, lambda _, x: x * 1e-30 + jnp.sum(array + x), jnp.float32(0))

    found = {}
    for name, fn in {"product": product, "sum": total}.items():
        program = jax.jit(fn).lower(array, jnp.int32(1)).compile()
        found[name] = timed(
            lambda n, program=program: jax.block_until_ready(program(array, jnp.int32(n)))
        )
    if jax.default_backend() == "cpu":
        threads = ThreadPoolExecutor(os.cpu_count())
        parts = np.array_split(np.asarray(array), 4 * (os.cpu_count() or 1))

        def by_threads(n: int) -> None:
            for _ in range(n):
                list(threads.map(np.max, parts))

        found["threads"] = timed(by_threads)
    return found
