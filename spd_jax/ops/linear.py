"""The one matrix product of the project: y = x W^T with W stored [out, in].

The orientation is decided here, once: a row of W is contiguous, so a one-row product streams W
at the machine's read bandwidth.
"""

import jax
from jax import lax


def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Contracts the last axes of x [..., in] and weight [out, in]; returns [..., out]."""
    return lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))
