"""Scoring a saved head gives the figures that its run logged."""

import json

import pytest

from spd_jax.checks import ConfigError
from train import pdm, score

ROWS = 6


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two updates on the tiny target, and its rows."""
    work = tmp_path_factory.mktemp("score")
    rows = work / "rows.jsonl"
    row = {"input_ids": list(range(97, 121)), "loss_mask": [0] * 4 + [1] * 20, "temperature": 0.0}
    rows.write_text(
        "".join(json.dumps({**row, "input_ids": row["input_ids"][i:] + row["input_ids"][:i]}) + "\n"
                for i in range(ROWS))
    )  # fmt: skip
    flags = ["--config", "tiny_n4", "--train-data", str(rows), "--heldout-data", str(rows)]
    flags += ["--workdir", str(work / "run"), "--steps", "2", "--draft-vocab-size", "100"]
    assert pdm.main([*flags, "--eval-stages", "3", "--tensorboard", "False"]) == 0
    return work / "run", rows


def test_the_figures_are_those_that_the_run_logged(run, tmp_path):
    workdir, rows = run
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    logged = next(line["heldout"] for line in lines if "heldout" in line)["all"]
    flags = ["--target", "tiny", "--head", str(workdir / "heads" / "2"), "--data", str(rows)]
    out = tmp_path / "scores.json"
    assert score.main([*flags, "--stages", "4", "3", "--json", str(out)]) == 0
    scores = json.loads(out.read_text())
    assert list(scores) == ["4", "3"]
    for name in ("n_scored", "coverage", "lookup"):
        assert scores["4"]["all"][name] == logged[name]
    for name in ("kl", "acceptance"):  # the head's weights are stored in bfloat16
        assert scores["4"]["all"][name] == pytest.approx(logged[name], abs=0.02)
    assert scores["3"]["all"]["alpha"] == pytest.approx(logged["alpha_by_stages"]["3"], abs=0.1)
    assert len(scores["3"]["all"]["kl_by_fill"]) == 3


def test_stages_that_cannot_be_are_one_line(run):
    workdir, rows = run
    flags = ["--target", "tiny", "--head", str(workdir / "heads" / "2"), "--data", str(rows)]
    with pytest.raises(ConfigError, match="n_stages must be"):
        score.main([*flags, "--stages", "99"])
