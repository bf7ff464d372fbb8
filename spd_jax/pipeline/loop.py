"""The engine's programs, and the host's loop over chunks of cycles.

The host dispatches one program per chunk and blocks on its small counters: never one dispatch
per cycle, and never a queue of collective programs (the CPU backend deadlocks on those).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from spd_jax.models.cache import bucket_capacity
from spd_jax.pipeline.comm import LocalComm, MeshComm
from spd_jax.pipeline.cycle import run_cycle
from spd_jax.pipeline.placing import EVERYWHERE, ON_RANK, weight_specs
from spd_jax.pipeline.prefill import empty_caches, run_prefill
from spd_jax.pipeline.spec import EngineSpec
from spd_jax.pipeline.state import PipelineState
from spd_jax.pipeline.weights import EngineWeights
from spd_jax.program import Program

TOKEN_BUCKET = 64  # token buffers are a multiple of this, so that few programs are needed


@dataclasses.dataclass(frozen=True)
class Engine:
    """A target and a draft module, placed and ready to decode."""

    spec: EngineSpec
    mesh: Mesh | None  # None: virtual mode
    weights: EngineWeights

    @property
    def mode(self) -> str:
        return "virtual" if self.mesh is None else "sharded"

    @property
    def placement(self) -> str:
        return "virtual" if self.mesh is None else "dedicated"

    @property
    def n_devices(self) -> int:
        return 1 if self.mesh is None else self.mesh.devices.size


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What stays the same while a batch is decoded."""

    prompt_lens: jax.Array  # int32 [B]
    stop_ids: jax.Array  # int32 [n], -1 pads
    limit: jax.Array  # int32 scalar, max_new_tokens


def cache_capacity(spec: EngineSpec, n_padded: int, longest: int, max_new_tokens: int) -> int:
    """Cache positions: every row a sequence can write, and the spare slot, as a bucket."""
    return bucket_capacity(max(n_padded, longest + max_new_tokens + spec.n_stages - 2))


def prefill(engine: Engine, prompts: np.ndarray, inputs: Inputs, max_new_tokens: int) -> Callable:
    """Compiles the prefill of a batch; calling what is returned runs it and gives the state."""
    spec = engine.spec
    longest = int(np.max(np.asarray(inputs.prompt_lens)))
    capacity = cache_capacity(spec, prompts.shape[1], longest, max_new_tokens)
    n_slots = -(-(max_new_tokens + spec.n_stages) // TOKEN_BUCKET) * TOKEN_BUCKET
    args = (
        engine.weights,
        jnp.asarray(prompts),
        inputs.prompt_lens,
        inputs.stop_ids,
        inputs.limit,
    )
    static = {"spec": spec, "mesh": engine.mesh, "capacity": capacity, "n_slots": n_slots}
    program = PREFILL.compile(*args, **static)
    return lambda: jax.block_until_ready(program(*args))


def advance(engine: Engine, state: PipelineState, inputs: Inputs, n_cycles: int) -> Callable:
    """Compiles a chunk of up to n_cycles; calling what is returned with a state runs it."""
    tail = (inputs.prompt_lens, inputs.stop_ids, inputs.limit, jnp.int32(n_cycles))
    program = CHUNK.compile(engine.weights, state, *tail, spec=engine.spec, mesh=engine.mesh)
    return lambda state: jax.block_until_ready(program(engine.weights, state, *tail))


def _run_prefill(weights, prompts, prompt_lens, stop_ids, limit, *, spec, mesh, capacity, n_slots):
    def fn(comm, weights, prompts, prompt_lens, stop_ids, limit):
        dtype = weights.heads.embed.dtype
        slots = tuple(len(rank) for rank in weights.ranks)
        if mesh is None:
            slots = (*spec.pipeline.stage_layers, spec.draft.n_layers)
        caches = empty_caches(spec, slots, prompts.shape[0], capacity, dtype)
        caches = jax.tree.map(lambda x: comm.zeros(x.shape, x.dtype), caches)
        return run_prefill(
            spec, comm, weights, caches, prompts, prompt_lens, stop_ids, limit, n_slots
        )

    args = (weights, prompts, prompt_lens, stop_ids, limit)
    return _on_ranks(fn, spec, mesh, args, (0,))


def _run_chunk(weights, state, prompt_lens, stop_ids, limit, n_cycles, *, spec, mesh):
    def fn(comm, weights, state, prompt_lens, stop_ids, limit, n_cycles):
        def go_on(carry):
            i, state = carry
            return (i < n_cycles) & ~jnp.all(state.done)

        def body(carry):
            i, state = carry
            new = run_cycle(spec, comm, weights, state, prompt_lens, stop_ids, limit)
            return i + 1, new

        return lax.while_loop(go_on, body, (jnp.int32(0), state))[1]

    args = (weights, state, prompt_lens, stop_ids, limit, n_cycles)
    return _on_ranks(fn, spec, mesh, args, (0, 1))


def _on_ranks(fn: Callable, spec: EngineSpec, mesh: Mesh | None, args: tuple, sharded: tuple):
    """Runs fn(comm, *args) once, or on every rank of the mesh; it returns a PipelineState."""
    if mesh is None:
        return fn(LocalComm(spec.n_stages), *args)
    specs = [EVERYWHERE] * len(args)
    for i in sharded:
        specs[i] = weight_specs(args[i]) if isinstance(args[i], EngineWeights) else _STATE_SPECS
    on_rank = functools.partial(jax.tree.map, lambda s, x: x[0] if s == ON_RANK else x)

    def per_rank(*args):
        local = []
        for spec_tree, arg in zip(specs, args, strict=True):
            if isinstance(arg, PipelineState):
                arg = dataclasses.replace(arg, caches=jax.tree.map(lambda x: x[0], arg.caches))
            elif isinstance(arg, EngineWeights):
                arg = on_rank(spec_tree, arg)
            local.append(arg)
        state = fn(MeshComm(spec.n_stages), *local)
        return dataclasses.replace(state, caches=jax.tree.map(lambda x: x[None], state.caches))

    return jax.shard_map(
        per_rank, mesh=mesh, in_specs=tuple(specs), out_specs=_STATE_SPECS, check_vma=True
    )(*args)


_STATE_SPECS = PipelineState(
    caches=ON_RANK,
    **{f.name: EVERYWHERE for f in dataclasses.fields(PipelineState) if f.name != "caches"},
)

PREFILL = Program(_run_prefill)
CHUNK = Program(_run_chunk, donate=(1,))
