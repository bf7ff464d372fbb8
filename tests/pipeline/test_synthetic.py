"""A drafter of set quality: the text stays exact, and the engine works as with any other."""

import dataclasses
import re
from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest

import spd_jax
from spd_jax.pipeline import programs
from spd_jax.pipeline.loop import decode_batch
from spd_jax.pipeline.synthetic import Script
from tests.pipeline.conftest import MESHES
from tests.pipeline.stepping import start
from tests.pipeline.test_compiled import PRODUCT
from tests.random_models import full_config, make_draft, make_prompt, make_target

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

N, N_NEW = 3, 40


def scripted(mode, acceptance, n_batch=2, n_known=N_NEW, some_ids=True):
    """A batch with a draft module that drafts at random, its texts, and the known part of these."""
    target = make_target(4, seed=N)
    config = full_config(4, N)
    if some_ids:  # most of what is proposed is none of the draft's own ids
        config = dataclasses.replace(config, draft_ids=(3, 50, 96))
    prompts = [make_prompt(3 + b, seed=b) for b in range(n_batch)]
    texts = [
        spd_jax.generate(target, prompt, max_new_tokens=N_NEW, stop_ids=()).tokens
        for prompt in prompts
    ]
    run = start(target, make_draft(target, config, "random"), prompts, N_NEW, MESHES[mode])
    assert run.engine.mode == mode
    known = jnp.full(n_batch, n_known, jnp.int32)
    script = Script(jnp.asarray(texts, jnp.int32), known, jnp.float32(acceptance))
    run.inputs = dataclasses.replace(run.inputs, script=script)
    return run, prompts, texts


def decode(run, prompts):
    padded = np.zeros((len(prompts), 16), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    return decode_batch(run.engine, padded, run.inputs, N_NEW, 32, None).sequences


@pytest.mark.parametrize("mode", MESHES)
@pytest.mark.parametrize(("acceptance", "cycles"), [(1.0, N_NEW + N - 2), (0.0, N * (N_NEW - 1))])
def test_it_is_always_right_or_always_wrong(mode, acceptance, cycles):
    run, prompts, texts = scripted(mode, acceptance)
    for sequence, text in zip(decode(run, prompts), texts, strict=True):
        assert (sequence.tokens, sequence.cycles) == (text, cycles)


@pytest.mark.parametrize("mode", MESHES)
def test_it_is_right_as_often_as_asked(mode):
    run, prompts, texts = scripted(mode, 0.7, n_batch=8)
    sequences = decode(run, prompts)
    assert [s.tokens for s in sequences] == texts
    flags = [flag for s in sequences for flag in s.accepted[1:]]
    error = (0.7 * 0.3 / len(flags)) ** 0.5
    assert abs(np.mean(flags) - 0.7) < 4 * error
    assert len({tuple(s.accepted) for s in sequences}) == 8  # each by its own key


def test_what_is_not_known_is_drafted_by_the_draft_module():
    run, prompts, texts = scripted("virtual", 1.0, n_batch=1, n_known=20)
    (sequence,) = decode(run, prompts)
    assert sequence.tokens == texts[0]
    assert all(sequence.accepted[:20]) and not all(sequence.accepted[20:])


@pytest.mark.parametrize("mode", MESHES)
def test_draft_module_and_heads_stay_in_the_compiled_program(mode):
    """Nothing of what the script replaces is left out: the same products, as often."""
    found = []
    for has_script in (False, True):
        run, _, _ = scripted(mode, 0.8, n_batch=1, some_ids=False)
        inputs = run.inputs if has_script else dataclasses.replace(run.inputs, script=None)
        static = {"spec": run.engine.spec, "mesh": run.engine.mesh}
        text = programs.CHUNK.compile(
            run.engine.weights, run.state, inputs, jnp.int32(32), **static, n_read=128
        ).as_text()
        found.append(Counter(PRODUCT.findall(text)))
    assert found[0] == found[1]
    vocab = 97 if mode == "virtual" else -(-97 // (N + 1))
    heads = [n for shape, n in found[1].items() if re.search(rf"\b{vocab}\b", shape)]
    assert sum(heads) == 2, found[1]  # the target's head and the draft's
