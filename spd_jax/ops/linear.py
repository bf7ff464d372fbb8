"""The one matrix product of the project: y = x W^T with W stored [out, in].

The orientation is decided here, once: a row of W is contiguous, so a one-row product streams W
at the machine's read bandwidth.
"""

import jax
import jax.numpy as jnp
from jax import lax


def linear(x: jax.Array, weight: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
    """Contracts the last axes of x [..., in] and weight [out, in].

    Returns [..., out] in `dtype`, by default that of the operands; logits ask for float32, so
    that bfloat16 parameters do not round distinct logits to ties.
    """
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(x, weight, contract, preferred_element_type=dtype)
