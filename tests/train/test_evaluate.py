"""Held-out figures: the same positions for draft and lookup, counted by hand; and decoding."""

import dataclasses

import jax
import numpy as np
import pytest

import spd_jax
from spd_jax.config import LossConfig
from spd_jax.models import draft as pdm
from spd_jax.models import target as model
from spd_jax.models.bundle import Draft
from spd_jax.models.distill import draft_outputs
from spd_jax.models.draft import init_params
from tests.expected import expected_cycles
from tests.random_models import full_config, make_draft, make_prompt, make_target
from train.batches import make_batch
from train.config import TrainConfig
from train.data import Corpus, Row
from train.evaluate import count_row, describe_figures, evaluate, lookup_hits, make_eval_step
from train.saver import best_figure
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
    hits = lookup_hits(make_row(ids, n_prompt))
    assert (hits.sum(), len(hits)) == expected


def test_figures_agree_with_a_count_by_hand(small, corpus):
    draft = dataclasses.replace(small.draft, draft_ids=None)
    params = init_params(small.target, draft, small.target_params, jax.random.key(4))
    teacher = Teacher(small.target, draft, small.target_params, corpus)
    eval_step = make_eval_step(small.target, draft)
    args = teacher, small.target_params, params, corpus.rows
    (figures,) = evaluate([eval_step], *args, 24, 96)
    assert list(figures) == ["all", "T=0", "T=0.7"]
    n_scored = [figures[group]["n_scored"] for group in figures]
    assert n_scored[0] == n_scored[1] + n_scored[2] == sum(len(r.ids) - 5 for r in corpus.rows)
    assert figures["all"]["coverage"] == 1
    hits = sum(lookup_hits(row).sum() for row in corpus.rows)
    assert figures["all"]["lookup"] == figures["all"]["lookup_alpha"] == hits / n_scored[0]
    for name in ("agree_target", "agree_text"):
        by_fill = figures["all"][f"{name}_by_fill"]
        assert len(by_fill) == draft.n_stages
        assert np.mean(by_fill) == pytest.approx(figures["all"][name])
    assert len(describe_figures(figures).splitlines()) == 3


def test_rates_over_nothing_are_none(small, corpus):
    """Rows of which one id alone is scored, and drafts of an id that the target never chooses."""
    row = make_row([3, 4, 5, 6], 3)
    draft = dataclasses.replace(small.draft, draft_ids=None)
    params = init_params(small.target, draft, small.target_params, jax.random.key(4))
    teacher = Teacher(small.target, draft, small.target_params, corpus)
    args = teacher, small.target_params, params, [row]
    (figures,) = evaluate([make_eval_step(small.target, draft)], *args, 24, 96)
    rates = figures["all"]
    assert rates["n_scored"] == 0
    names = ("loss", "kl", "agree_target", "agree_text", "coverage", "lookup", "alpha", "tau")
    assert [rates[name] for name in names] == [None] * len(names)
    assert rates["kl_by_fill"] is None
    assert "loss -, KL -" in describe_figures(figures)
    for name in ("loss", "agree_target"):
        config = dataclasses.replace(TrainConfig(), best_by=name)
        assert best_figure(config, 7, {"judged": (7, figures)}) is None


def test_a_draft_that_copies_the_target_agrees_everywhere(small, corpus, monkeypatch):
    # A draft that returns the target's last state through the target's head is the target.
    draft = dataclasses.replace(small.draft, draft_ids=None, head="target")
    monkeypatch.setattr(
        "train.evaluate.draft_outputs",
        lambda target, draft, params, states, *_: states[target.n_layers],
    )
    teacher = Teacher(small.target, draft, small.target_params, corpus)
    eval_step = make_eval_step(small.target, draft)
    args = teacher, small.target_params, {}, corpus.rows
    (figures,) = evaluate([eval_step], *args, 24, 96)
    assert figures["all"]["agree_target_by_fill"] == [1.0] * draft.n_stages
    assert figures["all"]["loss"] == pytest.approx(0, abs=1e-6)
    assert figures["all"]["acceptance_by_fill"] == pytest.approx([1.0] * draft.n_stages, abs=1e-5)

    @jax.jit
    def choices(input_ids):
        hidden = model.hidden_states(small.target, small.target_params, input_ids)
        return model.logits(small.target, small.target_params, hidden[-1]).argmax(-1)

    best = np.asarray(choices(make_batch(corpus.rows, len(corpus.rows), 24)["input_ids"]))
    hits = 0  # four ids are the prompt and one comes from the prefill
    for row, chosen in zip(corpus.rows, best, strict=True):
        hits += np.count_nonzero(chosen[4 : len(row.ids) - 1] == row.ids[5:])
    assert figures["all"]["agree_text"] == hits / figures["all"]["n_scored"]


def softmax(x):
    x = np.exp(x.astype(np.float64) - x.max())
    return x / x.sum()


def test_every_figure_is_its_definition(small, corpus):
    """KL, the training loss and acceptance position by position, for a draft of some ids."""
    rows, draft = corpus.rows[:5], dataclasses.replace(small.draft, n_layers=2)
    ids = np.array(draft.draft_ids)
    params = init_params(small.target, draft, small.target_params, jax.random.key(4))
    teacher = Teacher(small.target, draft, small.target_params, corpus)
    eval_step = make_eval_step(small.target, draft, LossConfig("tv", "miss"), 2.0)
    got = evaluate([eval_step], teacher, small.target_params, params, rows, 24, 96)[0]["all"]
    batch = make_batch(rows, len(rows), 24)

    @jax.jit
    def logits(input_ids, segments):
        hidden = model.hidden_states(small.target, small.target_params, input_ids)
        outs = [
            draft_outputs(small.target, draft, params, hidden, segments, fill, "exact")
            for fill in (1, 2, 3)
        ]
        drafted = [pdm.logits(small.target, draft, params, small.target_params, x) for x in outs]
        return model.logits(small.target, small.target_params, hidden[-1]), drafted

    theirs, ours = jax.device_get(logits(batch["input_ids"], batch["attention_mask"]))
    for fill in range(3):
        kl, loss, acceptance, right, n_covered, n = [], [], [], 0, 0, 0
        for b, row in enumerate(rows):
            for t in range(4, len(row.ids) - 1):  # four ids are the prompt
                n += 1
                best = theirs[b, t].argmax()
                right += ids[ours[fill][b, t].argmax()] == best
                p, q = softmax(theirs[b, t]), softmax(ours[fill][b, t])
                acceptance.append(np.minimum(p[ids], q).sum())
                p2, q2 = softmax(theirs[b, t] / 2), softmax(ours[fill][b, t] / 2)
                loss.append(4 * (1 - np.minimum(p2[ids], q2).sum()))
                if best in ids:
                    n_covered += 1
                    p = p[ids] / p[ids].sum()
                    kl.append(np.sum(p * np.log(p / q)))
        assert 0 < n_covered < n == got["n_scored"]
        assert got["kl_by_fill"][fill] == pytest.approx(np.mean(kl), rel=1e-4)
        assert got["loss_by_fill"][fill] == pytest.approx(np.mean(loss), rel=1e-4)
        assert got["acceptance_by_fill"][fill] == pytest.approx(np.mean(acceptance), rel=1e-4)
        assert got["agree_target_by_fill"][fill] == pytest.approx(right / n)
        assert got["coverage"] == pytest.approx(n_covered / n)
    assert min(got["acceptance_by_fill"]) <= got["acceptance"] <= max(got["acceptance_by_fill"])


def test_a_row_counts_its_drafted_positions_alone():
    row = make_row([1, 2, 3, 1, 2, 3, 1], 3)
    at = {name: np.full((2, 9), 7.0) for name in ("kl", "loss", "acceptance")}
    at |= {name: np.ones((2, 9), bool) for name in ("agree_target", "agree_text")}
    at |= {name: np.ones(9, bool) for name in ("covered", "learnt")}
    at["acceptance"][:, 3:6] = 0.5
    at["covered"][4] = False
    sums = count_row(row, at)
    assert (sums["n_scored"], sums["n_covered"], sums["n_learnt"]) == (3, 2, 3)
    assert sums["kl"].tolist() == [14, 14] and sums["loss"].tolist() == [21, 21]
    assert sums["agree_text"].tolist() == [3, 3] and sums["decoded"].alpha == 1
    assert sums["sampled"].accepted == 1.5 and sums["looked_up"].accepted == 2


def test_replayed_greedy_text_costs_what_a_true_decode_does():
    """One row type per depth: training shows the draft, of four layers, what decoding shows it."""
    target = make_target(4, seed=3)
    draft = make_draft(target, full_config(4, 4), "perfect")
    *projs, deepest = draft.params["projs"]  # disturbed: the more complete, the worse it guesses
    noise = jax.random.normal(jax.random.split(jax.random.key(0), 5)[4], deepest["weight"].shape)
    projs += [{"weight": deepest["weight"] + 0.02 * noise}]
    draft = Draft(draft.params | {"projs": projs}, draft.config)
    options = {"mesh": "virtual", "stop_ids": (), "max_new_tokens": 40}
    rows, results, spreads = [], [], []
    for number in range(3):
        prompt = make_prompt(5, number + 1)
        results.append(spd_jax.decode(target, draft, prompt, **options))
        ids = np.array([*prompt, *results[-1].tokens], np.int32)
        rows.append(Row(ids, np.arange(45) >= 5, 0.0, number))
    teacher = Teacher(target.config, draft.config, target.params, Corpus(tuple(rows), ""))
    eval_step = make_eval_step(target.config, draft.config)

    def figures_of(rows):
        args = teacher, target.params, draft.params, rows, 64, 128
        return evaluate([eval_step], *args)[0]["T=0"]

    for row, result in zip(rows, results, strict=True):
        assert result.cycles == expected_cycles(4, result.accepted)
        figures = figures_of([row])
        assert figures["n_scored"] * (1 - figures["alpha"]) == pytest.approx(result.stats.rejects)
        assert figures["tau"] == pytest.approx(4 * 40 / result.cycles)
        assert 0 < figures["alpha"] < 1
        spreads.append(np.ptp(figures["agree_text_by_fill"]))
    assert max(spreads) > 0.1  # the fills matter
    pooled = figures_of(rows)
    assert pooled["tau"] == pytest.approx(4 * 3 * 40 / sum(r.cycles for r in results))
    assert pooled["alpha"] == pytest.approx(1 - sum(r.stats.rejects for r in results) / (3 * 39))
