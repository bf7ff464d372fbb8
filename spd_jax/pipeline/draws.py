"""What the heads name in a cycle: the target's token at the position that is verified, by the
hidden state that leaves, and the draft's token for the next position.

    hidden -> logits -> cuts (a collective, where sampling needs one) -> draws -> winners (another)

Rejection sampling accepts a draft x of q with probability min(1, p(x) / q(x)) and draws from
max(0, p - q) where it does not; `coupled` takes the best of log p and of log q plus the same noise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from spd_jax.models.cache import write_each
from spd_jax.ops import sampling
from spd_jax.ops.sampling import GREEDY
from spd_jax.pipeline.comm import Comm
from spd_jax.pipeline.heads import Heads, choose, logits, pick
from spd_jax.pipeline.spec import EngineSpec
from spd_jax.pipeline.state import Inputs, PipelineState, Proposals
from spd_jax.pipeline.synthetic import replace_draft

Head = tuple[jax.Array, jax.Array]  # a shard's logits float32 [B, n], and its ids int32 [n]
Draw = Callable[[], jax.Array]  # gives float32 [B, n], of which the largest is what is drawn


def first_tokens(
    comm: Comm, heads: Heads, inputs: Inputs, hidden: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Draws what follows the prompts, from the target alone, as `generate` does.

    Args:
      hidden: [B, D], of the last prompt positions.
    Returns:
      ids int32 [B] and their embedding rows [B, D].
    """
    rows, ids = heads.target_rows()
    head = logits(heads, hidden, rows, ids), ids
    everywhere = jnp.ones(len(hidden), bool)
    (draw,) = _noisy(comm, inputs, [(head, inputs.prompt_lens, everywhere)])
    first, rows = choose(comm, pick(heads, comm, draw(), ids)[None], hidden.dtype)
    return first[0], rows[0]


def name_tokens(
    spec: EngineSpec,
    comm: Comm,
    heads: Heads,
    state: PipelineState,
    inputs: Inputs,
    leaving: jax.Array,
    drafted: jax.Array,
) -> tuple[jax.Array, jax.Array, Proposals | None]:
    """Names the target's token and the draft's.

    Args:
      leaving, drafted: hidden states [B, D] of the token that leaves and of the PDM's newest row.
    Returns:
      ids int32 [2, B], their embedding rows [2, B, D] (of the target's, where its id is not that
      of the draft it was verified with), and the new proposals.
    """
    packed, accepted, proposals = pack_draws(spec, comm, heads, state, inputs, leaving, drafted)
    ids, rows = choose(comm, packed, leaving.dtype)
    if accepted is not None:
        ids = ids.at[0].set(jnp.where(accepted, _verified(spec, state, inputs), ids[0]))
    return ids, rows, proposals


def pack_draws(
    spec: EngineSpec,
    comm: Comm,
    heads: Heads,
    state: PipelineState,
    inputs: Inputs,
    leaving: jax.Array,
    drafted: jax.Array,
) -> tuple[jax.Array, jax.Array | None, Proposals | None]:
    """Draws on this shard what `name_tokens` chooses from.

    Returns:
      int32 [2, B, 2 + D], the target's and the draft's best as `heads.pick` packs them; bool [B],
      the verified draft is accepted whatever the first is (None: not rejection sampling); and the
      new proposals.
    """
    method, running = inputs.method, ~state.done
    full = running & (state.fill == spec.n_stages)
    any_full, any_running = jnp.any(full), jnp.any(running)
    checked, new = state.newest - spec.n_stages + 2, state.newest + 1  # the positions
    target = _logits_if(any_full, comm, heads, leaving, heads.target_rows())
    draft = _logits_if(any_running, comm, heads, drafted, heads.draft_rows())
    proposals, accepted = state.proposals, None
    if method.verifier == "rejection":
        there = _verified(spec, state, inputs)
        draws, accepted, proposals = _rejection(
            comm, heads, state, inputs, (target, checked), (draft, new), there, full
        )
        any_full = jnp.any(full & ~accepted)  # nothing is drawn in place of what is accepted
    else:
        draws = _noisy(comm, inputs, [(target, checked, full), (draft, new, running)])
    best, proposed = (
        _pick_if(active, comm, heads, draw, ids)
        for active, draw, (_, ids) in zip(
            (any_full, any_running), draws, (target, draft), strict=True
        )
    )
    if inputs.script is not None:
        assert accepted is None, "rejection sampling must know what drafts were drawn from"
        proposed = replace_draft(
            comm, heads, inputs.script, proposed, inputs.keys, new - inputs.prompt_lens, new
        )
    return jnp.stack([best, proposed]), accepted, proposals


def empty_proposals(spec: EngineSpec, comm: Comm, heads: Heads, inputs: Inputs) -> Proposals | None:
    """Returns the proposals before the first draft; None where none are kept."""
    if inputs.method.verifier != "rejection":
        return None
    n_batch, (_, ids) = len(inputs.prompt_lens), heads.draft_rows()
    shape = (n_batch, spec.n_stages, len(ids))
    return Proposals(comm.zeros(shape, jnp.float32), comm.zeros((n_batch,), jnp.float32))


def _noisy(
    comm: Comm, inputs: Inputs, drawn: list[tuple[Head, jax.Array, jax.Array]]
) -> list[Draw]:
    """Draws of heads, greedy or with the noise that target and draft share.

    Args:
      drawn: heads, the positions [B] they name tokens for, and bool [B], where these are of use.
    """
    method = inputs.method
    heads, positions, needed = map(list, zip(*drawn, strict=True))
    if method == GREEDY:
        return [lambda found=found: found for found, _ in heads]
    if method.n_candidates:
        cuts, _ = sampling.find_cuts(heads, method, inputs.knobs, comm.gather_shards, needed)
        pairs = zip(heads, cuts, strict=True)
        heads = [(sampling.keep(found, ids, cut), ids) for (found, ids), cut in pairs]

    def draw(head: Head, positions: jax.Array) -> jax.Array:
        found, ids = head
        keys, knobs = inputs.keys, inputs.knobs
        return sampling.noisy(found, keys, sampling.COUPLED, positions, ids, knobs)

    return [functools.partial(draw, head, at) for head, at in zip(heads, positions, strict=True)]


def _rejection(
    comm: Comm,
    heads: Heads,
    state: PipelineState,
    inputs: Inputs,
    target_at: tuple[Head, jax.Array],
    draft_at: tuple[Head, jax.Array],
    there: jax.Array,
    full: jax.Array,
) -> tuple[list[Draw], jax.Array, Proposals]:
    """Decides on the drafts `there` [B], and draws what replaces them and what is drafted next.

    Args:
      target_at, draft_at: a head and the positions [B] that it names tokens for.
      full: bool [B], where `there` is verified at all.
    Returns:
      The draws, bool [B] accepted, and the new proposals.
    """
    (target, checked), (draft, new) = target_at, draft_at
    (p_logits, p_ids), (q_logits, q_ids) = target, draft
    proposals, knobs = state.proposals, inputs.knobs
    n_slots = proposals.log_q.shape[1]
    slot = jnp.mod(checked, n_slots)[:, None, None]
    log_q = jnp.take_along_axis(proposals.log_q, slot, axis=1)[:, 0]

    def of_draft(found: jax.Array, ids: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(ids == there[:, None], found, 0), axis=1)

    notes = jnp.stack([of_draft(p_logits, p_ids), of_draft(log_q, q_ids)], axis=1)
    (p_cut, q_cut), notes = sampling.find_cuts(
        [target, draft], inputs.method, knobs, comm.gather_shards, [full, ~state.done], notes
    )
    log_p = sampling.log_probabilities(notes[:, :1], there[:, None], p_cut, knobs)[:, 0]
    u = sampling.uniform(inputs.keys, sampling.ACCEPT, checked)
    accepted = u * jnp.exp(notes[:, 1]) < jnp.exp(log_p)

    def both() -> tuple[jax.Array, jax.Array]:
        """Log p and q of the target's ids."""
        log_p = sampling.log_probabilities(p_logits, p_ids, p_cut, knobs)
        q = jnp.exp(log_q)
        if heads.draft_ids is not None:  # else it lies as the target's
            q = jnp.where(q_ids >= 0, q, 0)
            q = jnp.zeros_like(log_p).at[:, q_ids // comm.n_shards].add(q)
        return log_p, q

    def overlap() -> jax.Array:
        log_p, q = both()
        return jnp.where(full, jnp.sum(jnp.minimum(jnp.exp(log_p), q), axis=1), 0)

    fresh = sampling.log_probabilities(q_logits, q_ids, q_cut, knobs)
    written = write_each(
        {"log_q": proposals.log_q}, {"log_q": fresh[:, None]}, jnp.mod(new, n_slots), {"log_q": 1}
    )

    def replacement() -> jax.Array:
        noise = sampling.gumbel(inputs.keys, sampling.RESIDUAL, checked, p_ids)
        return sampling.residual_scores(*both()) + noise

    def proposal() -> jax.Array:
        return fresh + sampling.gumbel(inputs.keys, sampling.DRAFT, new, q_ids)

    none = comm.zeros(full.shape, jnp.float32)
    total = proposals.overlap + lax.cond(jnp.any(full), overlap, lambda: none)
    return [replacement, proposal], accepted, Proposals(written["log_q"], total)


def _logits_if(active: jax.Array, comm: Comm, heads: Heads, hidden: jax.Array, head: Head) -> Head:
    """A head's logits where the scalar `active` holds, else zeros: see `models.target.run_if`.

    Args:
      hidden: [B, D]; head: its rows [n, D] and their ids.
    """
    rows, ids = head
    found = lax.cond(
        active,
        lambda: logits(heads, hidden, rows, ids),
        lambda: comm.zeros((len(hidden), len(ids)), jnp.float32),
    )
    return found, ids


def _pick_if(active: jax.Array, comm: Comm, heads: Heads, draw: Draw, ids: jax.Array) -> jax.Array:
    """Returns a draw as `pick` packs it, zeros where the scalar `active` does not hold."""
    shape = jax.eval_shape(lambda: pick(heads, comm, draw(), ids))
    return lax.cond(
        active,
        lambda: pick(heads, comm, draw(), ids),
        lambda: comm.zeros(shape.shape, shape.dtype),
    )


def _verified(spec: EngineSpec, state: PipelineState, inputs: Inputs) -> jax.Array:
    """The drafts int32 [B] that are verified in this cycle, where the pipeline is full."""
    index = state.newest - spec.n_stages + 2 - inputs.prompt_lens
    return state.tokens[jnp.arange(len(index)), jnp.maximum(index, 0)]
