"""Held-out figures: the same positions for draft and lookup, counted by hand."""

import dataclasses

import jax
import numpy as np
import pytest

from spd_jax.models import target as model
from spd_jax.models.draft import init_params
from train.batches import make_batch
from train.config import TrainConfig
from train.data import Row
from train.evaluate import describe_figures, evaluate, lookup_counts, make_eval_step
from train.teacher import Teacher


def make_row(ids, n_prompt):
    return Row(np.array(ids, np.int32), np.arange(len(ids)) >= n_prompt, 0.7)


@pytest.mark.parametrize(
    ("ids", "n_prompt", "expected"),
    [
        ([1, 2, 3, 1, 2, 3, 1], 3, (2, 3)),  # 1 is the first; 2 unseen pair; 3 and 1 looked up
        ([1, 2, 3, 1, 2, 4, 1, 2, 4], 1, (1, 7)),  # the latest occurrence decides
        ([5, 5, 5, 5], 1, (1, 2)),  # the pair before the first id does not exist
        ([1, 2], 1, (0, 0)),
    ],
)
def test_lookup_is_counted_on_all_written_ids_but_the_first(ids, n_prompt, expected):
    assert lookup_counts(make_row(ids, n_prompt)) == expected


def test_figures_agree_with_a_count_by_hand(small, corpus):
    config = TrainConfig(sequence_len=24, batch_tokens=96)
    draft = dataclasses.replace(small.draft, draft_ids=None)
    params = init_params(small.target, draft, small.target_params, jax.random.key(4))
    teacher = Teacher(small.target, draft, small.target_params, corpus)
    eval_step = make_eval_step(small.target, draft)
    figures = evaluate(eval_step, teacher, small.target_params, params, corpus.rows, config)
    assert list(figures) == ["all", "T=0", "T=0.7"]
    n_scored = [figures[group]["n_scored"] for group in figures]
    assert n_scored[0] == n_scored[1] + n_scored[2] == sum(len(r.ids) - 5 for r in corpus.rows)
    assert figures["all"]["coverage"] == 1
    hits = sum(lookup_counts(row)[0] for row in corpus.rows)
    assert figures["all"]["lookup"] == hits / n_scored[0]
    for name in ("agree_target", "agree_text"):
        by_fill = figures["all"][f"{name}_by_fill"]
        assert len(by_fill) == draft.n_stages
        assert np.mean(by_fill) == pytest.approx(figures["all"][name])
    assert describe_figures(figures).count("lookup") == 3


def test_a_draft_that_copies_the_target_agrees_everywhere(small, corpus, monkeypatch):
    # A draft that returns the target's last state through the target's head is the target.
    config = TrainConfig(sequence_len=24, batch_tokens=96)
    draft = dataclasses.replace(small.draft, draft_ids=None, head="target")
    monkeypatch.setattr(
        "spd_jax.models.distill.draft_outputs",
        lambda target, draft, params, states, *_: states[target.n_layers],
    )
    teacher = Teacher(small.target, draft, small.target_params, corpus)
    eval_step = make_eval_step(small.target, draft)
    figures = evaluate(eval_step, teacher, small.target_params, {}, corpus.rows, config)
    assert figures["all"]["agree_target_by_fill"] == [1.0] * draft.n_stages
    assert figures["all"]["loss"] == pytest.approx(0, abs=1e-6)

    @jax.jit
    def choices(input_ids):
        hidden = model.hidden_states(small.target, small.target_params, input_ids)
        return model.logits(small.target, small.target_params, hidden[-1]).argmax(-1)

    best = np.asarray(choices(make_batch(corpus.rows, len(corpus.rows), 24)["input_ids"]))
    hits = 0  # four ids are the prompt and one comes from the prefill
    for row, chosen in zip(corpus.rows, best, strict=True):
        hits += np.count_nonzero(chosen[4 : len(row.ids) - 1] == row.ids[5:])
    assert figures["all"]["agree_text"] == hits / figures["all"]["n_scored"]
