"""What needs a row of logits per position, without ever holding the logits of all positions.

Positions that are scored are gathered to the front and taken chunk by chunk; the rest cost
nothing. The gradient is made with the loss, while a chunk's logits are there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spd_jax.config import LossConfig
from spd_jax.ops.linear import linear
from spd_jax.ops.losses import divergence
from spd_jax.ops.sampling import argmax_lowest

CHUNK_LOGITS = 1 << 24  # logits of one kind that are held at once; at least those of a few rows


class RowScores(NamedTuple):
    """What is known of each scored position [n]; zeros elsewhere."""

    loss: jax.Array  # float32
    guess: jax.Array  # int32, the draft's choice, an index into its ids
    best: jax.Array  # int32, the target's choice among these


def chunk_rows(n: int, n_logits: int) -> int:
    """Returns of how many of n positions logits are made at once."""
    return min(n, max(8, CHUNK_LOGITS // n_logits))


def best_ids(x: jax.Array, head: jax.Array, scored_mask: jax.Array) -> jax.Array:
    """Returns the likeliest id int32 [n] of normed states x [n, D] under a head [V, D]."""

    def visit(rows: jax.Array, best: jax.Array) -> jax.Array:
        return best.at[rows].set(
            argmax_lowest(linear(_take(x, rows), head, jnp.float32)), mode="drop"
        )

    return _for_scored(scored_mask, head.shape[0], visit, jnp.zeros(x.shape[0], jnp.int32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def vocabulary_loss(
    loss: LossConfig,
    train_head: bool,
    x: jax.Array,
    head: jax.Array,
    target_x: jax.Array,
    target_head: jax.Array,
    columns: np.ndarray | None,
    temperature: jax.Array | float,
    scored_mask: jax.Array,
    weights: jax.Array,
) -> tuple[jax.Array, RowScores]:
    """Compares a draft's distribution with the target's at the scored positions.

    Args:
      x: normed draft outputs [n, D]; head: [W, D].
      target_x: normed target states [n, D]; target_head: [W, D], or [V, D] with `columns`.
      columns: int [W], the draft ids, where the target's mass outside them counts.
      temperature: of both distributions; the loss is multiplied by its square.
      scored_mask: bool [n]; weights: float32 [n] of the losses in the total.

    Returns:
      The weighted total, differentiable in x and, with train_head, in head; and `RowScores`, which
      no gradient comes through.
    """
    args = (x, head, target_x, target_head, columns, temperature, scored_mask, weights)
    total, scores, _ = _run(loss, *args, wanted=())
    return total, scores


def _forward(loss, train_head, *args):
    total, scores, grads = _run(loss, *args, wanted=(0, 1) if train_head else (0,))
    return (total, scores), (grads, args)


def _backward(loss, train_head, kept, cotangents):
    (grads, args), scale = kept, cotangents[0]
    grads = [(scale * grad).astype(arg.dtype) for grad, arg in zip(grads, args, strict=False)]
    return (*grads, *[None] * (len(args) - len(grads)))


vocabulary_loss.defvjp(_forward, _backward)


def _run(
    loss, x, head, target_x, target_head, columns, temperature, scored_mask, weights, *, wanted
):
    """The total, the scores, and the total's gradients in x and head, as many as are wanted."""

    def at_rows(x_rows, head, rows):
        log_q = jax.nn.log_softmax(linear(x_rows, head, jnp.float32) / temperature, axis=-1)
        logits = (
            lax.stop_gradient(linear(_take(target_x, rows), target_head, jnp.float32)) / temperature
        )
        log_p, outside = jax.nn.log_softmax(logits, axis=-1), 0.0
        if columns is not None:
            log_p = log_p[:, columns]
            outside = jnp.maximum(1.0 - jnp.sum(jnp.exp(log_p), axis=-1), 0.0)
        losses = divergence(loss, log_p, log_q, outside) * temperature**2
        scores = RowScores(losses, argmax_lowest(log_q), argmax_lowest(log_p))
        return jnp.sum(losses * jnp.take(weights, rows, mode="fill", fill_value=0.0)), scores

    def visit(rows: jax.Array, carry: Any) -> Any:
        total, scores, grads = carry
        if wanted:
            compute = jax.value_and_grad(at_rows, argnums=wanted, has_aux=True)
            (part, new), (dx, *d_head) = compute(_take(x, rows), head, rows)
            of_x, *of_head = grads
            grads = [of_x.at[rows].set(dx, mode="drop")]
            grads += [g + d.astype(g.dtype) for g, d in zip(of_head, d_head, strict=True)]
        else:
            part, new = at_rows(_take(x, rows), head, rows)
        scores = jax.tree.map(lambda old, at: old.at[rows].set(at, mode="drop"), scores, new)
        return total + part, scores, grads

    n = x.shape[0]
    nothing = RowScores(*(jnp.zeros(n, dtype) for dtype in (jnp.float32, jnp.int32, jnp.int32)))
    zeros = [jnp.zeros(shape, jnp.float32) for shape in (x.shape, head.shape)][: len(wanted)]
    n_logits = max(head.shape[0], target_head.shape[0])
    return _for_scored(scored_mask, n_logits, visit, (jnp.float32(0), nothing, zeros))


def _take(x: jax.Array, rows: jax.Array) -> jax.Array:
    return jnp.take(x, rows, axis=0, mode="clip")


def _for_scored(
    scored_mask: jax.Array, n_logits: int, visit: Callable[[jax.Array, Any], Any], carry: Any
) -> Any:
    """Calls visit(rows, carry) for chunks of the scored positions of [n], ends filled up with n."""
    n = scored_mask.shape[0]
    chunk = chunk_rows(n, n_logits)
    order = jnp.argsort(~scored_mask, stable=True)  # the scored ones first
    n_scored = jnp.sum(scored_mask)
    order = jnp.where(jnp.arange(n) < n_scored, order, n)
    order = jnp.pad(order, (0, -n % chunk), constant_values=n)

    def step(i: jax.Array, carry: Any) -> Any:
        return visit(lax.dynamic_slice_in_dim(order, i * chunk, chunk), carry)

    return lax.fori_loop(0, (n_scored + chunk - 1) // chunk, step, carry)
