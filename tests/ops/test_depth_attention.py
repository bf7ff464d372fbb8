"""Attention by distance against the same under a dense mask, outputs and gradients."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spd_jax.ops import depth_attention
from spd_jax.ops.attention import attend, segment_mask, segment_positions
from spd_jax.ops.depth_attention import attend_by_depth

SEEN = np.array([[0, 0, 0, 0], [1, 0, 0, 0], [2, 1, 1, 0], [3, 3, 2, 1]])  # [Kq, n] of K = 4
FAR_FROM = np.array([0, 1, 3, 4])


def dense_mask(seen, far_from, n_tokens):
    """Bool [Kq * T, K * T], one cell at a time."""
    mask = np.zeros((len(seen), n_tokens, 4, n_tokens), bool)
    for block in range(len(seen)):
        for t in range(n_tokens):
            for distance in range(t + 1):
                key = 0 if distance >= far_from[block] else seen[block][distance]
                mask[block, t, key, t - distance] = True
    return mask.reshape(len(seen) * n_tokens, 4 * n_tokens)


def rows(n_query_blocks, n_tokens, n_batch=2, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(n_query_blocks, 4), (4, 2), (4, 2)]  # blocks, heads
    return [
        jnp.asarray(rng.standard_normal((n_batch, k * n_tokens, heads, 8), np.float32))
        for k, heads in shapes
    ]


def attend_densely(q, k, v, segments, mask):
    n_tokens = segments.shape[1]
    n_query, n_keys = (n // n_tokens for n in mask.shape)
    mask = mask & jnp.tile(segment_mask(segments), (1, n_query, n_keys))
    return attend(q, k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3), mask)


ALL, NEWEST, DEEPEST = slice(0, 4), slice(3, 4), slice(0, 1)  # query blocks


@pytest.mark.parametrize(
    ("n_tokens", "blocks", "chunk_scores"),  # so many scores: one query at a time, a few, all
    [
        (1, ALL, 1),
        (3, ALL, 1 << 24),
        (29, ALL, 1),
        (29, ALL, 2000),
        (29, NEWEST, 2000),
        (29, NEWEST, 1 << 24),
        (29, DEEPEST, 2000),
    ],
    ids=str,
)
def test_outputs_and_gradients_are_those_under_the_dense_mask(
    monkeypatch, n_tokens, blocks, chunk_scores
):
    monkeypatch.setattr(depth_attention, "CHUNK_SCORES", chunk_scores)
    seen, far_from = SEEN[blocks], FAR_FROM[blocks]
    segments = jnp.asarray(np.repeat([[1], [7]], n_tokens, axis=1))
    segments = segments.at[1, n_tokens * 2 // 3 :].set(0)
    qkv = rows(len(seen), n_tokens)
    shown = jnp.tile(segments > 0, (1, len(seen)))[..., None]
    weights = jnp.asarray(np.random.default_rng(1).standard_normal(32, np.float32)) * shown

    def run(attend, qkv):
        return jnp.sum(jnp.sin(attend(*qkv)) * weights), attend(*qkv) * shown

    ours = functools.partial(attend_by_depth, seen=seen, far_from=far_from, segments=segments)
    dense = functools.partial(
        attend_densely, segments=segments, mask=dense_mask(seen, far_from, n_tokens)
    )
    results = [
        jax.jit(jax.grad(functools.partial(run, f), has_aux=True))(qkv) for f in (ours, dense)
    ]
    for got, want in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)


def test_traced_blocks_are_the_static_ones():
    qkv, segments = rows(4, 13), jnp.ones((2, 13), int)
    want = attend_by_depth(*qkv, SEEN, FAR_FROM, segments)
    at = jax.jit(lambda seen: attend_by_depth(*qkv, seen, np.full(4, 4), segments))
    np.testing.assert_allclose(at(SEEN), want, rtol=1e-5, atol=1e-6)


def test_packed_texts_are_each_as_alone():
    lens, seen, far_from = (5, 1, 9), SEEN, FAR_FROM
    qkv = rows(4, sum(lens) + 2, n_batch=1)
    segments = jnp.asarray([[1] * 5 + [2] + [3] * 9 + [0] * 2])
    packed = attend_by_depth(*qkv, seen, far_from, segments).reshape(4, 17, -1)
    start = 0
    for n in lens:
        alone = [
            x.reshape(1, 4, 17, *x.shape[2:])[:, :, start : start + n].reshape(
                1, 4 * n, *x.shape[2:]
            )
            for x in qkv
        ]
        want = attend_by_depth(*alone, seen, far_from, jnp.ones((1, n), int)).reshape(4, n, -1)
        np.testing.assert_allclose(packed[:, start : start + n], want, rtol=1e-5, atol=1e-6)
        start += n
    np.testing.assert_array_equal(packed[:, start:], 0)


def test_nothing_as_large_as_the_dense_mask_is_made():
    n_tokens = 600
    qkv, segments = rows(4, n_tokens, n_batch=1), jnp.ones((1, n_tokens), int)

    def loss(qkv):
        return jnp.sum(attend_by_depth(*qkv, SEEN, FAR_FROM, segments))

    text = jax.jit(jax.grad(loss)).lower(qkv).compile().as_text()
    largest = max(
        int(np.prod([int(n) for n in shape.split(",")]))
        for shape in re.findall(r"\[([\d,]+)\]", text)
    )
    assert largest < (4 * n_tokens) ** 2 / 2


def test_positions_begin_anew_in_each_segment_and_count_holes():
    segments = jnp.asarray(
        [[1, 1, 0, 1, 2, 3, 3, 0], [4, 4, 4, 4, 4, 4, 4, 4], [0, 0, 1, 1, 1, 2, 2, 0]]
    )
    want = [[0, 1, 2, 3, 0, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 0, 1, 2, 0, 1, 2]]
    np.testing.assert_array_equal(segment_positions(segments), want)


def test_bfloat16_is_near_the_float32_oracle():
    """Products of bfloat16 rows, sums in float32: errors of one rounding of operands and output."""
    qkv, segments = rows(4, 29), jnp.ones((2, 29), int)
    halves = [x.astype(jnp.bfloat16) for x in qkv]

    def total(attend, qkv):
        return jnp.sum(jnp.sin(attend(*qkv).astype(jnp.float32)))

    ours = functools.partial(attend_by_depth, seen=SEEN, far_from=FAR_FROM, segments=segments)
    dense = functools.partial(
        attend_densely, segments=segments, mask=dense_mask(SEEN, FAR_FROM, 29)
    )
    assert ours(*halves).dtype == jnp.bfloat16
    exact = [x.astype(jnp.float32) for x in halves]
    np.testing.assert_allclose(ours(*halves).astype(jnp.float32), dense(*exact), atol=0.03)
    got, want = (
        jax.grad(functools.partial(total, f))(x) for f, x in ((ours, halves), (dense, exact))
    )
    for a, b in zip(got, want, strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=0.01, atol=0.05)
