"""Depthwise causal convolution without bias, continued from the inputs that came before.

y_t = sum_j w_j x_{t-K+1+j}, channel by channel; x before the first row comes from the state.
"""

import jax
import jax.numpy as jnp


def causal_conv(
    x: jax.Array, weight: jax.Array, state: jax.Array, n_valid: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Convolves T new rows and moves the state past those that exist.

    Args:
      x: [B, T, C] inputs; the first n_valid rows of a sequence exist, the others are padding.
      weight: [C, K], the newest input's last.
      state: [B, C, K - 1] in x's dtype, the inputs before x, oldest first; zeros at the start.
      n_valid: int [B], 0..T.

    Returns:
      [B, T, C] in x's dtype, sums in float32, finite but meaningless at padding; and the state
      after row n_valid - 1, which is the one given where n_valid is 0.
    """
    n_rows, kernel = x.shape[1], weight.shape[1]
    valid = jnp.arange(n_rows)[None] < n_valid[:, None]
    # A NaN in the padding would spoil the weight's gradient, although its cotangent is 0.
    x = jnp.where(valid[..., None], x, 0)
    inputs = jnp.concatenate([state.swapaxes(1, 2), x], axis=1)  # [B, K - 1 + T, C]
    wide, weight = inputs.astype(jnp.float32), weight.astype(jnp.float32)
    y = sum(wide[:, j : j + n_rows] * weight[:, j] for j in range(kernel))
    newest = n_valid[:, None] + jnp.arange(kernel - 1)  # [B, K - 1]
    state = jnp.take_along_axis(inputs, newest[..., None], axis=1, mode="clip")
    return y.astype(x.dtype), state.swapaxes(1, 2)
