"""Choosing tokens from logits: temperature, top-k, top-p, and draws by Gumbel noise.

    logits -> Cut (what top-k and top-p keep, and its normaliser) -> logits / T + noise -> argmax

A vocabulary may be cut into shards: a Cut is found from a few candidates of each and applied to
each by itself. Noise depends on the sequence's key, the stream, the position and the id alone,
never on neighbours, batch size or shards.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spd_jax.config import SamplingConfig

# Streams of random numbers, independent of each other.
DRAFT, ACCEPT, RESIDUAL, COUPLED, SYNTHETIC = range(5)
CANDIDATES = 64  # sent by each shard at least, where something is filtered
TOP_P_CANDIDATES = 256  # where top-p alone filters
LEAST = 1e-30  # a smaller top_p would be 0 in float32, and keep nothing
OFF = 2.0  # a top_p that keeps all: sums of probabilities may round to more than 1
FALLBACK = 1e4  # see `residual_scores`


@dataclasses.dataclass(frozen=True)
class Method:
    """What a program is compiled for: all of a SamplingConfig that is not a traced number."""

    verifier: Literal["greedy", "rejection", "coupled"]
    n_candidates: int = 0  # ids that each shard sends to find the cut; 0: nothing is filtered
    has_top_k: bool = False


GREEDY = Method("greedy")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["temperature", "top_k", "top_p"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Knobs:
    """The numbers of a SamplingConfig, traced: no program is compiled for their values."""

    temperature: jax.Array  # float32 scalar, above 0; 1 where greedy
    top_k: jax.Array  # int32 scalar, 0: off
    top_p: jax.Array  # float32 scalar, OFF: off


class Cut(NamedTuple):
    """What is kept of a distribution: ids with logits above `value`, or equal and up to `last`."""

    value: jax.Array  # float32 [B]
    last: jax.Array  # int32 [B]
    top: jax.Array  # float32 [B], the highest logit
    log_total: jax.Array  # float32 [B], log of the sum of exp((logit - top) / T) over what is kept


def plan(sampling: SamplingConfig, vocab_size: int) -> tuple[Method, Knobs]:
    """Splits settings into what a program is compiled for and what it is given.

    `top_k` is compiled for in powers of two, so that few programs serve many values.
    """
    if sampling.temperature == 0:
        return GREEDY, Knobs(jnp.float32(1), jnp.int32(0), jnp.float32(OFF))
    top_k = sampling.top_k if sampling.top_k < vocab_size else 0
    top_p = max(sampling.top_p, LEAST) if sampling.top_p < 1 else OFF
    n_candidates = 0
    if top_k:  # one more than top_k: it shows whether a tie is cut off
        n_candidates = max(CANDIDATES, 1 << (top_k - 1).bit_length()) + 1
    elif top_p < 1:
        n_candidates = TOP_P_CANDIDATES
    method = Method(sampling.verifier, n_candidates, bool(top_k))
    return method, Knobs(jnp.float32(sampling.temperature), jnp.int32(top_k), jnp.float32(top_p))


def argmax_lowest(logits: jax.Array) -> jax.Array:
    """Returns the int32 index of the largest value of the last axis, the lowest on ties."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


class Survey(NamedTuple):
    """What one shard says of its part of a distribution."""

    top: jax.Array  # float32 [B], its highest logit
    total: jax.Array  # float32 [B], `_total` of all its ids
    values: jax.Array  # float32 [B, n], its best logits, falling
    ids: jax.Array  # int32 [B, n]


def survey(logits: jax.Array, ids: jax.Array, n: int, knobs: Knobs) -> Survey:
    """Returns a shard's best n ids, or all where it has no more.

    Args:
      logits: float32 [B, m], -inf where there is no id; ids: int32 [m], rising, -1 for none.
    """
    values, idx = lax.top_k(logits, min(n, logits.shape[-1]))
    top = jnp.max(logits, axis=-1)
    finite = jnp.where(top > -jnp.inf, top, 0)  # a shard may have no ids
    return Survey(top, _total(logits, finite, knobs), values, ids[idx])


def find_cut(found: Survey, method: Method, knobs: Knobs) -> tuple[Cut, jax.Array]:
    """Finds what top-k and top-p keep, from the surveys of all shards.

    Top-k keeps every id that is tied with the k-th; top-p orders by logit, the lowest id first on
    ties, and keeps an id while the sum of the probabilities before it is less than top_p.

    Args:
      found: with a leading axis of shards.
    Returns:
      The cut, and bool [B]: True where ids that a shard did not send may decide on it.
    """
    top = jnp.max(found.top, axis=0)
    total = jnp.sum(found.total * jnp.exp((found.top - top) / knobs.temperature), axis=0)
    if not method.n_candidates:
        low = jnp.full_like(top, -jnp.inf)
        cut = Cut(low, jnp.zeros_like(top, jnp.int32), top, jnp.log(total))
        return cut, jnp.zeros(top.shape, bool)
    values, ids = (jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1) for x in (found.values, found.ids))
    falling, ids = lax.sort((-values, ids), num_keys=2)
    values = -falling
    is_kept, last_sent = values > -jnp.inf, jnp.max(found.values[..., -1], axis=0)
    if method.has_top_k:
        kth = jnp.clip(knobs.top_k, 1, values.shape[1]) - 1
        kth = lax.dynamic_slice_in_dim(values, kth, 1, axis=1)
        is_kept &= values >= kth
        total = _total(jnp.where(is_kept, values, -jnp.inf), top, knobs)
    before = jnp.cumsum(_weights(values, top, knobs) / total[:, None], axis=1)[:, :-1]
    is_kept &= jnp.pad(before, ((0, 0), (1, 0))) < knobs.top_p
    end = jnp.sum(is_kept, axis=1, keepdims=True) - 1
    value, last = (jnp.take_along_axis(x, end, axis=1)[:, 0] for x in (values, ids))
    total = _total(jnp.where(is_kept, values, -jnp.inf), top, knobs)
    least = kth[:, 0] if method.has_top_k else value  # all ids from here on must be known
    return Cut(value, last, top, jnp.log(total)), last_sent >= least


def _weights(logits: jax.Array, top: jax.Array, knobs: Knobs) -> jax.Array:
    """Probabilities without their normaliser; the difference comes first: it loses no digits."""
    return jnp.exp((logits - top[:, None]) / knobs.temperature)


def _total(logits: jax.Array, top: jax.Array, knobs: Knobs) -> jax.Array:
    return jnp.sum(_weights(logits, top, knobs), axis=-1)


def find_cuts(
    heads: Sequence[tuple[jax.Array, jax.Array]],
    method: Method,
    knobs: Knobs,
    gather: Callable[[jax.Array], jax.Array],
    needed: Sequence[jax.Array] | None = None,
    notes: jax.Array | None = None,
) -> tuple[list[Cut], jax.Array | None]:
    """Finds the cuts of several distributions in one exchange between the shards.

    A second one follows where ids that a shard did not send may be within a cut: ties at the
    k-th value, or a top-p that reaches far. It sends all ids.

    Args:
      heads: of each distribution this shard's logits and ids, as for `survey`.
      gather: joins an int32 [B, w] of each shard into [shards, B, w].
      needed: bool [B] of each distribution, the rows whose cut is of use; None: all.
      notes: float32 [B, k], to be exchanged too.

    Returns:
      The cuts, and the sum over the shards of their notes.
    """

    def exchange(n: int, notes: jax.Array | None) -> tuple[list[Survey], jax.Array | None]:
        tree = [survey(*head, n, knobs) for head in heads], notes
        gathered = gather_packed(tree, gather)
        return gathered[0], None if notes is None else jnp.sum(gathered[1], axis=0)

    found, notes = exchange(method.n_candidates, notes)
    cuts, missed = zip(*(find_cut(one, method, knobs) for one in found), strict=True)
    most = max(len(ids) for _, ids in heads)
    if not 0 < method.n_candidates < most:
        return list(cuts), notes
    if needed is not None:
        missed = [m & rows for m, rows in zip(missed, needed, strict=True)]
    sent = [one.ids.shape[-1] == len(ids) for one, (_, ids) in zip(found, heads, strict=True)]
    missed = [m & (not all_sent) for m, all_sent in zip(missed, sent, strict=True)]

    def exact() -> list[Cut]:
        whole = [find_cut(one, method, knobs)[0] for one in exchange(most, None)[0]]
        # A row that missed nothing keeps its cut, to the last bit: neighbours do not enter it.
        return [
            Cut(*(jnp.where(m, new, old) for new, old in zip(better, cut, strict=True)))
            for m, better, cut in zip(missed, whole, cuts, strict=True)
        ]

    any_missed = functools.reduce(jnp.logical_or, map(jnp.any, missed))
    return lax.cond(any_missed, exact, lambda: list(cuts)), notes


def gather_packed(tree: Any, gather: Callable[[jax.Array], jax.Array]) -> Any:
    """Joins trees of float32 and int32 arrays [B] or [B, w] over shards by one `gather`."""
    leaves, treedef = jax.tree.flatten(tree)
    columns = [x.reshape(len(x), -1) for x in leaves]
    packed = jnp.concatenate([lax.bitcast_convert_type(x, jnp.int32) for x in columns], axis=1)
    ends = np.cumsum([x.shape[1] for x in columns])[:-1]
    parts = jnp.split(gather(packed), ends, axis=-1)
    joined = [
        lax.bitcast_convert_type(part, leaf.dtype).reshape(len(part), *leaf.shape)
        for part, leaf in zip(parts, leaves, strict=True)
    ]
    return jax.tree.unflatten(treedef, joined)


def keep(logits: jax.Array, ids: jax.Array, cut: Cut) -> jax.Array:
    """Returns the logits [B, m] of a shard with -inf where a cut leaves the id out."""
    value, last = cut.value[:, None], cut.last[:, None]
    is_kept = (logits > value) | ((logits == value) & (ids <= last))
    return jnp.where(is_kept, logits, -jnp.inf)


def log_probabilities(logits: jax.Array, ids: jax.Array, cut: Cut, knobs: Knobs) -> jax.Array:
    """Returns the filtered distribution's log-probabilities [B, m] of a shard's ids."""
    differences = keep(logits, ids, cut) - cut.top[:, None]
    return differences / knobs.temperature - cut.log_total[:, None]


def residual_scores(log_p: jax.Array, q: jax.Array) -> jax.Array:
    """Returns log max(0, p - q) of log_p and q [B, m].

    Where rounding leaves nothing in all of it, ids of p have their chances below everything else.
    """
    left = jnp.exp(log_p) - q
    return jnp.where(left > 0, jnp.log(jnp.where(left > 0, left, 1)), log_p - FALLBACK)


def gumbel(keys: jax.Array, stream: int, positions: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns Gumbel noise float32 [B, m] of ids int32 [m] at positions int [B].

    64 random bits each: with 32 the largest values, which decide, would be coarse steps.
    """

    def row(key: jax.Array, position: jax.Array) -> jax.Array:
        key = at_position(key, stream, position)
        bits = jax.random.key_data(jax.vmap(jax.random.fold_in, (None, 0))(key, ids))
        high, low = (bits[:, i].astype(jnp.float32) for i in (0, 1))
        rare = high * 2.0**-32 + (low + 0.5) * 2.0**-64  # uniform; exact where it is small
        return -jnp.log(-jnp.log1p(-jnp.minimum(rare, 1 - 2.0**-24)))

    return jax.vmap(row)(keys, positions)


def uniform(keys: jax.Array, stream: int, positions: jax.Array) -> jax.Array:
    """Returns float32 [B] from [0, 1), one for each position."""
    return jax.vmap(lambda k, p: jax.random.uniform(at_position(k, stream, p)))(keys, positions)


def at_position(key: jax.Array, stream: int, position: jax.Array) -> jax.Array:
    """Returns the key of a position's draws in one stream."""
    return jax.random.fold_in(jax.random.fold_in(key, stream), position)


def sample(
    logits: jax.Array, keys: jax.Array, positions: jax.Array, method: Method, knobs: Knobs
) -> jax.Array:
    """Draws one id per sequence from a whole vocabulary, with the noise of coupled decoding.

    Args:
      logits: float32 [B, V]; keys: typed threefry keys [B]; positions: int [B], of the new tokens.

    Returns:
      int32 [B].
    """
    if method.verifier == "greedy":
        return argmax_lowest(logits)
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    if method.n_candidates:
        (cut,), _ = find_cuts([(logits, ids)], method, knobs, lambda part: part[None])
        logits = keep(logits, ids, cut)
    return argmax_lowest(noisy(logits, keys, COUPLED, positions, ids, knobs))


def noisy(
    logits: jax.Array,
    keys: jax.Array,
    stream: int,
    positions: jax.Array,
    ids: jax.Array,
    knobs: Knobs,
) -> jax.Array:
    """Returns logits [B, m] over the temperature and with noise: the best is what is drawn."""
    return logits / knobs.temperature + gumbel(keys, stream, positions, ids)
