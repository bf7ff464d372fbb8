"""The parts of a cycle, each in a loop of its own on the device, so that each can be timed.

    state -> part -> results -> (next to nothing of their sum) -> the state's hidden states -> ...

Each pass depends on the one before it, so none can be left out or done once for all. A state stays
at its positions and its fill: only cache rows are written, as a cycle writes them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from spd_jax.pipeline.comm import Comm
from spd_jax.pipeline.cycle import compute, run_cycle
from spd_jax.pipeline.draws import pack_draws
from spd_jax.pipeline.programs import Engine, on_ranks
from spd_jax.pipeline.slots import Slots
from spd_jax.pipeline.spec import EngineSpec
from spd_jax.pipeline.state import Inputs, PipelineState
from spd_jax.pipeline.weights import EngineWeights
from spd_jax.program import Program

TINY = 1e-30  # of a result, added to what the next pass reads; nothing is left of it in a sum

Done = tuple[list[Slots], list[jax.Array]]  # the caches, and the results that are to be waited for


def probe(
    engine: Engine, state: PipelineState, inputs: Inputs, part: str, n_read: int, rank: int = 0
) -> Callable[[PipelineState, int], PipelineState]:
    """Compiles one part of a cycle; fn(state, n) runs it n times and blocks.

    Args:
      part: "cycle": all, at the fill of the state. "rank": the work of one rank, a stage (of fill
        above `rank`) or the draft module. "heads": both heads to what the shards exchange.
        "exchange": the collectives of a greedy cycle alone.
      n_read: as for `programs.chunk`.

    The state is donated.
    """
    static = {"spec": engine.spec, "mesh": engine.mesh, "n_read": n_read, "part": part}
    only = jnp.int32(rank)
    program = PROBE.compile(engine.weights, state, inputs, jnp.int32(1), only, **static)
    return lambda state, n: jax.block_until_ready(
        program(engine.weights, state, inputs, jnp.int32(n), only)
    )


def _cycle(
    spec: EngineSpec,
    comm: Comm,
    weights: EngineWeights,
    state: PipelineState,
    inputs: Inputs,
    n_read: int,
    only: jax.Array,
) -> Done:
    new = run_cycle(spec, comm, weights, state, inputs, n_read)
    return new.caches, [new.hidden, new.ring, new.tokens, new.newest, new.n_committed]


def _rank(spec, comm, weights, state, inputs, n_read, only) -> Done:
    sent, caches = compute(spec, comm, weights, state, n_read, only)
    return caches, sent


def _heads(spec, comm, weights, state, inputs, n_read, only) -> Done:
    leaving, drafted = state.hidden[0], state.hidden[1]
    packed, _, _ = pack_draws(spec, comm, weights.heads, state, inputs, leaving, drafted)
    return state.caches, [packed]


def _exchange(spec, comm, weights, state, inputs, n_read, only) -> Done:
    n_batch, width = state.hidden.shape[1:]
    value = state.hidden[0, 0, 0]
    sent = jnp.broadcast_to(value, (len(spec.emits[0]), n_batch, 1, width))
    gathered = comm.gather_ranks([sent] * len(comm.ranks))
    bits = lax.bitcast_convert_type(gathered[0, 0, 0, 0, 0].astype(jnp.float32), jnp.int32)
    packed = jnp.broadcast_to(bits + comm.shard(), (2, n_batch, 2 + width))
    return state.caches, [gathered, comm.gather_shards(packed)]


PARTS = {"cycle": _cycle, "rank": _rank, "heads": _heads, "exchange": _exchange}


def _run_probe(weights, state, inputs, n_times, only, *, spec, mesh, n_read, part):
    def fn(comm, weights, state, inputs, n_times, only):
        def again(_, carry):
            caches, nudge = carry
            hidden, ring = (x + nudge.astype(x.dtype) for x in (state.hidden, state.ring))
            now = dataclasses.replace(state, caches=caches, hidden=hidden, ring=ring)
            caches, results = PARTS[part](spec, comm, weights, now, inputs, n_read, only)
            total = sum(jnp.sum(x.astype(jnp.float32)) for x in results)
            return caches, comm.zeros((), jnp.float32) + TINY * total

        carry = (state.caches, comm.zeros((), jnp.float32))
        caches, nudge = lax.fori_loop(0, n_times, again, carry)
        hidden = state.hidden + comm.sum_shards(nudge).astype(state.hidden.dtype)
        return dataclasses.replace(state, caches=caches, hidden=hidden)

    return on_ranks(fn, spec, mesh, weights, state, inputs, n_times, only)


PROBE = Program(_run_probe, donate=(1,))
