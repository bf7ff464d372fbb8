"""When figures are taken; true decodes beside plain decoding; the head at other stage counts."""

import dataclasses

import jax
import numpy as np
import pytest

import spd_jax
from spd_jax.checks import ConfigError
from spd_jax.models.bundle import Draft, Target
from spd_jax.models.draft import init_params
from spd_jax.weights.loaded import LoadedTarget
from train.config import TrainConfig
from train.data import Row
from train.evaluate import describe_figures, evaluate, make_eval_step
from train.judge import Judge
from train.teacher import Teacher
from train.trial import Trial, prompt_ids

SETTINGS = TrainConfig(
    sequence_len=24, batch_tokens=96, eval_every=5, eval_stages=(2, 4), decode_every=2,
    decode_rows=2, decode_tokens=12,
)  # fmt: skip


@pytest.fixture(scope="module")
def judged(small, corpus):
    """A judge, draft parameters, and its figures: second evaluation, third, a last one."""
    loaded = LoadedTarget(small.target, small.target_params, None, (), "")
    params = init_params(small.target, small.draft, small.target_params, jax.random.key(4))
    teacher = Teacher(small.target, small.draft, small.target_params, corpus)
    judge = Judge(SETTINGS, loaded, small.target_params, small.draft, teacher, corpus.rows)
    # As in the training loop: nothing may reach the device by the way.
    with jax.transfer_guard_host_to_device("disallow"):
        figures = [judge(params, 10, False), judge(params, 15, False), judge(params, 17, True)]
    return judge, params, figures


def test_decodes_come_every_so_many_evaluations_and_last(judged):
    second, third, last = judged[2]
    assert ["decode" in figures["all"] for figures in (second, third, last)] == [True, False, True]
    assert "decode" not in last["T=0"]
    assert "alpha_by_stages" not in second["all"]
    assert len(describe_figures(last).splitlines()) == len(last)
    assert "of generate in 2 of 2" in describe_figures(last).splitlines()[0]


def test_a_decode_is_that_of_the_first_prompts(small, corpus, judged):
    target = Target(small.target_params, small.target)
    draft = Draft(judged[1], small.draft)
    prompts = [row.ids[:4].tolist() for row in corpus.rows[:2]]
    options = {"max_new_tokens": 12, "mesh": "virtual"}
    results = spd_jax.decode(target, draft, prompts, **options)
    found = judged[2][2]["all"]["decode"]
    cycles = sum(r.cycles for r in results)
    assert (found["rows"], found["tokens"], found["cycles"]) == (2, 24, cycles)
    assert found["tau"] == pytest.approx(3 * 24 / cycles)
    assert found["tokens_per_cycle"] == pytest.approx(24 / cycles)
    assert found["alpha"] == pytest.approx(1 - sum(r.stats.rejects for r in results) / 22)
    assert found["identical"] == 2 and found["seconds"] > 0 and found["peak_bytes_added"] >= 0


def test_a_text_that_is_not_that_of_generate_is_told(judged, monkeypatch):
    judge, params, _ = judged
    trial = judge._trial
    plain = [list(tokens) for tokens in trial._plain]
    plain[1][3] += 1
    monkeypatch.setattr(trial, "_plain", plain)
    assert trial(params)["identical"] == 1


def test_other_stage_counts_are_those_of_a_head_with_as_many(small, corpus, judged):
    last = judged[2][2]
    for group in ("all", "T=0", "T=0.7"):
        assert list(last[group]["alpha_by_stages"]) == ["2", "4"]
    other = dataclasses.replace(small.draft, n_stages=2)
    teacher = Teacher(small.target, other, small.target_params, corpus)
    steps = [make_eval_step(small.target, other)]
    (figures,) = evaluate(steps, teacher, small.target_params, judged[1], corpus.rows, 24, 96)
    for group, rates in figures.items():
        assert last[group]["alpha_by_stages"]["2"] == rates["alpha"]
        assert last[group]["tau_by_stages"]["2"] == rates["tau"]


def test_settings_that_do_not_fit_the_target_are_errors_at_once(small, corpus):
    loaded = LoadedTarget(small.target, small.target_params, None, (), "")
    for field, value, words in (
        ("eval_stages", (5,), "n_stages must be from 2 to the target's 4 layers, got 5"),
        ("decode_tokens", 125, "no held-out prompt leaves room for decode_tokens 125"),
    ):
        config = dataclasses.replace(SETTINGS, **{field: value})
        with pytest.raises(ConfigError, match=words):
            Judge(config, loaded, small.target_params, small.draft, None, corpus.rows)


def test_prompts_are_what_comes_before_the_answer(small):
    def row(ids, mask):
        return Row(np.array(ids, np.int32), np.array(mask, bool), 0.0)

    assert prompt_ids(row([4, 5, 6], [0, 0, 1])) == (4, 5)
    assert prompt_ids(row([4, 5, 6], [1, 1, 1])) == (4,)
    loaded = LoadedTarget(small.target, small.target_params, None, (), "")
    rows = [row([*range(20), 1], [0] * 20 + [1]), row([4, 5, 6], [0, 0, 1])]
    rows += [row([4, 5, 7], [0, 0, 1]), row([4, 6, 7], [0, 0, 1])]
    trial = Trial(loaded, small.target_params, small.draft, rows, 3, 110)
    assert trial._prompts == [[4, 5], [4, 6]]  # one is too long, one comes twice
