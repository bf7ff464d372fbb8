"""Kept states score as the whole target does; the cache gives back what it was given."""

import dataclasses
import errno
import functools
import os

import jax
import numpy as np
import pytest

from spd_jax.checks import ConfigError
from spd_jax.models.distill import (
    count_scores,
    distillation_loss,
    mean_metrics,
    score_positions,
)
from spd_jax.models.draft import init_params
from train import teacher as teacher_module
from train.batches import make_batch
from train.teacher import StateCache, Teacher, teacher_outputs


def open_cache(directory, small, corpus, sha256="aa", draft=None):
    draft = draft or small.draft
    return StateCache(directory, corpus, small.target, draft, np.float32, sha256)


@pytest.mark.parametrize("head", ["own", "target"])
@pytest.mark.parametrize("draft_ids", [None, tuple(range(5, 45))])
@pytest.mark.parametrize("anchors", [(0, 2, 3, 4), (0, 2)])  # the second lacks the last state
def test_kept_states_score_as_the_whole_target_does(small, corpus, head, draft_ids, anchors):
    draft = dataclasses.replace(small.draft, head=head, draft_ids=draft_ids, anchors=anchors)
    params = init_params(small.target, draft, small.target_params, jax.random.key(3))
    batch = make_batch(corpus.rows[:3], n_rows=4, length=24)
    settings = {"fill": 2, "temperature": 1.5, "mask_mode": "exact"}
    whole = functools.partial(distillation_loss, small.target, draft, **settings)
    expected, metrics = jax.jit(whole)(small.target_params, params, batch)
    taught = Teacher(small.target, draft, small.target_params, corpus)(batch)

    def from_kept(target_params, params, taught):
        kept = teacher_outputs(small.target, draft, taught)
        scores = score_positions(small.target, draft, target_params, params, *kept, **settings)
        return mean_metrics(count_scores(scores))

    loss, same = jax.jit(from_kept)(small.target_params, params, taught)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(same["accuracy"], metrics["accuracy"], rtol=1e-6)
    assert int(same["n_valid"]) == int(metrics["n_valid"]) > 0


def test_the_cache_gives_back_the_states_bit_for_bit(small, corpus, tmp_path):
    cache = open_cache(tmp_path, small, corpus)
    plain = Teacher(small.target, small.draft, small.target_params, corpus)
    cached = Teacher(small.target, small.draft, small.target_params, corpus, cache)
    batch = make_batch([corpus.rows[i] for i in (5, 2, 7)], n_rows=4, length=24)
    expected = plain(batch)
    np.testing.assert_array_equal(cached(batch)["states"], expected["states"])
    assert cache.n_done == 3
    # A new process without a target: what it returns can only come from the files.
    blind = Teacher(small.target, small.draft, None, corpus, open_cache(tmp_path, small, corpus))
    again = blind(batch)
    valid = batch["attention_mask"] > 0
    np.testing.assert_array_equal(again["states"], expected["states"])
    np.testing.assert_array_equal(again["best"][valid], expected["best"][valid])
    other = make_batch([corpus.rows[i] for i in (2, 3)], n_rows=4, length=24)
    cached(other)  # one row known, one not: computed again and kept
    assert cache.n_done == 4


def test_another_target_or_other_data_never_share_a_cache(small, corpus, tmp_path):
    row = corpus.rows[0]
    batch = make_batch([row], n_rows=1, length=24)
    cache = open_cache(tmp_path, small, corpus)
    Teacher(small.target, small.draft, small.target_params, corpus, cache)(batch)
    assert open_cache(tmp_path, small, corpus).n_done == 1
    assert open_cache(tmp_path, small, corpus, sha256="bb").n_done == 0
    changed = dataclasses.replace(corpus, sha256="0" * 64)
    assert open_cache(tmp_path, small, changed).n_done == 0


def test_a_draft_of_some_ids_never_reads_the_choices_that_one_of_all_ids_left_out(
    small, corpus, tmp_path
):
    batch = make_batch(corpus.rows[:2], n_rows=2, length=24)
    found = []
    for ids in (None, small.draft.draft_ids):
        draft = dataclasses.replace(small.draft, draft_ids=ids)
        cache = open_cache(tmp_path, small, corpus, draft=draft)
        assert cache.n_done == 0
        found.append(Teacher(small.target, draft, small.target_params, corpus, cache)(batch))
    plain = Teacher(small.target, small.draft, small.target_params, corpus)(batch)
    np.testing.assert_array_equal(found[1]["best"], plain["best"])
    assert np.any(found[1]["best"]) and not np.any(found[0]["best"])


def test_a_disk_that_fills_while_blocks_are_claimed_leaves_no_cache(
    small, corpus, tmp_path, monkeypatch
):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(teacher_module.os, "posix_fallocate", full)
        with pytest.raises(ConfigError, match="cannot keep states .*No space left"):
            open_cache(tmp_path, small, corpus)
        with pytest.raises(ConfigError, match="cannot keep states"):  # not taken for a whole one
            open_cache(tmp_path, small, corpus)
    assert open_cache(tmp_path, small, corpus).n_done == 0


@pytest.mark.parametrize("part", ["states", "best", "done"])
def test_a_cache_that_was_cut_short_is_made_anew(small, corpus, tmp_path, part, capsys):
    cache = open_cache(tmp_path, small, corpus)
    Teacher(small.target, small.draft, small.target_params, corpus, cache)(
        make_batch(corpus.rows[:3], n_rows=4, length=24)
    )
    assert open_cache(tmp_path, small, corpus).n_done == 3
    assert not capsys.readouterr().err
    (path,) = tmp_path.glob(f"*.{part}")
    size = path.stat().st_size
    os.truncate(path, 5)
    assert open_cache(tmp_path, small, corpus).n_done == 0
    assert "was cut short; it is made anew" in capsys.readouterr().err
    assert path.stat().st_size == size


def test_a_cache_that_does_not_fit_is_an_error(small, corpus, tmp_path, monkeypatch):
    usage = teacher_module.shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(teacher_module.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ConfigError, match="GB are free; set state_cache False"):
        open_cache(tmp_path, small, corpus)
