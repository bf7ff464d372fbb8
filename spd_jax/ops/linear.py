"""The one matrix product of the project: y = x W^T with W stored [out, in].

The orientation is decided here, once: a row of W is contiguous, so a one-row product streams W
at the machine's read bandwidth.
"""

import jax
import jax.numpy as jnp
from jax import lax

SPLIT_ABOVE, SPLIT_BELOW, N_PARTS = 100_000, 500_000, 4  # of a product of one row: see `_parts`


def linear(x: jax.Array, weight: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
    """Contracts the last axes of x [..., in] and weight [out, in].

    Returns [..., out] in `dtype`, by default that of the operands; logits ask for float32, so
    that bfloat16 parameters do not round distinct logits to ties.
    """
    n_parts, (n_out, n_in) = _parts(x, weight), weight.shape
    if n_parts > 1:
        parts = jnp.broadcast_to(x.reshape(1, n_in), (n_parts, n_in))
        weight = weight.reshape(n_parts, n_out // n_parts, n_in)
        out = lax.dot_general(
            parts, weight, (((1,), (2,)), ((0,), (0,))), preferred_element_type=dtype
        )
        return out.reshape(*x.shape[:-1], n_out)
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(x, weight, contract, preferred_element_type=dtype)


def _parts(x: jax.Array, weight: jax.Array) -> int:
    """How many products of fewer rows of W to make of a product of one row.

    XLA's CPU backend gives a product of fewer than about SPLIT_BELOW weights to one thread, but
    its parts to all: a matrix of 576 x 576 is then read at 20 instead of 11 GB/s by two cores.
    """
    n_out, n_in = weight.shape
    is_small = SPLIT_ABOVE <= weight.size < SPLIT_BELOW and n_out % N_PARTS == 0
    return N_PARTS if x.size == n_in and is_small and jax.default_backend() == "cpu" else 1
