"""The engine's compiled programs: prefill, a chunk of cycles, and compaction of a batch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from spd_jax.config import SamplingConfig
from spd_jax.models.cache import bucket_capacity
from spd_jax.models.reference import padded_prompt_len
from spd_jax.ops.sampling import plan
from spd_jax.pipeline.comm import LocalComm, MeshComm
from spd_jax.pipeline.cycle import run_cycle
from spd_jax.pipeline.placing import EVERYWHERE, ON_RANK, weight_specs
from spd_jax.pipeline.prefill import empty_caches, run_prefill
from spd_jax.pipeline.spec import EngineSpec
from spd_jax.pipeline.state import Inputs, PipelineState
from spd_jax.pipeline.weights import EngineWeights
from spd_jax.program import Program

TOKEN_BUCKET = 64  # token buffers are a multiple of this, so that few programs are needed
BATCH_BUCKET = 8  # so are batches; smaller ones are powers of two


@dataclasses.dataclass(frozen=True)
class Engine:
    """A target and a draft module, placed and ready to decode."""

    spec: EngineSpec
    mesh: Mesh | AbstractMesh | None  # None: virtual mode
    weights: EngineWeights

    @property
    def mode(self) -> str:
        return "virtual" if self.mesh is None else "sharded"

    @property
    def placement(self) -> str:
        return "virtual" if self.mesh is None else "dedicated"

    @property
    def n_devices(self) -> int:
        return 1 if self.mesh is None else self.mesh.size


def bucket_batch(n: int) -> int:
    """Returns the rows of a batch of n sequences; those beyond n are done from the start."""
    return -(-n // BATCH_BUCKET) * BATCH_BUCKET if n > BATCH_BUCKET else 1 << (n - 1).bit_length()


def cache_capacity(spec: EngineSpec, n_padded: int, longest: int, max_new_tokens: int) -> int:
    """Cache positions: every row a sequence can write, and the spare slot, as a bucket."""
    return bucket_capacity(max(n_padded, longest + max_new_tokens + spec.n_stages - 2))


def capacity_of(state: PipelineState) -> int:
    """The positions of a state's attention caches: the PDM has one at least."""
    cache = next(slots["attention"][0] for slots in state.caches if slots.get("attention"))
    return cache["v"].shape[-2]


def prefill(
    engine: Engine, prompts: np.ndarray, inputs: Inputs, max_new_tokens: int
) -> Callable[[], PipelineState]:
    """Compiles the prefill of a batch; calling what is returned runs it and gives the state."""
    longest = int(np.max(np.asarray(inputs.prompt_lens)))
    static = _prefill_static(engine, prompts.shape[1], longest, max_new_tokens)
    args = (engine.weights, jnp.asarray(prompts), inputs)
    program = PREFILL.compile(*args, **static)
    return lambda: jax.block_until_ready(program(*args))


def trace(
    engine: Engine,
    n_batch: int,
    prompt_len: int,
    max_new_tokens: int,
    sampling: SamplingConfig,
) -> PipelineState:
    """Traces prefill and a chunk of cycles; returns the shapes of the state between two cycles.

    Nothing runs or is compiled: the engine may be one of shapes on an abstract mesh.
    """
    ids = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    n_padded = padded_prompt_len(prompt_len)
    static = _prefill_static(engine, n_padded, prompt_len, max_new_tokens)
    method, knobs = plan(sampling, engine.spec.target.vocab_size)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), n_batch))
    inputs = Inputs(ids((n_batch,)), keys, ids((1,)), ids(()), knobs, method)
    state = PREFILL.shapes(engine.weights, ids((n_batch, n_padded)), inputs, **static)
    static = {"spec": engine.spec, "mesh": engine.mesh, "n_read": static["capacity"]}
    return CHUNK.shapes(engine.weights, state, inputs, ids(()), **static)


def _prefill_static(
    engine: Engine, n_padded: int, longest: int, max_new_tokens: int
) -> dict[str, Any]:
    """What a prefill is compiled for besides its arguments' shapes."""
    spec = engine.spec
    return {
        "spec": spec,
        "mesh": engine.mesh,
        "capacity": cache_capacity(spec, n_padded, longest, max_new_tokens),
        "n_slots": -(-(max_new_tokens + spec.n_stages) // TOKEN_BUCKET) * TOKEN_BUCKET,
    }


def chunk(
    engine: Engine, state: PipelineState, inputs: Inputs, n_cycles: int, n_read: int | None = None
) -> Callable[[PipelineState], PipelineState]:
    """Compiles a chunk of up to n_cycles; calling what is returned with a state runs it.

    Args:
      n_read: cache positions that attention reads, no fewer than are in use before the last cycle;
        None: all.

    The state is donated, and the call blocks: the CPU backend deadlocks on queued collectives.
    """
    tail = (inputs, jnp.int32(n_cycles))
    static = {"spec": engine.spec, "mesh": engine.mesh, "n_read": n_read or capacity_of(state)}
    program = CHUNK.compile(engine.weights, state, *tail, **static)
    return lambda state: jax.block_until_ready(program(engine.weights, state, *tail))


def compact(
    engine: Engine, state: PipelineState, inputs: Inputs, kept: list[int]
) -> tuple[PipelineState, Inputs]:
    """Returns the batch of the sequences `kept`, padded with finished ones to its bucket."""
    padding = bucket_batch(len(kept)) - len(kept)
    idx = jnp.asarray([*kept, *[kept[0]] * padding], jnp.int32)
    return COMPACT(state, inputs, idx, jnp.int32(len(kept)), mesh=engine.mesh)


def _run_prefill(weights, prompts, inputs, *, spec, mesh, capacity, n_slots):
    def fn(comm, weights, prompts, inputs):
        dtype = weights.heads.embed.dtype
        caches = empty_caches(spec, comm, prompts.shape[0], capacity, dtype)
        return run_prefill(spec, comm, weights, caches, prompts, inputs, n_slots)

    return on_ranks(fn, spec, mesh, weights, prompts, inputs)


def _run_chunk(weights, state, inputs, n_cycles, *, spec, mesh, n_read):
    def fn(comm, weights, state, inputs, n_cycles):
        def go_on(carry):
            i, state = carry
            return (i < n_cycles) & ~jnp.all(state.done)

        def body(carry):
            i, state = carry
            return i + 1, run_cycle(spec, comm, weights, state, inputs, n_read)

        return lax.while_loop(go_on, body, (jnp.int32(0), state))[1]

    return on_ranks(fn, spec, mesh, weights, state, inputs, n_cycles)


def _run_compact(state, inputs, idx, n_kept, *, mesh):
    def take(axis: int) -> Callable:
        return lambda x: jnp.take(x, idx, axis=axis)

    by_rank = jax.tree.map(take(0 if mesh is None else 1), per_rank(state))
    rest = jax.tree.map(take(0), dataclasses.replace(state, hidden=None, **NO_RANKS))
    done = rest.done | (jnp.arange(idx.shape[0]) >= n_kept)
    rest = dataclasses.replace(rest, hidden=take(1)(state.hidden), done=done)
    script = inputs.script
    if script is not None:
        script = dataclasses.replace(
            script, tokens=take(0)(script.tokens), n_tokens=take(0)(script.n_tokens)
        )
    inputs = dataclasses.replace(
        inputs,
        prompt_lens=take(0)(inputs.prompt_lens),
        keys=take(0)(inputs.keys),
        script=script,
    )
    if mesh is not None:
        by_rank = lax.with_sharding_constraint(by_rank, NamedSharding(mesh, ON_RANK))
        rest, inputs = lax.with_sharding_constraint((rest, inputs), NamedSharding(mesh, EVERYWHERE))
    return dataclasses.replace(rest, **by_rank), inputs


def per_rank(state: PipelineState) -> dict[str, Any]:
    """The fields of a state that differ by rank."""
    return {name: getattr(state, name) for name in PER_RANK}


def on_ranks(fn: Callable, spec: EngineSpec, mesh: Mesh | None, *args) -> PipelineState:
    """Runs fn(comm, *args) once, or on every rank of the mesh with that rank's blocks."""
    if mesh is None:
        return fn(LocalComm(spec.n_stages), *args)
    specs = tuple(_partition(arg) for arg in args)

    def on_rank(*args):
        local = [
            jax.tree.map(lambda s, x: _unblock(s, x), spec_tree, arg)
            for spec_tree, arg in zip(specs, args, strict=True)
        ]
        state = fn(MeshComm(spec.n_stages), *local)
        return dataclasses.replace(state, **jax.tree.map(lambda x: x[None], per_rank(state)))

    return jax.shard_map(on_rank, mesh=mesh, in_specs=specs, out_specs=STATE_SPECS, check_vma=True)(
        *args
    )


def _partition(arg) -> PartitionSpec | EngineWeights | PipelineState:
    """Partition of an argument of a program, as a prefix of its tree."""
    if isinstance(arg, EngineWeights):
        return weight_specs(arg)
    return STATE_SPECS if isinstance(arg, PipelineState) else EVERYWHERE


def _unblock(spec: PartitionSpec, tree):
    """Drops the rank axis of sharded leaves: [1, ...] -> [...]."""
    return jax.tree.map(lambda x: x[0], tree) if spec == ON_RANK else tree


PER_RANK = ("caches", "proposals")  # fields of the state that differ by rank
NO_RANKS = dict.fromkeys(PER_RANK)
STATE_SPECS = PipelineState(
    **{
        f.name: ON_RANK if f.name in PER_RANK else EVERYWHERE
        for f in dataclasses.fields(PipelineState)
    }
)
PREFILL = Program(_run_prefill)
CHUNK = Program(_run_chunk, donate=(1,))
COMPACT = Program(_run_compact)
