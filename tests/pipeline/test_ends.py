"""Where a text ends, and that nothing is shown before it is verified."""

import dataclasses

import pytest

import spd_jax
from spd_jax.pipeline import programs
from tests.expected import expected_cycles
from tests.pipeline.conftest import MESHES
from tests.random_models import NEVER, full_config, make_draft, make_prompt, make_target

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STAGES = {"virtual": 4, "sharded": 3}  # the programs of test_lossless.py
CHUNKS = (1, 7, 32)


@pytest.fixture
def decode(mode):
    """Decodes with the drafter that is right for even ids; the mode is checked."""
    n = STAGES[mode]
    target = make_target(4, seed=n)

    def run(prompt, kind="even", **options):
        draft = make_draft(target, full_config(4, n), kind)
        options = {"max_new_tokens": 40, "stop_ids": (), "mesh": MESHES[mode]} | options
        results = spd_jax.decode(target, draft, prompt, **options)
        for result in results if isinstance(results, list) else [results]:
            assert result.stats.mode == mode
            assert result.cycles == expected_cycles(n, result.accepted)
        return results

    return run


def first_where(result, flag: bool, after: int = 1) -> int:
    """Index of a token with that flag whose id did not occur before it."""
    pairs = enumerate(zip(result.tokens, result.accepted, strict=True))
    fresh = (i for i, (t, a) in pairs if i >= after and a == flag and t not in result.tokens[:i])
    return next(fresh)


@pytest.mark.parametrize("chunk_cycles", CHUNKS)
def test_the_end_is_the_first_token(decode, chunk_cycles):
    whole = decode(make_prompt(5))
    ended = decode(make_prompt(5), stop_ids=whole.tokens[:1], chunk_cycles=chunk_cycles)
    assert ended.tokens == whole.tokens[:1]
    assert (ended.finish_reason, ended.cycles) == ("stop", 0)


@pytest.mark.parametrize("chunk_cycles", CHUNKS)
@pytest.mark.parametrize("flag", [True, False], ids=["accepted draft", "correction"])
def test_the_end_is_a_later_token(decode, flag, chunk_cycles):
    whole = decode(make_prompt(5))
    at = first_where(whole, flag)
    ended = decode(make_prompt(5), stop_ids=[whole.tokens[at]], chunk_cycles=chunk_cycles)
    assert ended.tokens == whole.tokens[: at + 1]
    assert ended.accepted == whole.accepted[: at + 1]
    assert ended.finish_reason == "stop"


@pytest.mark.parametrize("chunk_cycles", CHUNKS)
def test_a_rejected_draft_ends_nothing(decode, chunk_cycles):
    """This drafter proposes nothing but the end, and is never right."""
    result = decode(make_prompt(5), "wrong", stop_ids=[NEVER], chunk_cycles=chunk_cycles)
    assert result.tokens == decode(make_prompt(5)).tokens
    assert (len(result.tokens), result.finish_reason) == (40, "length")


@pytest.mark.parametrize("n_stops", [2, 3, 5])
def test_the_earliest_of_several_ends_counts(decode, n_stops):
    whole = decode(make_prompt(7))
    at = first_where(whole, True, after=4)
    later = [t for t in whole.tokens[at + 1 :] if t not in whole.tokens[: at + 1]]
    others = list(dict.fromkeys([*later, NEVER]))[: n_stops - 1]
    ended = decode(make_prompt(7), stop_ids=[*others, whole.tokens[at]])
    assert ended.tokens == whole.tokens[: at + 1]
    assert ended.finish_reason == "stop"


def test_no_ends_at_all(decode):
    """An empty tuple overrides the target's own end ids."""
    whole = decode(make_prompt(7), stop_ids=())
    assert (len(whole.tokens), whole.finish_reason) == (40, "length")


def test_the_target_names_the_ends():
    """stop_ids=None: those of the target; generate stops there too."""
    plain = make_target(4, seed=4)
    draft, prompt = make_draft(plain, full_config(4, 4), "even"), make_prompt(5)
    text = spd_jax.generate(plain, prompt, max_new_tokens=40).tokens
    assert len(text) == 40  # a model that names no end ids has none
    target = dataclasses.replace(plain, stop_ids=(text[6], NEVER))
    decoded = spd_jax.decode(target, draft, prompt, max_new_tokens=40, mesh="virtual")
    generated = spd_jax.generate(target, prompt, max_new_tokens=40)
    for result in (decoded, generated):
        assert result.tokens == text[: text.index(text[6]) + 1]
        assert result.finish_reason == "stop"


@pytest.mark.parametrize("n_new", [2, 5, 13])
def test_the_limit_falls_inside_a_chunk(decode, n_new):
    whole = decode(make_prompt(5))
    for chunk_cycles in (*CHUNKS, 1000):
        result = decode(make_prompt(5), max_new_tokens=n_new, chunk_cycles=chunk_cycles)
        assert result.tokens == whole.tokens[:n_new]
        assert result.accepted == whole.accepted[:n_new]
        assert result.finish_reason == "length"


@pytest.mark.parametrize("kind", ["perfect", "even", "wrong"])
@pytest.mark.parametrize("chunk_cycles", CHUNKS)
def test_only_verified_tokens_are_streamed(decode, kind, chunk_cycles):
    """After every chunk: the text so far, never a draft, and in the end all of it."""
    prompts = [make_prompt(length) for length in (7, 1, 5, 2, 9)]
    whole = [r.tokens for r in decode(prompts, "perfect", chunk_cycles=400)]
    streamed = [[] for _ in prompts]

    def on_tokens(idx, new):
        assert new and all(type(token) is int for token in new)
        streamed[idx] += new
        assert streamed[idx] == whole[idx][: len(streamed[idx])]

    stop_ids = [whole[0][9]]
    results = decode(
        prompts, kind, stop_ids=stop_ids, chunk_cycles=chunk_cycles, on_tokens=on_tokens
    )
    assert [result.tokens for result in results] == streamed
    for result, text in zip(results, whole, strict=True):
        assert result.tokens == text[: len(result.tokens)]
        assert all(token not in stop_ids for token in result.tokens[:-1])


def test_a_stream_starts_with_the_prefill(decode):
    """The first token is shown before any cycle has run."""
    calls = []
    decode(make_prompt(5), chunk_cycles=1, on_tokens=lambda idx, new: calls.append((idx, new)))
    assert calls[0][0] == 0 and len(calls[0][1]) == 1
    assert len(calls) == 40  # one cycle commits one token at most


@pytest.mark.parametrize("kind", ["perfect", "wrong"])
def test_a_cache_filled_to_its_last_row(decode, mode, kind):
    """The newest draft of the last cycle takes the last row before the spare one."""
    n = STAGES[mode]
    target = make_target(4, seed=n)
    length = 16
    n_new = 127 - length - (n - 2)
    spec = spd_jax.engines.build_engine(
        target, make_draft(target, full_config(4, n), kind), None, None, MESHES[mode], "auto"
    ).spec
    assert programs.cache_capacity(spec, 16, length, n_new) == 128
    assert programs.cache_capacity(spec, 16, length, n_new + 1) == 256
    want = spd_jax.generate(target, make_prompt(length), max_new_tokens=n_new).tokens
    assert decode(make_prompt(length), kind, max_new_tokens=n_new).tokens == want
