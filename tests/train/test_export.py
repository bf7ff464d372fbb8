"""The export command, from a head directory to files that load again."""

import dataclasses
import io
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from spd_jax.checks import ConfigError
from spd_jax.config import TargetConfig
from spd_jax.models.draft import check_row_types, init_params
from spd_jax.weights import load_draft_file
from spd_jax.weights.heads import save_head
from spd_jax.weights.torch_zip import load_torch_zip, save_torch_zip
from train import export
from train.card import model_card
from train.config import named_config

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def head(small, tmp_path_factory) -> Path:
    """A head directory of the settings that can be exported, with the card of a SmolLM2 run."""
    draft = dataclasses.replace(
        small.draft, anchors=(0, 2, 3), feature_norm="none", qk_norm=True, stage_layers=(2, 1, 1)
    )
    params = init_params(small.target, draft, small.target_params, jax.random.key(0))
    directory = tmp_path_factory.mktemp("export") / "head"
    card = model_card(3, named_config("smollm2_n5_export"), draft, None)
    save_head(directory, draft, small.target, jax.device_get(params), card)
    return directory


def test_the_suffix_says_what_is_written(head, tmp_path, capsys):
    assert export.main([str(head), str(tmp_path / "x.pt")]) == 0
    assert export.main([str(head), str(tmp_path / "x")]) == 0
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")) == [
        "x", "x.pt", "x/head.pt", "x/head.safetensors", "x/head_config.json",
    ]  # fmt: skip
    assert "x.pt: " in capsys.readouterr().err
    config, params, _ = load_draft_file(head)
    for path in ("x.pt", "x", "x/head.pt"):
        again, tree, meta = load_draft_file(tmp_path / path)
        assert again == dataclasses.replace(config, d_ff=48) and meta["n_layers"] == 4
        for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(params), strict=True):
            np.testing.assert_array_equal(a, b)


def test_the_target_is_named_by_the_card_or_the_flag(head, tmp_path, capsys):
    def named(*more) -> str:
        export.main([str(head), str(tmp_path / "x.pt"), "--replace", *more])
        return load_torch_zip(tmp_path / "x.pt")["config"]["base_model_path"]

    assert named() == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert named("--base-model-path", "a/b") == "a/b"
    capsys.readouterr()
    for text in ("# no front matter\n", "---\n: [\n---\n", "---\nbase_model: [a, b]\n---\n"):
        before = (head / "README.md").read_text()
        (head / "README.md").write_text(text)
        assert named() == ""
        assert "names no base_model" in capsys.readouterr().err
        (head / "README.md").write_text(before)


def test_only_a_head_is_replaced(head, tmp_path, capsys):
    out = tmp_path / "x.pt"
    argv = [str(head), str(out), "--replace"]
    export.main(argv)
    written = out.read_bytes()
    v12 = io.BytesIO()
    save_torch_zip(v12, {"state_dict": {}, "config": {"version": 12}})
    for content, why in (
        (b"precious", "it is no head"),
        (b"", "it is no head"),
        (v12.getvalue(), "it is a head of version 12"),
    ):
        out.write_bytes(content)
        with pytest.raises(ConfigError, match=f"x.pt: not replaced, {why}"):
            export.main(argv)
        assert out.read_bytes() == content
    out.write_bytes(written)
    assert export.main(argv) == 0 and out.read_bytes() == written


def test_a_name_that_cannot_be_is_one_line(head, tmp_path):
    for argv in (["x" * 300, str(tmp_path / "x.pt")], [str(head), str(tmp_path / ("x" * 300))]):
        with pytest.raises(ConfigError, match="File name too long|/x+: .*give another") as caught:
            export.main(argv)
        assert "\n" not in str(caught.value)


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path):
    shipped = ROOT / "spd_jax" / "heads" / "smollm2_135m_n5"
    done = subprocess.run(
        [sys.executable, "-m", "train.export", str(shipped), str(tmp_path / "x")],
        cwd=ROOT, capture_output=True, text=True, env=os.environ, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2 and not (tmp_path / "x").exists()
    error = done.stderr.strip().splitlines()[-1]
    assert error.startswith("error: ") and "feature_norm rms, qk_norm False" in error


def test_a_head_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="is not there"):
        export.main([str(tmp_path / "none"), str(tmp_path / "x.pt")])


def test_the_recipe_for_export_trains_a_head_that_can_be_exported():
    smollm2 = TargetConfig(
        vocab_size=49152, d_model=576, n_layers=30, n_heads=9, n_kv_heads=3, head_dim=64,
        d_ff=1536, norm_eps=1e-5, rope_theta=1e5, max_context=8192,
    )  # fmt: skip
    config = named_config("smollm2_n5_export")
    draft = config.draft_config(smollm2, None, "ab")
    check_row_types(smollm2, draft)
    assert (draft.feature_norm, draft.qk_norm, draft.head) == ("none", True, "own")
    assert draft.anchors[-1] < smollm2.n_layers
    other = named_config("smollm2_n5")
    same = {f.name for f in dataclasses.fields(other)} - {"workdir", "anchors", "feature_norm"}
    for name in same - {"qk_norm"}:
        assert getattr(config, name) == getattr(other, name)
