"""The structural mask against its definition, cell by cell, in both modes."""

import functools

import numpy as np
import pytest

from spd_jax.checks import ConfigError
from spd_jax.config import PipelineConfig
from spd_jax.models.visibility import all_blocks, live_blocks, structural_mask

SHAPES = [  # L, N, stage_layers, anchors
    (4, 2, None, (0, 2, 4)),
    (8, 2, None, (0, 4, 7)),
    (8, 4, None, (0, 2, 6, 7)),
    (9, 4, None, (0, 3, 5, 7, 9)),
    (10, 3, (5, 1, 4), (0, 5, 6)),
    (8, 8, None, (0, 1, 3, 6, 7)),
    (8, 8, None, (0, 1, 2, 3, 4, 5, 6, 7, 8)),
    (6, 5, None, (0,)),
    (8, 4, None, (0, 2, 6, 7, 8)),  # no depth reaches type 3
]


def naive_mask(pipeline, anchors, n_tokens, fill, mode) -> np.ndarray:
    """One query row and one key row at a time, as the definition says."""
    n, n_types = pipeline.n_stages, len(anchors)
    row_types, min_depths = pipeline.row_types(anchors), pipeline.min_depths(anchors)
    seen = np.zeros((n_types, n_tokens, n_types, n_tokens), bool)
    for query_block in range(n_types):
        d = min_depths[n_types - 1 - query_block]  # deepest block first
        for t in range(n_tokens):
            for key_block in range(n_types):
                for key_t in range(t + 1):
                    distance = t - key_t
                    needed = row_types[min(n, d + distance)]
                    reached = distance if mode == "reference" else d + distance
                    if fill < n and reached >= fill:
                        needed = n_types - 1
                    key_type = n_types - 1 - key_block
                    seen[query_block, t, key_block, key_t] = key_type == needed
    return seen.reshape(n_types * n_tokens, n_types * n_tokens)


@functools.cache
def masks(shape, fill, n_tokens=12):
    """The masks of both modes, exact first."""
    n_layers, n_stages, stage_layers, anchors = shape
    pipeline = PipelineConfig(n_layers, n_stages, stage_layers)
    return [
        np.asarray(structural_mask(pipeline, anchors, n_tokens, fill, mode))
        for mode in ("exact", "reference")
    ]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_cell_is_as_defined(shape):
    pipeline, anchors = PipelineConfig(*shape[:3]), shape[3]
    for fill in range(1, pipeline.n_stages + 1):
        for got, mode in zip(masks(shape, fill), ("exact", "reference"), strict=True):
            want = naive_mask(pipeline, anchors, 12, fill, mode)
            np.testing.assert_array_equal(got, want, err_msg=f"{mode}, fill {fill}")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_query_sees_each_earlier_token_in_exactly_one_row(shape):
    n_types = len(shape[3])
    causal = np.tile(np.tril(np.ones((12, 12), int)), (n_types, 1))
    for fill in range(1, shape[1] + 1):
        for mask in masks(shape, fill):
            np.testing.assert_array_equal(mask.reshape(-1, n_types, 12).sum(1), causal)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_modes_agree_at_full_fill_and_for_scored_rows(shape):
    exact, reference = masks(shape, shape[1])
    np.testing.assert_array_equal(exact, reference)
    for fill in range(1, shape[1]):
        exact, reference = masks(shape, fill)
        np.testing.assert_array_equal(exact[-12:], reference[-12:])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_modes_differ_only_where_the_query_has_a_depth(shape):
    """In cells with t - T < fill <= d + t - T, by showing the deepest row in place of another."""
    n_types, row_types = len(shape[3]), PipelineConfig(*shape[:3]).row_types(shape[3])
    depths = PipelineConfig(*shape[:3]).min_depths(shape[3])[::-1]
    time = np.arange(12)
    distance = time[:, None] - time
    age = np.asarray(depths)[:, None, None] + distance  # [M, T, T]
    for fill in range(1, shape[1]):
        exact, reference = (m.reshape(n_types, 12, n_types, 12) for m in masks(shape, fill))
        between = (distance < fill) & (age >= fill) & (distance >= 0)
        shallower = np.asarray(row_types)[np.clip(age, 0, shape[1])] < n_types - 1
        differs = (exact != reference).any(2)  # [M, T, T]
        np.testing.assert_array_equal(differs, between & shallower)
        assert exact[:, :, 0][differs].all() and not reference[:, :, 0][differs].any()


def test_modes_differ_in_34_of_560_cells_of_an_eight_stage_pipeline():
    pipeline, anchors = PipelineConfig(32, 8), (0, 4, 12, 24, 31)
    n_differing = 0
    for fill in range(1, 8):
        exact, reference = (
            np.asarray(structural_mask(pipeline, anchors, 16, fill, mode)).reshape(5, 16, 5, 16)
            for mode in ("exact", "reference")
        )
        n_differing += (exact != reference)[:, -1].any(1).sum()  # the newest query: 5 * 16 cells
    assert n_differing == 34


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_of_types_that_are_not_live_are_seen_by_no_live_row(shape):
    pipeline, anchors = PipelineConfig(*shape[:3]), shape[3]
    for fill in range(1, pipeline.n_stages + 1):
        for mask, mode in zip(masks(shape, fill), ("exact", "reference"), strict=True):
            blocks = live_blocks(pipeline, anchors, fill, mode)
            kept = [i in blocks for i in all_blocks(anchors)]
            assert kept[-1]  # the scored rows
            kept = np.repeat(kept, 12)
            assert not mask[kept][:, ~kept].any()
            part = structural_mask(pipeline, anchors, 12, fill, mode, blocks)
            np.testing.assert_array_equal(part, mask[kept][:, kept])


def test_few_tokens_in_flight_need_few_row_types():
    pipeline, anchors = PipelineConfig(30, 5), (0, 6, 12, 18, 24, 30)
    live = [live_blocks(pipeline, anchors, fill, "exact") for fill in range(1, 6)]
    assert live == [(5, 0), (5, 1, 0), (5, 2, 1, 0), (5, 3, 2, 1, 0), (5, 4, 3, 2, 1, 0)]


def test_an_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match="'exact' or 'reference', got 'published'"):
        structural_mask(PipelineConfig(4, 2), (0, 2), 3, 1, "published")
