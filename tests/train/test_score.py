"""Scoring a saved head gives the figures that its run logged, and those of its own predictions."""

import json

import numpy as np
import pytest
from rich.console import Console

import spd_jax
from spd_jax.checks import ConfigError
from train import pdm, score

N_PROMPT = 4


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short run on what the tiny target wrote, in bfloat16 as heads are stored; its rows."""
    work = tmp_path_factory.mktemp("score")
    rows = work / "rows.jsonl"
    target = spd_jax.load_target("tiny")
    prompts = [list(range(97 + 5 * i, 97 + 5 * i + N_PROMPT)) for i in range(5)]
    texts = spd_jax.generate(target, prompts, max_new_tokens=28, stop_ids=())
    with open(rows, "w") as file:
        for prompt, text in zip(prompts, texts, strict=True):
            mask = [0] * N_PROMPT + [1] * 28
            row = {"input_ids": prompt + text.tokens, "loss_mask": mask, "temperature": 0.0}
            file.write(json.dumps(row) + "\n")
    flags = ["--config", "tiny_n4", "--train-data", str(rows), "--heldout-data", str(rows)]
    flags += ["--workdir", str(work / "run"), "--dtype", "bfloat16", "--steps", "40"]
    flags += ["--lr", "0.01", "--sequence-len", "32", "--batch-tokens", "160", "--save-every", "40"]
    flags += ["--eval-every", "40", "--draft-vocab-size", "None", "--anchors", "0", "4", "8"]
    assert pdm.main([*flags, "--eval-stages", "3", "--tensorboard", "False"]) == 0
    return work / "run", rows


def command(run, *more):
    workdir, rows = run
    flags = ["--target", "tiny", "--head", str(workdir / "heads" / "40"), "--data", str(rows)]
    return [*flags, "--sequence-len", "32", "--batch-tokens", "160", *more]


def test_the_figures_are_those_that_the_run_logged(run, tmp_path):
    lines = [json.loads(line) for line in (run[0] / "metrics.jsonl").read_text().splitlines()]
    logged = next(line["heldout"] for line in lines if "heldout" in line)["all"]
    out = tmp_path / "scores.json"
    flags = ["--dtype", "bfloat16", "--stages", "4", "3", "--json", str(out)]
    assert score.main(command(run, *flags)) == 0
    scores = json.loads(out.read_text())
    assert list(scores) == ["4", "3"]
    assert 0.1 < logged["alpha"] < 1 and np.ptp(logged["kl_by_fill"]) > 0.01
    for name, value in scores["4"]["all"].items():
        assert value == pytest.approx(logged[name], rel=1e-4), name
    for name in ("alpha", "tau"):
        got = scores["3"]["all"][name]
        assert got == pytest.approx(logged[f"{name}_by_stages"]["3"], rel=1e-4), name


def test_agreement_at_other_stages_is_that_of_the_heads_predictions(run):
    """The draft's guesses by the public function, counted where decoding drafts."""
    found = score.score_head(parse(command(run, "--stages", "3")))[3]["all"]
    target = spd_jax.load_target("tiny")
    draft = spd_jax.load_draft(run[0] / "heads" / "40", target)
    right, n, fills_matter = np.zeros(3), 0, False
    for line in run[1].read_text().splitlines():
        ids = np.array(json.loads(line)["input_ids"])
        guesses = np.asarray(
            spd_jax.draft_predictions(target, draft, ids.tolist(), fill=[1, 2, 3], n_stages=3)
        )
        right += (guesses[:, N_PROMPT:-1] == ids[N_PROMPT + 1 :]).sum(axis=1)
        n += len(ids) - N_PROMPT - 1
        fills_matter |= bool((guesses[0] != guesses[2]).any())
    assert found["n_scored"] == n
    assert found["agree_text_by_fill"] == pytest.approx(right / n)
    assert fills_matter and right.min() > 0  # and some are right


def parse(argv):
    return score.parse_flags(score.ScoreFlags, "score", argv)


def test_long_rows_are_cut_or_left_out(run, tmp_path):
    long = tmp_path / "long.jsonl"
    rows = [json.loads(line) for line in run[1].read_text().splitlines()]
    rows[0] = {name: rows[0][name][:12] for name in ("input_ids", "loss_mask")}
    long.write_text("".join(json.dumps(row) + "\n" for row in rows))
    n_scored = []
    for overflow in ("cut", "discard"):
        flags = ["--data", str(long), "--sequence-len", "16", "--overflow", overflow]
        found = score.score_head(parse(command(run, *flags)))
        n_scored.append(found[4]["all"]["n_scored"])
    assert n_scored == [7 + 4 * 11, 7]


def test_rows_are_as_long_as_those_that_the_head_was_trained_on(run, tmp_path):
    workdir, rows = run
    row = json.loads(rows.read_text().splitlines()[0])
    row = {name: row[name] * 2 for name in ("input_ids", "loss_mask")}  # 64 tokens
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps(row) + "\n")
    flags = ["--target", "tiny", "--head", str(workdir / "heads" / "40"), "--data", str(long)]
    assert score.score_head(parse(flags))[4]["all"]["n_scored"] == 32 - N_PROMPT - 1
    with pytest.raises(ConfigError, match="batch_tokens must be at least 32, a row of this head"):
        score.score_head(parse([*flags, "--batch-tokens", "31"]))


def test_the_table_fits_a_hundred_columns(capsys):
    rates = dict.fromkeys(score.COLUMNS, 10.123) | {"n_scored": 1_234_567}
    found = {n: {"all": rates, "T=0.7": rates} for n in (5, 10)}
    score.print_table(found, Console(width=score.WIDTH))
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 100
    assert shown.count("10.123") == 4 * len(score.COLUMNS) and "…" not in shown


def test_stages_that_cannot_be_are_one_line(run):
    with pytest.raises(ConfigError, match="n_stages must be"):
        score.main(command(run, "--stages", "99"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rows": 0}, "rows must be at least 1, got 0"),
        ({"sequence_len": 1}, "sequence_len must be at least 2, got 1"),
        ({"sequence_len": 256, "batch_tokens": 255}, "batch_tokens must be at least 256, got 255"),
        ({"batch_tokens": 10**8}, "batch_tokens must be at most 16777216"),
    ],
)
def test_sizes_that_cannot_be_are_errors(fields, words):
    with pytest.raises(ConfigError, match=words):
        score.ScoreFlags(("rows.jsonl",), **fields)


def test_a_place_for_the_figures_that_is_not_there_is_told_before_the_work(run, monkeypatch):
    monkeypatch.setattr(score, "score_head", None)
    with pytest.raises(ConfigError, match="--json must name a file in an existing"):
        score.main(command(run, "--json", "absent/scores.json"))
