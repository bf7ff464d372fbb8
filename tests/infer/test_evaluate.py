"""infer.evaluate on the tiny target: its figures agree with each other and with the API."""

import json

import pytest

import spd_jax
from infer import evaluate
from infer.startup import load_subject
from spd_jax.checks import ConfigError
from spd_jax.commandline import parse_flags
from spd_jax.ops.lookup import lookup_hits
from spd_jax.prompts import prompt_ids, read_prompts

TINY = ["--target", "tiny", "--mesh", "virtual", "--n-stages", "2", "--max-new-tokens", "10"]


@pytest.fixture
def prompt_files(tmp_path):
    texts = {"a.jsonl": ["one", "two words", "three"], "b.jsonl": ["four"]}
    for name, rows in texts.items():
        lines = [json.dumps({"turns": [text]}) for text in rows]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    return [str(tmp_path / name) for name in texts]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_figure_is_there_and_adds_up(prompt_files, tmp_path, capsys):
    out = tmp_path / "out.json"
    argv = [*TINY, "--batch-size", "2", "--json", str(out), "--prompts", *prompt_files]
    assert evaluate.main(argv) == 0
    record = json.loads(out.read_text())
    assert list(record["sets"]) == prompt_files
    first, second = record["sets"].values()
    pooled = record["pooled"]
    assert (first["prompts"], second["prompts"], pooled["prompts"]) == (3, 1, 4)
    for name in ("tokens", "cycles", "drafts_verified", "identical", "sampled_positions"):
        assert pooled[name] == first[name] + second[name]
    assert pooled["tau_pooled"] == pytest.approx(2 * pooled["tokens"] / pooled["cycles"])
    assert pooled["compared_with_generate"] == 4
    assert pooled["identical"] + pooled["rounding_differences"] == 4
    assert 0 <= pooled["sampled_agreement"] <= 1
    assert 0 < pooled["bf16_match_rate"] <= 1
    assert len(record["samples"]) == 4
    table = capsys.readouterr().out
    for row in ("alpha", "2-gram lookup", "tau, pooled", "identical to generate", "pooled"):
        assert row in table


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_alpha_and_lookup_are_those_of_single_decodes(prompt_files, tmp_path):
    out = tmp_path / "out.json"
    skip = ["--skip-generate", "--sampled-temperature", "0"]
    argv = [*TINY, *skip, "--json", str(out), "--prompts", prompt_files[0]]
    assert evaluate.main(argv) == 0
    samples = json.loads(out.read_text())["samples"]
    subject = load_subject(parse_flags(evaluate.EvaluateFlags, "test", argv))
    target, draft = subject.target, subject.draft
    texts = [row.text for row in read_prompts(prompt_files[0])]
    for sample, prompt in zip(samples, prompt_ids(target, "tiny", texts), strict=True):
        result = spd_jax.decode(
            target, draft, prompt, max_new_tokens=10, n_stages=2, mesh="virtual"
        )
        assert sample["tokens"] == len(result.tokens)
        assert sample["cycles"] == result.cycles
        assert sample["accepted"] == sum(result.accepted) - 1
        assert sample["lookup_hits"] == sum(lookup_hits(prompt, result.tokens))
        assert sample["identical"] is None
        assert sample["sampled_positions"] is None
        assert sample["bf16_total"] is None


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--prompts"], "--prompts"),
        (["--prompts", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["--prompts", "FILE", "--limit", "0"], "--limit"),
        (["--prompts", "FILE", "--batch-size", "0"], "--batch-size"),
        (["--prompts", "FILE", "--sampled-temperature", "-1"], "--sampled-temperature"),
        (["--prompts", "BAD"], "bad.jsonl:2: "),
        (["--prompts", "DEEP"], "deep.jsonl:1: "),
        (["--prompts", "FILE", "--json", "/nowhere/out.json"], "--json"),
        (["--prompts", "FILE", "--json", "FOLDER"], "--json"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(argv, words, prompt_files, tmp_path, capsys):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"turns": ["fine"]}\n{"turns": 3}\n')
    deep = tmp_path / "deep.jsonl"
    deep.write_text("[" * 100_000)
    names = {"FILE": prompt_files[0], "BAD": str(bad), "DEEP": str(deep), "FOLDER": str(tmp_path)}
    with pytest.raises(SystemExit) as stop:
        evaluate.run(lambda: evaluate.main([names.get(a, a) for a in argv]))
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.strip().split("\n")
    assert line.startswith("error: ")
    assert words in line


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["x/a.jsonl", "x/b.jsonl"], ["a", "b"]),
        (["x/q.jsonl", "y/q.jsonl"], ["x", "y"]),
        (["q.jsonl", "y/q.jsonl"], ["q.jsonl", "y/q.jsonl"]),
        (["pooled.jsonl"], ["pooled.jsonl"]),
    ],
)
def test_columns_have_the_shortest_names_that_tell_files_apart(paths, names):
    assert list(evaluate.column_names(paths).values()) == names


def test_a_prompt_beyond_the_context_is_named_by_line_before_anything_runs(tmp_path, monkeypatch):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in ("hi", "a" * 4090)))
    monkeypatch.setattr(evaluate, "evaluate_batch", None)
    with pytest.raises(ConfigError, match="p.jsonl:2: prompt of 4108 tokens .* context of 4096"):
        evaluate.main([*TINY, "--skip-bf16", "--batch-size", "1", "--prompts", str(path)])
