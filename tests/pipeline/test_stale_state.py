"""What a rollback leaves behind is never read: with all of it poisoned nothing changes.

Rolling back moves integers and clears nothing. Before every cycle, everything that the state's
integers do not vouch for is overwritten, and the run must go on as a run left alone does.
"""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from tests.pipeline.conftest import MESHES
from tests.pipeline.stepping import Stepper, start
from tests.random_models import full_config, make_draft, make_prompt, make_target

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STAGES = {"virtual": 4, "sharded": 3}  # the programs of test_lossless.py
POISON = 1e4  # finite: a masked NaN would still spoil a product


def valid_rows(n: int, rank: int, newest: int, fill: int) -> int:
    """How many cache rows of a rank are of tokens that are verified or have passed it.

    Stage s runs position p - s in this cycle; where the pipeline is not that full, what reaches
    it next is the oldest token in flight. The draft module's rows are those of completed tokens.
    """
    return newest - fill if rank == n else newest - min(rank, fill - 1)


def poison(run: Stepper) -> dict[str, int]:
    """Overwrites all that is stale; returns how many values of each kind that were."""
    state, n = run.state, run.engine.spec.n_stages
    newest, fill, done = (np.asarray(x) for x in (state.newest, state.fill, state.done))
    types = run.engine.spec.row_types
    rng = np.random.default_rng(int(newest.sum()))
    counts = dict.fromkeys(("caches", "hidden", "ring", "tokens"), 0)

    def spoil(kind: str, view: np.ndarray) -> None:
        view[...] = POISON * rng.choice([-1, 1], view.shape)
        counts[kind] += view.size

    def rank_rows(caches, rank):  # a mesh's leaves have a leading axis of ranks
        slots = caches[0] if run.engine.mesh is not None else caches[rank]
        for cache in itertools.chain.from_iterable(slots.values()):
            yield {k: v[rank] if run.engine.mesh is not None else v for k, v in cache.items()}

    fields = ("caches", "hidden", "ring", "tokens")
    placed = {name: getattr(state, name) for name in fields}
    host = jax.tree.map(np.array, placed)
    for b in range(len(newest)):
        p, f = (0, 0) if done[b] else (int(newest[b]), int(fill[b]))
        for rank in range(n + 1):
            valid = 0 if done[b] else valid_rows(n, rank, p, f)
            for cache in rank_rows(host["caches"], rank):
                if "k" in cache:
                    spoil("caches", cache["k"][b, :, :, valid:])
                    spoil("caches", cache["v"][b, :, valid:])
                else:
                    # A reject goes back to the state after a position in flight but the newest.
                    needed = range(min(valid - 1, p - f + 1), 0 if done[b] else valid)
                    stale = sorted(set(range(n + 1)) - {x % n for x in needed})
                    for x in cache.values():
                        for slot in stale:
                            spoil("caches", x[b, slot])
        for stage in range(f, n):
            spoil("hidden", host["hidden"][stage, b])
        for slot in range(n + 1):
            age = (p - slot) % (n + 1)  # of the position that lies there, if it is in use
            readable = 0 if age > f or done[b] else types[n if age == f else age] + 1
            spoil("ring", host["ring"][b, slot, readable:])
        if not done[b]:
            unused = slice(p + 1 - int(run.inputs.prompt_lens[b]), None)
            host["tokens"][b, unused] = -7
            counts["tokens"] += host["tokens"][b, unused].size
    fresh = jax.tree.map(lambda x, old: jax.device_put(x, old.sharding), host, placed)
    run.state = dataclasses.replace(state, **fresh)
    return counts


@pytest.mark.parametrize("kind", ["even", "random", "perfect", "hybrid"])
@pytest.mark.parametrize("lens", [(5,), (1, 9, 4, 2, 7)], ids=["alone", "batch"])
def test_poison_in_everything_stale_changes_nothing(mode, kind, lens, golden_pair):
    if kind == "hybrid":  # with states of delta-nets to go back to; about half of its drafts hold
        n, (target, draft) = 4, golden_pair("qwen3_5/n4")
    else:
        n = STAGES[mode]
        target = make_target(4, seed=n)
        draft = make_draft(target, full_config(4, n), kind)
    prompts = [make_prompt(length, seed=1) for length in lens]
    clean, spoilt = (start(target, draft, prompts, 40, MESHES[mode]) for _ in range(2))
    assert clean.engine.mode == mode
    fills, spoilt_kinds = set(), set()
    for _ in range(25 * n):
        fills |= set(np.asarray(spoilt.state.fill).tolist())
        spoilt_kinds |= {kind for kind, count in poison(spoilt).items() if count}
        clean.run()
        spoilt.run()
        for row in range(len(lens)):
            assert spoilt.committed(row) == clean.committed(row)
            # The drafts in flight are the same too.
            in_flight = slice(int(clean.state.newest[row]) + 1 - lens[row])
            a, b = (np.asarray(run.state.tokens[row, in_flight]) for run in (clean, spoilt))
            np.testing.assert_array_equal(a, b)
    assert fills == set(range(1, n + 1))
    assert spoilt_kinds == {"caches", "hidden", "ring", "tokens"}
    if kind != "perfect":
        assert all(clean.committed(row)[1].count(False) > 3 for row in range(len(lens)))


def test_poison_in_what_is_in_use_does_change_the_text(mode):
    """One row of the prompt, in the first layer of every stage: the test above can fail."""
    n = STAGES[mode]
    target = make_target(4, seed=n)
    draft = make_draft(target, full_config(4, n), "even")
    clean, spoilt = (start(target, draft, [make_prompt(5)], 40, MESHES[mode]) for _ in range(2))
    for rank in range(n):
        caches = jax.tree.map(np.array, spoilt.state.caches)
        if mode == "sharded":
            caches[0]["attention"][0]["v"][rank, 0, :, 4] = POISON
        else:
            caches[rank]["attention"][0]["v"][0, :, 4] = POISON
        placed = jax.tree.map(
            lambda x, old: jax.device_put(x, old.sharding), caches, spoilt.state.caches
        )
        spoilt.state = dataclasses.replace(spoilt.state, caches=placed)
    clean.run(25 * n)
    spoilt.run(25 * n)
    assert spoilt.committed() != clean.committed()
