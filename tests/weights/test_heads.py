"""Our head directories: exact round trips, whole or absent, and every misfit named."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from spd_jax.config import DraftConfig, V10DraftConfig
from spd_jax.models.bundle import Trained
from spd_jax.weights import heads, keymaps, load_draft_file
from spd_jax.weights.heads import load_head_dir, read_trained, save_head

DRAFT = DraftConfig(anchors=(0, 1, 2), n_stages=2, n_layers=2)
VARIANTS = [
    DRAFT,
    dataclasses.replace(DRAFT, d_ff=24, qk_norm=True, feature_norm="none", stage_layers=(1, 1)),
    dataclasses.replace(DRAFT, head="target", draft_ids=(1, 5, 39), target_sha256="ab"),
    dataclasses.replace(DRAFT, draft_ids=(0, 7), n_layers=1),
]


def params_of(draft, target, dtype="float32") -> dict:
    rng = np.random.default_rng(1)
    sizes = heads.draft_sizes(draft, dataclasses.asdict(target))
    to = heads.run_dtype(dtype)
    return keymaps.read_draft(
        draft, "p{i}", "{i}.", sizes, lambda _, s: rng.standard_normal(s, np.float32).astype(to)
    )


@pytest.mark.parametrize("draft", VARIANTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reading_gives_what_was_written(tmp_path, config, assert_same, draft, dtype):
    params = params_of(draft, config, dtype)
    save_head(tmp_path / "a" / "h", draft, config, params, "# Card é\n", dtype)
    loaded, tree, meta = load_draft_file(tmp_path / "a" / "h", dtype)
    assert loaded == draft
    assert_same(tree, params)
    assert meta == {n: getattr(config, n) for n in (*heads.TARGET_SIZES, *heads.TARGET_FACTS)}
    assert (tmp_path / "a/h/README.md").read_text(encoding="utf-8") == "# Card é\n"
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["h"]


def test_how_a_head_was_trained_is_read_back_or_a_misfit_is_named(tmp_path, config, refused):
    for trained in (Trained(None, 256), Trained(False, 2048), None):
        save_head(tmp_path, DRAFT, config, params_of(DRAFT, config), "", trained=trained)
        assert read_trained(tmp_path) == trained
    assert read_trained(tmp_path / "model.safetensors") is None  # nor does a head.pt
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    for wrong, words in (
        ([], "'trained' must be an object"),
        ({"thinking": None}, "lacks sequence_len"),
        ({"thinking": 1, "sequence_len": 9}, "thinking must be true, false or null, got 1"),
        ({"thinking": None, "sequence_len": 1}, "sequence_len must be"),
        ({"thinking": None, "sequence_len": 9, "sequence_length": 9}, "unknown field"),
    ):
        path.write_text(json.dumps(fields | {"trained": wrong}))
        with refused(words):
            read_trained(tmp_path)


def test_weights_are_stored_as_bfloat16_and_widened(tmp_path, config, assert_same):
    params = params_of(DRAFT, config)
    save_head(tmp_path / "h", DRAFT, config, params, "")
    stored = load_file(tmp_path / "h" / "model.safetensors")
    assert {a.dtype.name for a in stored.values()} == {"bfloat16"}
    wide, narrow = (load_head_dir(tmp_path / "h", d)[1] for d in ("float32", "bfloat16"))
    a, b = (tree["layers"][1]["attn"]["qkv"]["weight"] for tree in (wide, narrow))
    assert a.dtype == np.float32
    np.testing.assert_array_equal(a, b.astype(np.float32))


def test_a_head_is_replaced_but_other_files_never(tmp_path, config, refused):
    for draft in VARIANTS[:2]:
        save_head(tmp_path / "h", draft, config, params_of(draft, config), "")
        assert load_head_dir(tmp_path / "h", "float32")[0] == draft
    assert [p.name for p in tmp_path.iterdir()] == ["h"]
    (tmp_path / "h" / "notes.txt").write_text("mine")
    with refused("other files"):
        save_head(tmp_path / "h", DRAFT, config, params_of(DRAFT, config), "")
    assert load_head_dir(tmp_path / "h", "float32")[0] == VARIANTS[1]


def test_a_card_shows_bytes_that_are_no_text(tmp_path, config):
    card = os.fsdecode(b"data/\xff.jsonl")
    save_head(tmp_path / "h", DRAFT, config, params_of(DRAFT, config), card)
    assert (tmp_path / "h" / "README.md").read_text() == "data/\\udcff.jsonl"


@pytest.mark.parametrize("kind", [OSError, SafetensorError])
def test_a_disk_that_fills_up_is_one_line_and_leaves_nothing(tmp_path, config, refused, kind):
    def full(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise kind("No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads, "save_file", full)
        with refused(str(tmp_path / "h"), "cannot write the head", "No space left"):
            save_head(tmp_path / "h", DRAFT, config, params_of(DRAFT, config), "")
    assert list(tmp_path.iterdir()) == []


def test_a_v10_head_is_not_saved(tmp_path, config, refused):
    draft = V10DraftConfig(((0, 1, 2), (0, 1), (0,)), n_layers=1, d_ff=24)
    with refused("a v10 head", "not saved", "use a v11 head, or train one"):
        save_head(tmp_path / "h", draft, config, {}, "")
    assert not (tmp_path / "h").exists()


KILLED = """
import sys
from pathlib import Path
from spd_jax.weights import directories, heads

def killed(*args, **kwargs):
    if {at!r} == "save_file":
        Path(args[1]).write_bytes(b"half")
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)

draft, params, target = heads.load_head_dir({source!r}, "float32")
target = __import__("spd_jax.config").config.TargetConfig(
    **target, norm_eps=1e-5, rope_theta=1e4, max_context=128
)
for module in (heads, directories):
    if hasattr(module, {at!r}):
        setattr(module, {at!r}, killed)
heads.save_head({directory!r}, draft, target, params, "")
"""


@pytest.mark.parametrize("at", ["save_file", "sync_file", "_swap_in"])
@pytest.mark.parametrize("before", [True, False])
def test_a_kill_leaves_the_old_head_or_none(tmp_path, config, at, before):
    new, parent = tmp_path / "new", tmp_path / "parent"
    save_head(new, DRAFT, config, params_of(DRAFT, config), "")
    if before:
        save_head(parent / "h", VARIANTS[1], config, params_of(VARIANTS[1], config), "")
    script = KILLED.format(at=at, source=str(new), directory=str(parent / "h"))
    root = str(Path(__file__).parents[2])
    run = subprocess.run([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": root})
    assert run.returncode == -signal.SIGKILL
    assert len(list(parent.iterdir())) == 1 + before  # what the killed writer left
    if before:
        assert load_head_dir(parent / "h", "float32")[0] == VARIANTS[1]
    save_head(parent / "h", DRAFT, config, params_of(DRAFT, config), "")
    assert load_head_dir(parent / "h", "float32")[0] == DRAFT
    assert [p.name for p in parent.iterdir()] == ["h"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: f["draft"].update(anchor=f["draft"].pop("anchors")), ("anchor", "anchors")),
        (lambda f: f["draft"].update(anchors=[0, 2, 1]), ("anchors",)),
        (lambda f: f["draft"].update(anchors=["0", 1]), ("anchors",)),
        (lambda f: f["draft"].update(n_stages="two"), ("n_stages", "'two'")),
        (lambda f: f["draft"].update(n_layers=None), ("n_layers", "None")),
        (lambda f: f["draft"].update(anchors=None), ("anchors", "None")),
        (lambda f: f["draft"].pop("n_stages"), ("n_stages",)),
        (lambda f: f["draft"].update(draft_ids=[0, 4]), ("draft_ids", "model.safetensors")),
        (lambda f: f["draft"].update(n_stages=2.5), ("n_stages", "integer", "2.5")),
        (lambda f: f["draft"].update(n_layers=True), ("n_layers", "integer", "True")),
        (lambda f: f["draft"].update(d_ff="64"), ("d_ff", "integer")),
        (lambda f: f["draft"].update(qk_norm=1), ("qk_norm", "1")),
        (lambda f: f["draft"].update(target_sha256=5), ("target_sha256", "5")),
        (lambda f: f["draft"].update(stage_layers=[9, 9]), ("stage_layers", "(9, 9)")),
        (lambda f: f["target"].update(d_modle=32), ("d_modle", "'d_model'")),
        (lambda f: f["target"].update(model_type=3), ("target.model_type",)),
        (lambda f: f["draft"].update(n_layers=3), ("layers.2.",)),
        (lambda f: f["draft"].update(n_layers=1), ("layers.1.",)),
        (lambda f: f["draft"].update(head="target"), ("lm_head.weight",)),
        (lambda f: f["target"].update(d_model=64), ("shape",)),
        (lambda f: f["target"].pop("n_heads"), ("target.n_heads",)),
        (lambda f: f.update(version=2), ("version",)),
        (lambda f: f.update(format="other"), ("other",)),
        (lambda f: f.update(target=None), ("target",)),
    ],
)
def test_a_misfit_in_config_is_named(tmp_path, config, refused, change, words):
    save_head(tmp_path / "h", DRAFT, config, params_of(DRAFT, config), "")
    path = tmp_path / "h" / "config.json"
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))
    with refused(str(tmp_path / "h"), *words):
        load_draft_file(tmp_path / "h")


@pytest.mark.parametrize("keep", [0, 7, 60, 3000, -1])
def test_truncated_weights_are_named(tmp_path, config, refused, keep):
    save_head(tmp_path / "h", DRAFT, config, params_of(DRAFT, config), "")
    path = tmp_path / "h" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with refused("model.safetensors"):
        load_draft_file(tmp_path / "h")


def test_bad_draft_id_tensors_are_named(tmp_path, config, refused):
    draft = VARIANTS[3]
    save_head(tmp_path / "h", draft, config, params_of(draft, config), "")
    path = tmp_path / "h" / "model.safetensors"
    whole = load_file(path)
    for ids in (np.array([7, 0]), np.array([0, 40]), np.array([[0, 7]]), np.array([0.0, 7.0])):
        save_file(whole | {"draft_ids": ids}, path)
        with refused("draft_ids"):
            load_draft_file(tmp_path / "h")


def test_anything_else_is_refused_with_what_is_accepted(tmp_path, refused):
    for source in (tmp_path, tmp_path / "absent", tmp_path / "x.bin"):
        with refused("head.pt", "config.json"):
            load_draft_file(source)
    for source in (tmp_path / "absent.pt", tmp_path / "absent.safetensors"):
        with refused(str(tmp_path)):
            load_draft_file(source)
