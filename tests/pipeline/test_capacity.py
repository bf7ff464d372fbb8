"""Attention reads no more of its caches than is in use, and texts grow past that unharmed."""

import pytest

import spd_jax
from spd_jax.models.cache import read_len
from spd_jax.models.reference import continue_ar
from spd_jax.pipeline import programs
from tests.pipeline.conftest import MESHES
from tests.pipeline.stepping import start
from tests.random_models import full_config, make_draft, make_prompt, make_target

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

N_NEW = 300  # from a prompt of three: past the first 256 positions, in caches of 384


@pytest.mark.parametrize(
    ("n_positions", "capacity", "n"),
    [(1, 128, 128), (1, 4096, 256), (256, 4096, 256), (257, 4096, 512), (257, 384, 384),
     (2049, 4096, 4096), (5000, 5120, 5120)],
)  # fmt: skip
def test_reads_are_powers_of_two_up_to_the_capacity(n_positions, capacity, n):
    assert read_len(n_positions, capacity) == n


@pytest.mark.parametrize("mode", MESHES)
def test_a_text_grows_past_what_was_read_and_nothing_is_compiled_again(mode, comparison):
    target = make_target(4, seed=3)
    draft = make_draft(target, full_config(4, 3), "even")
    prompts = [make_prompt(3), make_prompt(9)]
    options = dict(max_new_tokens=N_NEW, stop_ids=())
    want = spd_jax.generate(target, prompts, **options)
    counts = []
    for _ in range(2):
        got = spd_jax.decode(target, draft, prompts, mesh=MESHES[mode], **options)
        for prompt, a, b in zip(prompts, got, want, strict=True):
            comparison.check(target, prompt, a.tokens, b.tokens)
        assert spd_jax.generate(target, prompts, **options)[1].tokens == want[1].tokens
        counts.append((programs.CHUNK.n_compiled, continue_ar.n_compiled))
    assert counts[0] == counts[1]


def test_a_cycle_reads_what_it_is_told_to():
    """Less of a larger cache gives the same cycle; too little would not."""
    target = make_target(4, seed=3)
    draft = make_draft(target, full_config(4, 3), "even")
    prompt = make_prompt(200)
    states = []
    for n_read in (None, 256, 128):  # 128: of the 200 positions that are in use
        run = start(target, draft, [prompt], 300, "virtual")
        advance = programs.chunk(run.engine, run.state, run.inputs, 20, n_read)
        states.append(advance(run.state).tokens[0, :24].tolist())
    assert states[0] == states[1] != states[2]
