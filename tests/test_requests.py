"""What a caller passes becomes padded arrays, or one line that says what to change."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spd_jax
from spd_jax.checks import ConfigError
from spd_jax.requests import make_request, prompt_keys
from tests.random_models import full_config, make_draft, make_target


def request(prompt, max_new_tokens=4, stop_ids=(), seed=0):
    return make_request(make_target(), prompt, max_new_tokens, stop_ids, seed)


@pytest.mark.parametrize("prompt", [[5, 6], (5, 6), np.array([5, 6]), jnp.array([5, 6])])
def test_ids_of_any_kind_are_one_prompt(prompt):
    made = request(prompt)
    assert made.single and made.prompts[0, :2].tolist() == [5, 6]
    assert made.prompt_lens.tolist() == [2]


@pytest.mark.parametrize("prompt", [[[5, 6], [7]], [np.array([5, 6]), (7,)], [[5, 6], [7]]])
def test_a_list_of_prompts_is_a_padded_batch(prompt):
    made = request(prompt)
    assert not made.single and made.prompt_lens.tolist() == [2, 1]
    assert made.prompts[1, 1:].tolist() == [0] * 15


def test_stop_ids_are_padded_and_default_to_the_targets():
    assert request([1], stop_ids=(7, 3, 3, 9)).stop_ids.tolist() == [3, 7, 9, -1]
    assert request([1], stop_ids=()).stop_ids.tolist() == [-1]
    target = dataclasses.replace(make_target(), stop_ids=(4,))
    assert make_request(target, [1], 4, None, 0).stop_ids.tolist() == [4]
    assert make_request(target, [1], 4, (), 0).stop_ids.tolist() == [-1]


def test_prompt_b_of_one_seed_uses_seed_plus_b():
    data = [jax.random.key_data(request([[1], [2]], seed=s).keys) for s in (7, [7, 8])]
    np.testing.assert_array_equal(*data)


BAD = {
    "an empty prompt": ({"prompt": []}, "at least one token"),
    "an empty prompt in a batch": ({"prompt": [[1], []]}, "at least one token"),
    "no prompt": ({"prompt": None}, "expected a text, token ids"),
    "an id beyond the vocabulary": ({"prompt": [1, 97]}, "from 0 to 96.*got 97"),
    "a negative id": ({"prompt": [-1]}, "from 0 to 96.*got -1"),
    "floats": ({"prompt": [1.5]}, "must be integers"),
    "booleans": ({"prompt": [True]}, "must be integers"),
    "mixed depth": ({"prompt": [[1], 2]}, "must be integers"),
    "a text without a tokenizer": ({"prompt": "hi"}, "no tokenizer"),
    "a limit of 0": ({"prompt": [1], "max_new_tokens": 0}, "max_new_tokens must be"),
    "a float limit": ({"prompt": [1], "max_new_tokens": 2.0}, "max_new_tokens must be"),
    "more than the context": ({"prompt": [1] * 9, "max_new_tokens": 1016}, "context of 1024"),
    "a stop id beyond": ({"prompt": [1], "stop_ids": [97]}, "stop_ids.*got 97"),
    "too few seeds": ({"prompt": [[1], [2]], "seed": [1]}, "one integer or 2"),
    "a seed of 65 bits": ({"prompt": [1], "seed": 2**64}, "64-bit integers"),
    "a float seed": ({"prompt": [1], "seed": 1.5}, "one integer or 1"),
}


def test_seeds_of_64_bits_have_keys_of_their_own():
    seeds = [0, 1, -1, 2**32 - 1, 2**32, 2**40, -(2**63), 2**63 - 1]
    keys = np.asarray(jax.random.key_data(prompt_keys(seeds)))
    assert len(np.unique(keys, axis=0)) == len(seeds)
    plain = jax.random.key_data(jax.random.key(1, impl="threefry2x32"))
    np.testing.assert_array_equal(keys[1], plain)


@pytest.mark.parametrize(("given", "expected"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line(given, expected):
    with pytest.raises(ConfigError, match=expected) as error:
        request(**given)
    assert "\n" not in str(error.value)


def decode(**settings):
    target = make_target()
    draft = settings.pop("draft", None) or make_draft(target, full_config(4, 2), "random")
    return spd_jax.decode(target, draft, [1], max_new_tokens=2, mesh="virtual", **settings)


BAD_DECODES = {
    "more stages than layers": ({"n_stages": 5}, "n_stages must be from 2 to.*4 layers, got 5"),
    "one stage": ({"n_stages": 1}, "got 1"),
    "no stage": ({"n_stages": 0}, "got 0"),
    "a float count": ({"n_stages": 2.0}, "must be an integer"),
    "stages that do not add up": ({"stage_layers": (2, 1)}, "sum to 4"),
    "an empty stage": ({"stage_layers": (4, 0)}, "positive counts"),
    "chunks of nothing": ({"chunk_cycles": 0}, "chunk_cycles"),
    "chunks beyond int32": ({"chunk_cycles": 2**31}, "chunk_cycles"),
    "a boolean chunk": ({"chunk_cycles": True}, "chunk_cycles"),
    "a count of layers": ({"stage_layers": 4}, "sequence of integers, got 4"),
    "no sampling": ({"sampling": None}, "SamplingConfig, got None"),
}


@pytest.mark.parametrize(("given", "expected"), BAD_DECODES.values(), ids=BAD_DECODES)
def test_bad_settings_are_one_line(given, expected):
    with pytest.raises(ConfigError, match=expected) as error:
        decode(**given)
    assert "\n" not in str(error.value)
