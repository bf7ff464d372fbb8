"""What the compiled chunk of cycles does: its collectives, its copies, how often it is compiled."""

import re

import jax.numpy as jnp
import pytest

import spd_jax
from spd_jax.pipeline import programs
from tests.pipeline.conftest import MESHES
from tests.pipeline.stepping import Stepper, start
from tests.pipeline.test_lossless import layers_for
from tests.random_models import full_config, make_draft, make_prompt, make_target

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all",
    "collective-broadcast", "ragged-all-to-all",
)  # fmt: skip
OPERATION = re.compile(r"= \(?(?:\w+\[[\d,]*\]\S*,? ?)+\)? ([\w\-]+)\(")
RESULT = re.compile(r"= \w+\[([\d,]*)\]\S* ([\w\-]+)\(")
PRODUCT = re.compile(r"= (\S+) (?:dot|custom-call)\(")  # of matrices; gives the result's shape
# What may give an array of a cache's shape: nothing here moves more than a row. A fusion is known
# by the operations inside it, which the text lists too.
IN_PLACE = {
    "parameter", "get-tuple-element", "bitcast", "dynamic-update-slice", "scatter", "fusion",
}  # fmt: skip


@pytest.fixture
def prefilled(n_stages, n_batch, mode) -> Stepper:
    """A batch before its first cycle; the programs of test_lossless.py."""
    target = make_target(layers_for(n_stages), seed=n_stages)
    draft = make_draft(target, full_config(target.config.n_layers, n_stages), "random")
    prompts = [make_prompt(3, seed=b) for b in range(n_batch)]
    return start(target, draft, prompts, 40, MESHES[mode])


def chunk_text(run: Stepper) -> str:
    """The compiled chunk of cycles, as text."""
    args = (run.engine.weights, run.state, run.inputs, jnp.int32(32))
    static = {"spec": run.engine.spec, "mesh": run.engine.mesh}
    n_read = programs.capacity_of(run.state)
    return programs.CHUNK.compile(*args, **static, n_read=n_read).as_text()


def operations(text: str) -> list[str]:
    """The name of every operation of a program, those inside fusions and branches too."""
    found = (OPERATION.search(line) for line in text.splitlines())
    return [match.group(1) for match in found if match]


def is_collective(operation: str) -> bool:
    return operation.removesuffix("-start") in COLLECTIVES


def cache_moves(text: str, shape: tuple[int, ...]) -> list[str]:
    """Lines, anywhere in a program, that give all of a cache [B, G, E, S] by moving it."""
    size, found = _sizes(shape), []
    for line in text.splitlines():
        match = RESULT.search(line)
        if match and _sizes(map(int, filter(None, match[1].split(",")))) == size:
            found += [line.strip()] if match[2] not in IN_PLACE else []
    return found


def _sizes(shape) -> list[int]:
    """Dimensions in any order, without those of one."""
    return sorted(n for n in shape if n > 1)


def all_moves(text: str, run: Stepper) -> list[str]:
    """`cache_moves` of all that one attention layer and one delta-net keep on one rank."""
    caches = {mixer: slots[0] for slots_of in run.state.caches for mixer, slots in slots_of.items()}
    leaves = [leaf for cache in caches.values() for leaf in cache.values()]
    shapes = [x.shape if run.engine.mesh is None else x.shape[1:] for x in leaves]
    return [move for shape in shapes for move in cache_moves(text, shape)]


def test_the_readers_see_what_they_look_for():
    text = (
        "  %a = f32[4,8]{1,0} all-gather(%x), dimensions={0}\n"
        "  %b = (f32[2]{0}, f32[4]{0}) all-reduce-start(%x, %y)\n"
        "  ROOT %c = f32[1,16,4,2]{1,0} copy(%z)\n"
        "  %d = f32[63]{0} transpose(%z), dimensions={0}\n"
        "  %e = f32[4,16,2]{1,0} select(%p, %q, %r)\n"
        "  %f = f32[1,2,4,16]{1,0} dynamic-update-slice(%p, %q, %r)\n"
    )
    assert [is_collective(name) for name in operations(text)] == [True, True] + 4 * [False]
    assert len(cache_moves(text, (1, 2, 4, 16))) == 2


@pytest.mark.parametrize("n_stages", [2, 5, 8])
@pytest.mark.parametrize("n_batch", [1, 5])
@pytest.mark.parametrize("mode", ["sharded"])
def test_a_sharded_cycle_has_two_collectives(prefilled, mode):
    assert prefilled.engine.mode == mode
    text = chunk_text(prefilled)
    collectives = [name for name in operations(text) if is_collective(name)]
    # The chunk is a loop over cycles and nothing else: all its collectives are the cycle's.
    assert len(collectives) == 2, collectives
    assert all_moves(text, prefilled) == []


@pytest.mark.parametrize("mode", MESHES)
def test_a_hybrid_cycle_has_as_few_collectives_and_copies(mode, golden_pair):
    """Stages of two delta-nets, and of a delta-net and attention, take turns."""
    run = start(*golden_pair("qwen3_5/n4"), [make_prompt(5)], 40, MESHES[mode])
    text = chunk_text(run)
    assert run.engine.mode == mode and len(run.engine.spec.patterns) == 2
    collectives = [name for name in operations(text) if is_collective(name)]
    assert len(collectives) == (2 if mode == "sharded" else 0), collectives
    assert all_moves(text, run) == []


@pytest.mark.parametrize("n_stages", [5])
@pytest.mark.parametrize("n_batch", [1, 5])
@pytest.mark.parametrize("mode", ["virtual"])
def test_a_virtual_cycle_copies_no_cache(prefilled, mode):
    assert prefilled.engine.mode == mode
    text = chunk_text(prefilled)
    assert not any(map(is_collective, operations(text)))
    assert all_moves(text, prefilled) == []


@pytest.mark.parametrize(("mode", "n"), [("virtual", 4), ("sharded", 3)])
def test_200_cycles_of_differing_fills_compile_one_program(mode, n):
    target = make_target(4, seed=n)
    draft = make_draft(target, full_config(4, n), "even")
    before, cycles, rejects = programs.CHUNK.n_compiled, 0, 0
    for length in range(1, 8):
        options = dict(max_new_tokens=40 + length, chunk_cycles=length, mesh=MESHES[mode])
        result = spd_jax.decode(target, draft, make_prompt(length), stop_ids=(), **options)
        assert result.stats.mode == mode
        cycles, rejects = cycles + result.cycles, rejects + result.stats.rejects
    assert cycles >= 200 and rejects > 20
    assert programs.CHUNK.n_compiled <= before + 1
