"""Decoding gives the target's own text, token for token, whatever drafts and however it runs.

A subset of `tests.full_matrix` in which every two settings meet.
"""

import dataclasses
import itertools

import numpy as np
import pytest

import spd_jax
from tests.expected import expected_cycles
from tests.pipeline.conftest import MESHES
from tests.random_models import KINDS, full_config, make_draft, make_prompt, make_target

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STAGES = range(2, 9)
LIMITS = (1, 2, 3, 40)
CHUNKS = (1, 7, 32)
ONE_CHUNK = 400  # cycles, so that no batch is compacted: its programs are compiled elsewhere
BATCH = 5


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of `decode`."""

    n_stages: int
    mode: str
    kind: str
    prompt_lens: tuple[int, ...]
    max_new_tokens: int
    chunk_cycles: int


def cases_alone(n: int) -> list[Case]:
    """Prompts of 1 to 2N + 1 tokens by every drafter, one at a time."""
    mode = ("virtual", "sharded")[n % 2]
    return [
        Case(n, mode, kind, (length,), LIMITS[(length + k) % 4], CHUNKS[(length + k) % 3])
        for k, kind in enumerate(KINDS)
        for length in range(1, 2 * n + 2)
    ]


def cases_batched(n: int) -> list[Case]:
    """The same prompts, five at a time, in the other mode."""
    mode, cases = ("sharded", "virtual")[n % 2], []
    for k, kind in enumerate(KINDS):
        for group in range(-(-(2 * n + 1) // BATCH)):
            lens = tuple((group * BATCH + i) % (2 * n + 1) + 1 for i in range(BATCH))
            together = kind in ("perfect", "wrong")  # all sequences end in the same cycle
            chunk = CHUNKS[(n + k + group) % 3] if together else ONE_CHUNK
            cases.append(Case(n, mode, kind, lens, LIMITS[(n + k + group) % 4], chunk))
    return cases


def layers_for(n_stages: int) -> int:
    return 4 if n_stages <= 4 else 8


@pytest.fixture(scope="module")
def texts():
    """N -> the target's texts of 40 tokens, by prompt length; one batch each."""
    made = {}

    def make(n: int) -> dict[int, list[int]]:
        if n not in made:
            lens = range(1, 18)  # as many for every N: one program
            prompts = [make_prompt(length) for length in lens]
            target = make_target(layers_for(n), seed=n)
            results = spd_jax.generate(target, prompts, max_new_tokens=40, stop_ids=())
            made[n] = {k: r.tokens for k, r in zip(lens, results, strict=True)}
        return made[n]

    return make


@pytest.fixture(scope="module")
def flags_seen():
    """(N, drafter, prompt length) -> the longest flags seen, in either mode and batch size."""
    return {}


def decode_case(case: Case):
    target = make_target(layers_for(case.n_stages), seed=case.n_stages)
    draft = make_draft(target, full_config(target.config.n_layers, case.n_stages), case.kind)
    results = spd_jax.decode(
        target,
        draft,
        [make_prompt(length) for length in case.prompt_lens],
        max_new_tokens=case.max_new_tokens,
        stop_ids=(),
        mesh=MESHES[case.mode],
        chunk_cycles=case.chunk_cycles,
    )
    return target, results


@pytest.mark.parametrize("n", STAGES)
@pytest.mark.parametrize("cases", [cases_alone, cases_batched], ids=["alone", "batched"])
def test_decode_equals_generate(n, cases, texts, flags_seen, comparison):
    for case in cases(n):
        target, results = decode_case(case)
        for length, result in zip(case.prompt_lens, results, strict=True):
            assert result.stats.mode == case.mode
            assert result.finish_reason == "length"
            assert result.cycles == expected_cycles(n, result.accepted)
            want = texts(n)[length][: case.max_new_tokens]
            if not comparison.check(target, make_prompt(length), result.tokens, want):
                continue  # a near tie: what was drafted after it was another text
            if case.kind == "even":
                assert result.accepted[1:] == [i % 2 == 0 for i in want[1:]]
            elif case.kind != "random":
                assert result.accepted[1:] == [case.kind == "perfect"] * (len(want) - 1)
            # One text, one drafter: the same flags, however many tokens, in whatever company.
            seen = flags_seen.setdefault((n, case.kind, length), result.accepted)
            common = min(len(seen), len(result.accepted))
            assert seen[:common] == result.accepted[:common]
            flags_seen[n, case.kind, length] = max(seen, result.accepted, key=len)


def test_every_two_settings_meet():
    rows = [
        (f"N {c.n_stages}", c.mode, c.kind, f"{length} long", f"{c.max_new_tokens} new",
         f"chunk {c.chunk_cycles}", f"batch {len(c.prompt_lens)}")
        for n in STAGES
        for c in cases_alone(n) + cases_batched(n)
        for length in c.prompt_lens
    ]  # fmt: skip
    met = {pair for row in rows for pair in itertools.combinations(row, 2)}
    levels = [
        [f"N {n}" for n in STAGES],
        list(MESHES),
        list(KINDS),
        [f"{length} long" for length in range(1, 18)],
        [f"{limit} new" for limit in LIMITS],
        [f"chunk {chunk}" for chunk in CHUNKS],
        ["batch 1", f"batch {BATCH}"],
    ]
    wanted = {
        pair
        for a, b in itertools.combinations(levels, 2)
        for pair in itertools.product(a, b)
        if not (pair[0].startswith("N") and pair[1].endswith("long"))  # below: 1 to 2N + 1
    }
    wanted |= {(f"N {n}", f"{k} long") for n in STAGES for k in range(1, 2 * n + 2)}
    assert wanted - met == set()


@pytest.mark.parametrize(("mode", "n"), [("virtual", 4), ("sharded", 3)])
def test_a_batch_equals_each_alone(mode, n, texts):
    target = make_target(4, seed=n)
    draft = make_draft(target, full_config(4, n), "even")
    lens = [7, 1, 5, 2, 9]
    prompts = [make_prompt(length) for length in lens]
    stop_ids = (texts(n)[1][4], texts(n)[9][20])  # some end early: the batch is compacted
    options = dict(max_new_tokens=40, stop_ids=stop_ids, mesh=MESHES[mode], chunk_cycles=7)
    together = spd_jax.decode(target, draft, prompts, **options)
    alone = [spd_jax.decode(target, draft, prompt, **options) for prompt in prompts]
    assert len({len(r.tokens) for r in alone}) > 2
    for one, other in zip(together, alone, strict=True):
        assert one.stats.mode == other.stats.mode == mode
        assert one.tokens == other.tokens
        assert one.accepted == other.accepted
        assert one.cycles == other.cycles
        assert one.finish_reason == other.finish_reason
        assert one.stats.tau == other.stats.tau


def test_a_draft_decodes_at_any_number_of_stages(texts, caplog):
    """The depth map is recomputed, and one line says that it was trained for another."""
    target = make_target(4, seed=3)
    draft = make_draft(target, full_config(4, 2), "perfect")
    options = dict(max_new_tokens=40, stop_ids=(), n_stages=3, mesh="virtual")
    with caplog.at_level("WARNING", logger="spd_jax"):
        results = [spd_jax.decode(target, draft, make_prompt(5), **options) for _ in range(2)]
    lines = [r.getMessage() for r in caplog.records if "trained for" in r.getMessage()]
    assert len(lines) == 1 and "2,2" in lines[0] and "2,1,1" in lines[0]
    for result in results:
        assert result.tokens == texts(3)[5]
        assert all(result.accepted)
        assert result.cycles == 40 + 3 - 2


def test_the_random_texts_are_worth_comparing(texts):
    """Not one id repeated: a stage that did nothing would be seen."""
    for n in STAGES:
        assert np.mean([len(set(text)) for text in texts(n).values()]) > 10
