"""The settings: row types at each depth, uneven stages, and errors that say what to change."""

import dataclasses

import pytest

from spd_jax.checks import ConfigError, from_fields, is_number
from spd_jax.config import (
    DraftConfig,
    PipelineConfig,
    SamplingConfig,
    TargetConfig,
    V10DraftConfig,
)

TARGET = {
    "vocab_size": 10,
    "d_model": 8,
    "n_layers": 4,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 2,
    "d_ff": 16,
    "norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_context": 64,
}
DRAFT = {"anchors": (0, 2, 4), "n_stages": 2}


@pytest.mark.parametrize(
    ("n_stages", "anchors", "row_types", "min_depths"),
    [
        (8, (0, 8, 16, 24, 31), (0, 0, 1, 1, 2, 2, 3, 3, 4), (0, 2, 4, 6, 8)),
        (8, (0, 4, 12, 24, 31), (0, 1, 1, 2, 2, 2, 3, 3, 4), (0, 1, 3, 6, 8)),
        (4, (0, 8, 16, 24, 31), (0, 1, 2, 3, 4), (0, 1, 2, 3, 4)),
        (4, (0, 8, 24, 31, 32), (0, 1, 1, 2, 4), (0, 1, 3, 5, 4)),  # no depth reaches type 3
        (16, (0, 2, 6, 12, 31), (0, 1, 1, *[2] * 3, *[3] * 10, 4), (0, 1, 3, 6, 16)),
        (16, (0, 8, 16, 24, 31), (*[0] * 4, *[1] * 4, *[2] * 4, *[3] * 4, 4), (0, 4, 8, 12, 16)),
    ],
)
def test_row_types_of_a_32_layer_target(n_stages, anchors, row_types, min_depths):
    pipeline = PipelineConfig(32, n_stages)
    assert pipeline.row_types(anchors) == row_types
    assert pipeline.min_depths(anchors) == min_depths


def test_uneven_stages_count_the_layers_that_are_done():
    pipeline = PipelineConfig(8, 3, (2, 5, 1))
    assert pipeline.starts == (0, 2, 7, 8)
    assert pipeline.row_types((0, 2, 6, 8)) == (0, 1, 2, 3)
    assert pipeline.row_types((0, 3, 5, 8)) == (0, 0, 2, 3)  # max stage * depth would say 0 2 3 3
    assert pipeline.min_depths((0, 3, 5, 8)) == (0, 4, 2, 3)


@pytest.mark.parametrize(
    ("n_layers", "n_stages", "stage_layers"),
    [(8, 4, (2, 2, 2, 2)), (30, 4, (8, 8, 7, 7)), (7, 5, (2, 2, 1, 1, 1)), (3, 3, (1, 1, 1))],
)
def test_by_default_the_first_stages_take_the_rest(n_layers, n_stages, stage_layers):
    assert PipelineConfig(n_layers, n_stages).stage_layers == stage_layers


@pytest.mark.parametrize("n_stages", range(2, 13))
def test_default_anchors_give_each_depth_its_own_type(n_stages):
    pipeline = PipelineConfig(12, n_stages)
    anchors = pipeline.default_anchors()
    assert DraftConfig(anchors=anchors, n_stages=n_stages).anchors[-1] == 12
    assert pipeline.row_types(anchors) == pipeline.min_depths(anchors) == (*range(n_stages + 1),)


def error_of(make, *args, **kwargs) -> str:
    with pytest.raises(ConfigError) as caught:
        make(*args, **kwargs)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("n_stages", "stage_layers", "words"),
    [
        (1, None, ("n_stages", "from 2 to", "8 layers", "got 1")),
        (9, None, ("n_stages", "from 2 to", "8 layers", "got 9")),
        (3, (4, 4), ("stage_layers", "3 positive counts", "sum to 8", "(4, 4)")),
        (2, (4, 5), ("stage_layers", "sum to 8", "(4, 5)")),
        (2, (8, 0), ("stage_layers", "positive", "(8, 0)")),
    ],
)
def test_impossible_pipelines_are_named(n_stages, stage_layers, words):
    text = error_of(PipelineConfig, 8, n_stages, stage_layers)
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_layers": 0}, ("n_layers", "at least 1", "0")),
        ({"vocab_size": 2.0}, ("vocab_size", "an integer", "2.0")),
        ({"n_kv_heads": 3}, ("n_heads (4)", "multiple", "n_kv_heads (3)")),
        ({"head_dim": 3}, ("head_dim", "even", "3")),
        ({"n_layers": True}, ("n_layers", "an integer", "True")),
        ({"d_ff": 0}, ("d_ff", "at least 1", "0")),
        ({"norm_eps": float("nan")}, ("norm_eps", "number >= 0", "nan")),
        ({"rope_theta": float("inf")}, ("rope_theta", "positive number", "inf")),
    ],
)
def test_impossible_targets_are_named(change, words):
    text = error_of(TargetConfig, **(TARGET | change))
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"anchors": ()}, ("anchors", "start at 0")),
        ({"anchors": (1, 2)}, ("anchors", "start at 0", "(1, 2)")),
        ({"anchors": (0, 3, 3)}, ("anchors", "strictly increase", "(0, 3, 3)")),
        ({"n_stages": 1}, ("n_stages", "at least 2", "1")),
        ({"n_layers": 0}, ("n_layers", "at least 1", "0")),
        ({"n_layers": 1.5}, ("n_layers", "an integer", "1.5")),
        ({"d_ff": 1.5}, ("d_ff", "an integer", "1.5")),
        ({"stage_layers": 4}, ("stage_layers", "sequence of integers", "4")),
        ({"stage_layers": (4,)}, ("stage_layers", "positive counts", "(4,)")),
        ({"target_sha256": 5}, ("target_sha256", "text", "5")),
        ({"feature_norm": "layer"}, ("feature_norm", "'rms' or 'none'", "'layer'")),
        ({"head": "tied"}, ("head", "'own' or 'target'", "'tied'")),
        ({"draft_ids": ()}, ("draft_ids", "at least one")),
        ({"draft_ids": (3, 1)}, ("draft_ids", "sorted")),
        ({"draft_ids": (1, 1)}, ("draft_ids", "unique")),
        ({"draft_ids": (-1, 1)}, ("draft_ids", "not negative")),
    ],
)
def test_impossible_drafts_are_named(change, words):
    text = error_of(DraftConfig, **(DRAFT | change))
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"row_anchors": ((0, 1), (0,))}, ("n_stages", "at least 2", "1")),
        ({"row_anchors": ((0, 2), (), (0,))}, ("row_anchors", "at least one")),
        ({"row_anchors": ((0, 2), (-1, 1), (0,))}, ("row_anchors", "from 0 on", "-1")),
        ({"row_anchors": ((0, 2), (0, 1.5), (0,))}, ("row_anchors", "an integer", "1.5")),
        ({"n_layers": 0}, ("n_layers", "at least 1", "0")),
        ({"draft_ids": (3, 1)}, ("draft_ids", "sorted")),
    ],
)
def test_impossible_v10_drafts_are_named(change, words):
    fields = {"row_anchors": ((0, 2, 4), (0, 2), (0,)), "n_layers": 1, "d_ff": 16}
    draft = V10DraftConfig(**fields)
    assert draft.n_stages == 2 and draft.anchors == (0, 2, 4) and hash(draft)
    text = error_of(V10DraftConfig, **(fields | change))
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"temperature": -0.1}, ("temperature", "from 0.0001 to 10000", "-0.1")),
        ({"temperature": 1e-5}, ("temperature", "0 (greedy)", "1e-05")),
        ({"temperature": 1e5}, ("temperature", "10000", "100000.0")),
        ({"top_k": -1}, ("top_k", "at least 0", "-1")),
        ({"top_k": None}, ("top_k", "an integer", "None")),
        ({"top_p": 0.0}, ("top_p", "(0, 1]", "0.0")),
        ({"top_p": 1.1}, ("top_p", "(0, 1]", "1.1")),
        ({"verifier": "greedy"}, ("verifier", "'rejection' or 'coupled'", "'greedy'")),
    ],
)
def test_impossible_sampling_is_named(change, words):
    text = error_of(SamplingConfig, **change)
    assert all(word in text for word in words), text


def test_a_misspelt_field_gets_a_suggestion():
    text = error_of(from_fields, DraftConfig, DRAFT | {"n_stage": 3}, "head.json")
    assert text.startswith("head.json: unknown field 'n_stage' of DraftConfig")
    assert text.endswith("did you mean 'n_stages'?")
    text = error_of(from_fields, DraftConfig, DRAFT | {"zzz": 3}, "head.json")
    assert "'zzz'" in text and "there are anchors, n_stages" in text


def test_missing_and_wrong_fields_name_their_source():
    text = error_of(from_fields, DraftConfig, {}, "head.json")
    assert text.startswith("head.json: DraftConfig lacks anchors, n_stages")
    text = error_of(from_fields, DraftConfig, DRAFT | {"n_stages": 1}, "head.json")
    assert text.startswith("head.json: n_stages must be at least 2")


def test_fields_round_trip_and_lists_become_tuples():
    draft = DraftConfig(**DRAFT, draft_ids=(1, 5))
    fields = {k: [*v] if isinstance(v, tuple) else v for k, v in dataclasses.asdict(draft).items()}
    built = from_fields(DraftConfig, fields, "head.json")
    assert built == draft and hash(built) == hash(draft)


def test_an_integer_beyond_a_float_is_finite_and_no_temperature_for_all_that():
    assert is_number(10**400) and not is_number(float("inf")) and not is_number(float("nan"))
    with pytest.raises(ConfigError, match="top_p must be in"):
        SamplingConfig(top_p=10**400)
