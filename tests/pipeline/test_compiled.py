"""What the compiled chunk of cycles does: its collectives, its copies, how often it is compiled."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

import spd_jax
from spd_jax.engines import build_engine
from spd_jax.pipeline import programs
from spd_jax.pipeline.state import Inputs
from spd_jax.requests import make_request
from tests.random_models import full_config, make_draft, make_prompt, make_target

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all",
    "collective-broadcast", "ragged-all-to-all",
)  # fmt: skip
OPERATION = re.compile(r"= \(?(?:\w+\[[\d,]*\]\S*,? ?)+\)? ([\w\-]+)\(")
RESULT = re.compile(r"= \w+\[([\d,]*)\]\S* ([\w\-]+)\(")


def compiled_chunk(n_stages: int, n_batch: int, mesh: str | None):
    """The program text of a chunk of cycles, and the size of one layer's key cache."""
    target = make_target(8, seed=n_stages)
    draft = make_draft(target, full_config(8, n_stages), "random")
    engine = build_engine(target, draft, n_stages, None, mesh, "auto")
    prompts = [make_prompt(3, seed=b) for b in range(n_batch)]
    request = make_request(target, prompts, 40, (), 0)
    inputs = Inputs(jnp.asarray(request.prompt_lens), jnp.asarray(request.stop_ids), jnp.int32(40))
    state = programs.prefill(engine, request.prompts, inputs, 40)()
    program = programs.CHUNK.compile(
        engine.weights, state, inputs, jnp.int32(32), spec=engine.spec, mesh=engine.mesh
    )
    n_ranks = 1 if engine.mesh is None else engine.mesh.devices.size
    return program.as_text(), state.caches[0][0]["k"].size // n_ranks


def operations(text: str) -> list[str]:
    """The name of every operation of a program, those inside fusions and branches too."""
    found = (OPERATION.search(line) for line in text.splitlines())
    return [match.group(1) for match in found if match]


def is_collective(operation: str) -> bool:
    return operation.removesuffix("-start") in COLLECTIVES


def large_moves(text: str, size: int) -> list[str]:
    """Copies and transposes, anywhere in a program, of at least `size` elements."""
    found = []
    for line in text.splitlines():
        match = RESULT.search(line)
        if match and match.group(2) in ("copy", "transpose", "copy-start"):
            dims = [int(d) for d in match.group(1).split(",") if d]
            if np.prod(dims, initial=1) >= size:
                found.append(line.strip())
    return found


def test_the_readers_see_what_they_look_for():
    text = (
        "  %a = f32[4,8]{1,0} all-gather(%x), dimensions={0}\n"
        "  %b = (f32[2]{0}, f32[4]{0}) all-reduce-start(%x, %y)\n"
        "  ROOT %c = f32[16,4]{1,0} copy(%z)\n"
        "  %d = f32[63]{0} transpose(%z), dimensions={0}\n"
    )
    assert [is_collective(name) for name in operations(text)] == [True, True, False, False]
    assert len(large_moves(text, 64)) == 1


@pytest.mark.parametrize("n_stages", [2, 5, 8])
@pytest.mark.parametrize("n_batch", [1, 5])
def test_a_sharded_cycle_has_two_collectives(n_stages, n_batch, fresh_compile):
    text, cache_size = compiled_chunk(n_stages, n_batch, None)
    collectives = [name for name in operations(text) if is_collective(name)]
    # The chunk is a loop over cycles and nothing else: all its collectives are the cycle's.
    assert len(collectives) == 2, collectives
    assert large_moves(text, cache_size) == []


@pytest.mark.parametrize("n_batch", [1, 5])
def test_a_virtual_cycle_copies_no_cache(n_batch, fresh_compile):
    text, cache_size = compiled_chunk(5, n_batch, "virtual")
    assert not any(map(is_collective, operations(text)))
    assert large_moves(text, cache_size) == []


@pytest.mark.parametrize("mesh", ["virtual", None])
def test_200_cycles_of_differing_fills_compile_one_program(mesh):
    target = make_target(8, seed=5)
    draft = make_draft(target, full_config(8, 5), "even")
    before = len(programs.CHUNK)
    result = spd_jax.decode(
        target, draft, make_prompt(3), max_new_tokens=100, stop_ids=(), chunk_cycles=1, mesh=mesh
    )
    assert result.cycles >= 200 and 0 < result.stats.rejects < 99
    assert len(programs.CHUNK) <= before + 1
