"""Heads written for the reference implementation: nothing lost on the way there and back."""

import dataclasses
import json
import zipfile

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import spd_jax
from spd_jax.config import DraftConfig, TargetConfig, V10DraftConfig
from spd_jax.models.bundle import Draft
from spd_jax.weights import keymaps, load_draft_file
from spd_jax.weights.heads import draft_sizes, save_head
from spd_jax.weights.reference_config import FALLBACK
from spd_jax.weights.reference_save import save_reference_head
from spd_jax.weights.torch_zip import load_torch_zip, save_torch_zip

DRAFT = DraftConfig((0, 1), n_stages=2, n_layers=1, feature_norm="none", qk_norm=True)


def params_of(draft: DraftConfig, target: TargetConfig, seed: int = 0) -> dict:
    """Random weights that bfloat16 holds exactly."""
    rng = np.random.default_rng(seed)

    def take(_, shape):
        return rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)

    sizes = draft_sizes(draft, dataclasses.asdict(target))
    return keymaps.read_draft(draft, "p{i}", "{i}.", sizes, take)


def test_reference_heads_come_back_as_they_were(tmp_path, golden, assert_same):
    paths = sorted(golden.glob("*/n*/head_config.json"))
    assert len(paths) >= 10
    for number, path in enumerate(paths):
        draft, params, meta = load_draft_file(path.parent)
        saved = tmp_path / str(number)
        save_reference_head(saved, draft, meta, params, base_model_path="../target")
        stored, written = (load_file(d / "head.safetensors") for d in (path.parent, saved))
        assert_same(written, stored)
        before, after = (json.loads((d / path.name).read_text()) for d in (path.parent, saved))
        assert after.pop("trained_with_use_deepest") is True  # as decoding here does
        assert after == {k: v for k, v in before.items() if k != "trained_with_use_deepest"}
        for source in (saved, saved / "head.pt"):
            again = load_draft_file(source)
            assert again[0] == draft and again[2] == meta
            assert_same(again[1], params)


def test_an_exported_head_guesses_what_the_head_guesses(tmp_path):
    target = spd_jax.load_target("tiny")
    config = dataclasses.replace(
        DRAFT, anchors=(0, 2, 3), n_stages=2, draft_ids=tuple(range(5, 250, 2)),
        target_sha256=target.sha256,
    )  # fmt: skip
    params = params_of(config, target.config)
    save_head(tmp_path / "ours", config, target.config, params, "")
    ours = spd_jax.load_draft(tmp_path / "ours", target)
    draft, tree, meta = load_draft_file(tmp_path / "ours")
    (written,) = save_reference_head(tmp_path / "theirs.pt", draft, meta, tree)
    theirs = spd_jax.load_draft(written, target)
    width = target.config.d_ff
    assert theirs.config == dataclasses.replace(config, target_sha256=None, d_ff=width)
    ids = np.random.default_rng(0).integers(0, 250, 24)

    def guesses(head):
        return np.asarray(spd_jax.draft_predictions(target, head, ids, fill=2)).tolist()

    assert guesses(theirs) == guesses(ours)
    assert len(set(guesses(ours))) > 3
    other = jax.tree.map(jnp.asarray, params_of(config, target.config, seed=1))
    assert guesses(Draft(other, config)) != guesses(ours)


def test_a_v12_head_is_saved_as_v11_with_its_stages(tmp_path, config, assert_same, caplog):
    draft = dataclasses.replace(DRAFT, anchors=(0, 1, 3), stage_layers=(1, 3), d_ff=64)
    four = dataclasses.replace(config, n_layers=4)
    params = params_of(draft, four)
    save_reference_head(tmp_path / "a", draft, four, params)
    (line,) = [r.getMessage() for r in caplog.records]
    assert "stages of 1, 3 layers" in line and "distributed" in line
    path = tmp_path / "a" / "head_config.json"
    fields = json.loads(path.read_text())
    assert fields["version"] == 11 and fields["stage_layers"] == [1, 3]
    path.write_text(json.dumps(fields | {"version": 12, "stage_layer_ranges": [[0, 1], [1, 4]]}))
    loaded, tree, meta = load_draft_file(tmp_path / "a")
    assert loaded == draft and meta["n_layers"] == 4
    save_reference_head(tmp_path / "b", loaded, meta, tree)
    again = load_draft_file(tmp_path / "b" / "head.pt")
    assert again[0] == draft
    assert_same(again[1], params)


def test_stages_that_no_even_cut_gives_are_told(tmp_path, config):
    three = dataclasses.replace(config, n_layers=3)
    save_reference_head(tmp_path / "h.pt", DRAFT, three, params_of(DRAFT, three))
    assert load_torch_zip(tmp_path / "h.pt")["config"]["stage_layers"] == [2, 1]
    save_reference_head(tmp_path / "even.pt", DRAFT, config, params_of(DRAFT, config))
    assert "stage_layers" not in load_torch_zip(tmp_path / "even.pt")["config"]


def test_an_anchor_at_the_last_output_is_warned_of(tmp_path, config, caplog):
    draft = dataclasses.replace(DRAFT, anchors=(0, 2))
    save_reference_head(tmp_path / "h.pt", draft, config, params_of(draft, config))
    (line,) = [r.getMessage() for r in caplog.records]
    assert "anchor 2 is the last layer's output" in line and "\n" not in line


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"feature_norm": "rms"}, "feature_norm rms"),
        ({"qk_norm": False}, "qk_norm False"),
        ({"head": "target", "qk_norm": False}, "qk_norm False, head target"),
    ],
)
def test_a_head_of_other_settings_is_refused(tmp_path, config, refused, change, word):
    draft = dataclasses.replace(DRAFT, **change)
    with refused(word, "feature_norm none, qk_norm true and head own"):
        save_reference_head(tmp_path / "x.pt", draft, config, params_of(draft, config))
    assert not (tmp_path / "x.pt").exists()


def test_a_head_of_another_shape_is_refused(tmp_path, config, refused):
    for change, words in (
        ({"d_ff": 24}, ("d_ff 24", "MLP width 64")),
        ({"anchors": (0, 1, 2, 3)}, ("at most 3 anchors for 2 stages, got 4",)),
    ):
        draft = dataclasses.replace(DRAFT, **change)
        with refused(*words):
            save_reference_head(tmp_path / "x.pt", draft, config, params_of(draft, config))


def test_a_v10_head_is_refused(tmp_path, config, refused):
    draft = V10DraftConfig(((0, 1, 2), (0, 1), (0,)), n_layers=1, d_ff=24)
    with refused("v10", "not saved"):
        save_reference_head(tmp_path / "x.pt", draft, config, {})


def test_a_target_without_dense_mlps_takes_the_width_from_the_config(tmp_path, config):
    target = dataclasses.asdict(config) | {"d_ff": None}
    draft = dataclasses.replace(DRAFT, d_ff=48)
    params = params_of(draft, config)
    save_reference_head(tmp_path / "h.pt", draft, target, params)
    assert load_torch_zip(tmp_path / "h.pt")["config"]["spec_intermediate_size_fallback"] == 48


@pytest.mark.parametrize("stated", [48, 9216, None])
def test_an_imported_head_keeps_its_width_for_targets_without_one(tmp_path, config, stated):
    mixture = dataclasses.asdict(config) | {"d_ff": None}
    draft = dataclasses.replace(DRAFT, d_ff=48)
    save_reference_head(tmp_path / "a", draft, mixture, params_of(draft, config))
    path = tmp_path / "a" / "head_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {FALLBACK: stated}))
    loaded, tree, meta = load_draft_file(tmp_path / "a")
    save_reference_head(tmp_path / "b.pt", loaded, meta, tree)
    # Without the setting, the head's own width is right whatever the target is.
    assert load_torch_zip(tmp_path / "b.pt")["config"][FALLBACK] == (stated or 48)


def test_rounding_is_said_and_float32_avoids_it(tmp_path, config, assert_same, caplog):
    params = params_of(DRAFT, config)
    params["lm_head"]["weight"] = params["lm_head"]["weight"] + np.float32(1e-7)
    save_reference_head(tmp_path / "a.pt", DRAFT, config, params)
    assert ["rounded to bfloat16" in r.getMessage() for r in caplog.records] == [True]
    caplog.clear()
    save_reference_head(tmp_path / "b.pt", DRAFT, config, params, dtype="float32")
    assert not caplog.records
    assert_same(load_draft_file(tmp_path / "b.pt")[1], params)


def test_nothing_is_overwritten_unasked(tmp_path, config, refused):
    params = params_of(DRAFT, config)
    for path in (tmp_path / "h", tmp_path / "h.pt"):
        save_reference_head(path, DRAFT, config, params)
        with refused(str(path), "there already", "--replace"):
            save_reference_head(path, DRAFT, config, params)
        save_reference_head(path, DRAFT, config, params_of(DRAFT, config, 1), replace=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["h", "h.pt"]
    (tmp_path / "h" / "notes.txt").write_text("mine")
    with refused("other files"):
        save_reference_head(tmp_path / "h", DRAFT, config, params, replace=True)
    with refused("is a directory"):
        (tmp_path / "d.pt").mkdir()
        save_reference_head(tmp_path / "d.pt", DRAFT, config, params, replace=True)
    with refused("ends in .pt, or a directory"):
        save_reference_head(tmp_path / "h.safetensors", DRAFT, config, params)
    with refused("cannot write"):
        save_reference_head(tmp_path / "h.pt" / "below", DRAFT, config, params)


def test_a_failed_write_leaves_what_was_there(tmp_path, config, monkeypatch):
    params = params_of(DRAFT, config)
    save_reference_head(tmp_path / "h.pt", DRAFT, config, params)
    before = (tmp_path / "h.pt").read_bytes()

    def fail(file, value):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("spd_jax.weights.reference_save.save_torch_zip", fail)
    for path in (tmp_path / "h.pt", tmp_path / "d"):
        with pytest.raises(KeyboardInterrupt):
            save_reference_head(path, DRAFT, config, params, replace=True)
    assert [p.name for p in tmp_path.iterdir()] == ["h.pt"]
    assert (tmp_path / "h.pt").read_bytes() == before


VALUE = {
    "state_dict": {
        "a": np.arange(12, dtype=np.float32).reshape(3, 4),
        "b": np.arange(6, dtype=ml_dtypes.bfloat16).reshape(3, 2).T,
        "c": np.arange(5),
        "d": np.float16([[1.5]]),
    },
    "config": {"ids": [1, 300, 70000, 1 << 40], "none": None, "yes": True, "é": 1.5},
}


def test_a_written_zip_reads_back_and_its_storages_are_aligned(tmp_path, assert_same):
    path = tmp_path / "x.pt"
    with open(path, "wb") as file:
        save_torch_zip(file, VALUE)
    read = load_torch_zip(path)
    assert read["config"] == VALUE["config"]
    assert_same(dict(read["state_dict"]), VALUE["state_dict"])
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        for i, name in enumerate("abcd"):
            data = VALUE["state_dict"][name].tobytes()
            assert archive.read(f"archive/data/{i}") == data
            header = archive.getinfo(f"archive/data/{i}").header_offset
            start = content.index(data, header)
            assert start % 64 == 0
    with open(tmp_path / "y.pt", "wb") as file:
        save_torch_zip(file, VALUE)
    assert (tmp_path / "y.pt").read_bytes() == content


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_reads_what_is_written_and_is_read_back(tmp_path, config, assert_same, mmap):
    torch = pytest.importorskip("torch")
    draft = dataclasses.replace(DRAFT, draft_ids=(1, 5, 39))
    params = params_of(draft, config)
    save_reference_head(tmp_path / "h", draft, config, params, base_model_path="some/model")
    whole = torch.load(tmp_path / "h" / "head.pt", weights_only=True, mmap=mmap)
    assert whole["config"] == json.loads((tmp_path / "h" / "head_config.json").read_text())
    stored = load_file(tmp_path / "h" / "head.safetensors")
    assert whole["state_dict"].keys() == stored.keys()
    for name, tensor in whole["state_dict"].items():
        assert tensor.dtype == torch.bfloat16
        np.testing.assert_array_equal(tensor.float().numpy(), stored[name].astype(np.float32))
    torch.save(whole, tmp_path / "copy.pt")
    again = load_draft_file(tmp_path / "copy.pt")
    assert again[0] == dataclasses.replace(draft, d_ff=64)
    assert_same(again[1], params)
