"""The work of one rank: a stage's layers, or the draft module's, over read-only caches.

Both return what the rank sends out [K, B, T, D] and the new cache rows of every layer slot.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spd_jax.models import target as model
from spd_jax.models.layers import Rows
from spd_jax.ops.attention import causal_mask
from spd_jax.pipeline.comm import Comm
from spd_jax.pipeline.spec import EngineSpec

Sent = tuple[jax.Array, list[Rows]]


def run_stage(
    spec: EngineSpec,
    comm: Comm,
    rank: int | jax.Array,
    layers: list[dict],
    caches: list[Rows],
    x: jax.Array,
    positions: jax.Array,
    cache_len: jax.Array,
) -> Sent:
    """Runs the rank's target layers on T consecutive tokens per sequence.

    Args:
      layers, caches: one per slot; on a mesh a stage may fill fewer than all.
      x: [B, T, D] stage input; positions: int [B, T]; cache_len: int [B].
    """
    mask = causal_mask(x.shape[1])
    n_here = comm.select(spec.pipeline.stage_layers + (0,), rank)
    n_always = min(spec.pipeline.stage_layers)
    passed, rows = [x], []
    shapes = model.layer_shapes(spec.target)

    for slot, (packed, cache) in enumerate(zip(layers, caches, strict=True)):

        def run(x=x, packed=packed, cache=cache):
            layer = comm.layer(packed, shapes)
            return model.run_layer(spec.target, layer, x, positions, mask, cache, cache_len)

        if isinstance(n_here, int) or slot < n_always:
            x, new = run()
        elif slot < spec.pipeline.max_layers:
            out, new = comm.when(slot < n_here, run)
            x = jnp.where(slot < n_here, out, x)
        else:
            x, new = x, _no_rows(comm, cache, x.shape[1])
        passed.append(x)
        rows.append(new)
    emit = comm.select(spec.emits + (spec.emits[0],), rank)
    if isinstance(n_here, int):
        return jnp.stack([passed[i] for i in emit]), rows
    return jnp.take(jnp.stack(passed), emit, axis=0), rows


def run_draft(
    spec: EngineSpec,
    comm: Comm,
    layers: list[dict],
    caches: list[Rows],
    rows: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
    cache_len: jax.Array,
    kept: jax.Array | None = None,
) -> Sent:
    """Runs the draft module's layers on aggregated rows.

    Args:
      layers: at least L_s slots, of which the first L_s are used; caches likewise.
      rows: [B, T, D]; positions: int [B, T]; mask: bool [B or 1, T, T]; cache_len: int [B].
      kept: int [B], the one row whose keys and values are returned; None: all T.

    Returns:
      What is sent: first the hidden state of the last row, [K, B, 1, D]; zeros [K, B, T, D]
      where `kept` is None, since filling the caches needs no output. And the new cache rows.
    """
    n_batch, n_rows, width = rows.shape
    new_rows, x = [], rows
    n_layers, shapes = spec.draft.n_layers, model.layer_shapes(spec.draft_layer)
    for slot, cache in enumerate(caches):
        if slot >= n_layers:
            new_rows.append(_no_rows(comm, cache, n_rows))
            continue
        layer = comm.layer(layers[slot], shapes)
        last = slot == n_layers - 1  # of its queries only the newest row's is of use
        n_query = 1 if last else None
        seen = mask[:, -1:] if last else mask
        x, new = model.run_layer(
            spec.draft_layer, layer, x, positions, seen, cache, cache_len, n_query
        )
        new_rows.append(new)
    n_sent = len(spec.emits[0])
    if kept is None:
        return comm.zeros((n_sent, n_batch, n_rows, width), x.dtype), new_rows
    sent = jnp.zeros((n_sent, *x.shape), x.dtype).at[0].set(x)
    return sent, [_one_row(new, kept) for new in new_rows]


def _no_rows(comm: Comm, cache: Rows, n_rows: int) -> Rows:
    b, g, e, _ = cache["k"].shape
    return {
        "k": comm.zeros((b, g, e, n_rows), cache["k"].dtype),
        "v": comm.zeros((b, g, n_rows, e), cache["v"].dtype),
    }


def _one_row(rows: Rows, idx: jax.Array) -> Rows:
    """Picks row idx int [B] of every sequence."""
    idx = idx[:, None, None, None]
    return {
        "k": jnp.take_along_axis(rows["k"], idx, axis=3),
        "v": jnp.take_along_axis(rows["v"], idx, axis=2),
    }
