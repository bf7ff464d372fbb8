"""The work of one rank: a stage's layers, or the draft module's, over read-only caches.

Both return what the rank sends out [K, B, T, D] and the new rows of every cache slot.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from spd_jax.config import LayerKind
from spd_jax.models import target as model
from spd_jax.models.cache import Rows, row_shapes
from spd_jax.models.draft import KIND
from spd_jax.ops.attention import causal_mask
from spd_jax.ops.rope import Rotation
from spd_jax.pipeline.comm import Comm
from spd_jax.pipeline.slots import Slots, cache_slots
from spd_jax.pipeline.spec import EngineSpec

Sent = tuple[jax.Array, Slots]


def run_rank(
    spec: EngineSpec,
    comm: Comm,
    rank: int | jax.Array,
    active: jax.Array,
    stage: Callable[[Sequence[LayerKind]], Sent],
    draft: Callable[[], Sent],
) -> Sent:
    """Runs the rank's work: stage(kinds of its layers), or draft(); zeros where not `active`."""
    works = [functools.partial(stage, kinds) for kinds in spec.patterns] + [draft]
    return comm.run(rank, active, works, spec.work_of)


def run_stage(
    spec: EngineSpec,
    comm: Comm,
    rank: int | jax.Array,
    kinds: Sequence[LayerKind],
    weights: list[dict] | dict,
    caches: Slots,
    x: jax.Array,
    turn: Rotation,
    cache_len: jax.Array,
    n_valid: jax.Array,
) -> Sent:
    """Runs the rank's target layers, which are of `kinds`, on T consecutive tokens per sequence.

    Args:
      weights, caches: of the rank; on a mesh a stage may need fewer slots than there are.
      x: [B, T, D] stage input; turn: of their positions; cache_len, n_valid: int [B].
    """
    mask = causal_mask(x.shape[1])
    layers = comm.layers(weights, [model.layer_shapes(spec.target, kind) for kind in kinds])
    passed, rows = [x], _no_rows(comm, caches, x.shape[1])
    for kind, layer, (mixer, slot) in zip(kinds, layers, cache_slots(kinds), strict=True):
        x, rows[mixer][slot] = model.run_layer(
            spec.target, kind, layer, x, turn, mask, caches[mixer][slot], cache_len, n_valid
        )
        passed.append(x)
    emit = comm.select(spec.emits + (spec.emits[0],), rank)
    if isinstance(rank, int):
        return jnp.stack([passed[i] for i in emit]), rows
    return jnp.take(jnp.stack(passed), emit, axis=0), rows


def run_draft(
    spec: EngineSpec,
    comm: Comm,
    weights: list[dict] | dict,
    caches: Slots,
    rows: jax.Array,
    turn: Rotation,
    mask: jax.Array,
    cache_len: jax.Array,
    kept: jax.Array | None = None,
) -> Sent:
    """Runs the draft module's layers on aggregated rows.

    Args:
      weights, caches: of the rank; its layers take the first slots.
      rows: [B, T, D]; turn: of their positions; mask: bool [B or 1, T, T]; cache_len: int [B].
      kept: int [B], the one row whose keys and values are returned; None: all T.

    Returns:
      What is sent: first the hidden state of the last row, [K, B, 1, D]; zeros [K, B, T, D]
      where `kept` is None, since filling the caches needs no output. And the new cache rows.
    """
    n_batch, n_rows, width = rows.shape
    n_layers, shapes = spec.draft.n_layers, model.layer_shapes(spec.draft_layer, KIND)
    new_rows, x = _no_rows(comm, caches, n_rows), rows
    for slot, layer in enumerate(comm.layers(weights, [shapes] * n_layers)):
        last = slot == n_layers - 1  # of its queries only the newest row's is of use
        x, new_rows[KIND.mixer][slot] = model.run_layer(
            spec.draft_layer,
            KIND,
            layer,
            x,
            turn,
            mask[:, -1:] if last else mask,
            caches[KIND.mixer][slot],
            cache_len,
            n_query=1 if last else None,
        )
    n_sent = len(spec.emits[0])
    if kept is None:
        return comm.zeros((n_sent, n_batch, n_rows, width), x.dtype), new_rows
    sent = jnp.zeros((n_sent, *x.shape), x.dtype).at[0].set(x)
    one_row = [_one_row(new, kept) for new in new_rows[KIND.mixer]]
    return sent, new_rows | {KIND.mixer: one_row}


def _no_rows(comm: Comm, caches: Slots, n_rows: int) -> Slots:
    shapes = {
        mixer: [row_shapes(cache, n_rows) for cache in slots] for mixer, slots in caches.items()
    }
    return jax.tree.map(lambda x: comm.zeros(x.shape, x.dtype), shapes)


def _one_row(rows: Rows, idx: jax.Array) -> Rows:
    """Picks row idx int [B] of every sequence."""
    idx = idx[:, None, None, None]
    return {
        "k": jnp.take_along_axis(rows["k"], idx, axis=3),
        "v": jnp.take_along_axis(rows["v"], idx, axis=2),
    }
