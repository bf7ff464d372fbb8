"""Every collective of the engine, behind a few verbs with two implementations.

`MeshComm` runs inside `jax.shard_map`, one rank per device of the axis `stage`; `LocalComm` runs
all ranks on one device. Cycle code is written once against the verbs. No verb may be called
inside a branch or loop whose predicate differs by rank: it would hang.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spd_jax.pipeline.slots import unpack_layers

AXIS = "stage"
Branch = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class LocalComm:
    """All N + 1 ranks on one device; the heads are one shard."""

    n_stages: int

    @property
    def n_shards(self) -> int:
        """How many shards the heads are cut into."""
        return 1

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks computed here, in order."""
        return tuple(range(self.n_stages + 1))

    def shard(self) -> int:
        """Which shard of the heads is here."""
        return 0

    def gather_ranks(self, parts: list[jax.Array]) -> jax.Array:
        """Joins one array [...] per rank into [N + 1, ...]."""
        return jnp.stack(parts)

    def gather_shards(self, part: jax.Array) -> jax.Array:
        """Joins one array [...] per shard of the heads into [n_shards, ...]."""
        return part[None]

    def sum_shards(self, part: jax.Array) -> jax.Array:
        """Sums one array per shard of the heads."""
        return part

    def run(
        self, rank: int, active: jax.Array, works: Sequence[Branch], work_of: Sequence[int]
    ) -> Any:
        """Runs works[work_of[rank]], or returns zeros where the rank has none in this step."""
        work = works[work_of[rank]]
        return lax.cond(active, work, lambda: _zeros(self, work))

    def zeros(self, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        """Returns zeros that a branch may return beside a rank's own results."""
        return jnp.zeros(shape, dtype)

    def select(self, table: Any, rank: int) -> Any:
        """Returns the rank's entry of a static table."""
        return table[rank]

    def n_slots(self, counts: Sequence[Counter]) -> list[Counter]:
        """Returns, per local rank, how many slots it has, of what each rank needs."""
        return list(counts)

    def layers(self, weights: Any, shapes: Sequence[dict]) -> list[dict]:
        """Returns a rank's layers, whose trees are those of `shapes`."""
        return weights


@dataclasses.dataclass(frozen=True)
class MeshComm:
    """One rank per device: ranks 0..N-1 run the stages, rank N the draft module."""

    n_stages: int

    @property
    def n_shards(self) -> int:
        return self.n_stages + 1

    @property
    def ranks(self) -> tuple[jax.Array]:
        return (lax.axis_index(AXIS),)

    def shard(self) -> jax.Array:
        return lax.axis_index(AXIS)

    def gather_ranks(self, parts: list[jax.Array]) -> jax.Array:
        return lax.all_gather(parts[0], AXIS, to="invarying")

    def gather_shards(self, part: jax.Array) -> jax.Array:
        return lax.all_gather(part, AXIS, to="invarying")

    def sum_shards(self, part: jax.Array) -> jax.Array:
        return lax.psum(part, AXIS)

    def run(
        self, rank: jax.Array, active: jax.Array, works: Sequence[Branch], work_of: Sequence[int]
    ) -> Any:
        idle = len(works)
        idx = jnp.where(active, jnp.asarray(work_of)[rank], idle)
        return lax.switch(idx, [*works, lambda: _zeros(self, works[0])])

    def zeros(self, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        return lax.pcast(jnp.zeros(shape, dtype), AXIS, to="varying")

    def select(self, table: Any, rank: jax.Array) -> jax.Array:
        return jnp.asarray(table)[rank]

    def n_slots(self, counts: Sequence[Counter]) -> list[Counter]:
        return [functools.reduce(operator.or_, counts)]  # the most that any rank needs

    def layers(self, weights: Any, shapes: Sequence[dict]) -> list[dict]:
        return unpack_layers(weights, shapes)


Comm = LocalComm | MeshComm


def _zeros(comm: Comm, work: Branch) -> Any:
    return jax.tree.map(lambda x: comm.zeros(x.shape, x.dtype), jax.eval_shape(work))
