"""Writing training data: what the target wrote is marked, and a stopped run goes on unchanged."""

import dataclasses
import json

import pytest

import spd_jax
from spd_jax.checks import ConfigError
from spd_jax.weights.files import sole_writer
from spd_jax.weights.tokenizer import ChatTokenizer
from train import prepare

FLAGS = [
    "--target", "tiny", "--batch-size", "2", "--prompt-tokens", "4", "--answer-tokens", "6",
    "--temperatures", "0.0", "0.7",
]  # fmt: skip


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    out = tmp_path_factory.mktemp("data") / "rows.jsonl"
    assert prepare.main(["--out", str(out), "--rows", "4", *FLAGS]) == 0
    return out


def test_the_mask_marks_what_the_target_wrote(written):
    rows = rows_of(written)
    assert [row["temperature"] for row in rows] == [0.0, 0.0, 0.7, 0.7]
    for row in rows:
        assert len(row["input_ids"]) == len(row["loss_mask"])
        assert 1 <= sum(row["loss_mask"]) <= 4 + 6
        assert row["loss_mask"][-1] == 1 and row["loss_mask"][0] == 0
        assert row["target_sha256"] == spd_jax.load_target("tiny").sha256
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]


def test_a_stopped_run_goes_on_as_if_it_had_not_been(written, tmp_path):
    whole = written.read_bytes()
    first_round = b"".join(whole.splitlines(keepends=True)[:2])
    for cut in (0, 10, len(first_round), len(first_round) + 9, len(whole) - 1):
        out = tmp_path / f"{cut}.jsonl"
        out.write_bytes(whole[:cut])
        prepare.main(["--out", str(out), "--rows", "4", *FLAGS])
        assert out.read_bytes() == whole, cut


def test_the_end_says_what_was_written_and_where(written, tmp_path, capsys):
    rows, out = rows_of(written), tmp_path / "rows.jsonl"
    n_tokens = sum(len(row["input_ids"]) for row in rows)
    n_scored = [sum(row["loss_mask"]) for row in rows]
    holds = f"{out}: 4 rows, {n_tokens} tokens, {sum(n_scored)} of them scored; "
    out.write_bytes(b"".join(written.read_bytes().splitlines(keepends=True)[:3]))
    command = ["--out", str(out), "--rows", "4", *FLAGS]
    prepare.main(command)  # the first round of two is there
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"{holds}{sum(n_scored[2:])} tokens written in ")
    before, held = prepare.Written(1, 4, 90, 40), prepare.Written(2, 8, 190, 100)
    assert prepare.describe_written(out, held, before, 8.0).endswith(" in 8.0 s, 8 a second")
    prepare.main(command)
    assert capsys.readouterr().err.splitlines()[-1] == f"{holds}there was nothing left to write"


def test_every_temperature_comes_also_in_few_rows(written, tmp_path):
    out = tmp_path / "rows.jsonl"
    flags = ["--out", str(out), *FLAGS, "--batch-size", "48"]
    prepare.main([*flags, "--rows", "3"])
    assert [row["temperature"] for row in rows_of(out)] == [0.0, 0.0, 0.7, 0.7]
    whole = out.read_bytes()
    assert whole == written.read_bytes()  # as if rounds of 2 had been asked for
    out.write_bytes(whole[:-9])
    prepare.main([*flags, "--rows", "4"])
    assert out.read_bytes() == whole
    with pytest.raises(ConfigError, match="did not write"):  # its rounds are of another size
        prepare.main([*flags, "--rows", "99"])
    assert out.read_bytes() == whole


def test_rounds_are_smaller_only_where_a_temperature_would_not_come(tmp_path):
    temperatures = (0.0, 0.7, 1.0)
    for n_rows in range(1, 160):
        config = prepare.PrepareConfig(tmp_path, rows=n_rows, temperatures=temperatures)
        assert config.n_rounds >= 3 and config.n_rounds * config.round_size >= n_rows
        assert (config.round_size == config.batch_size) == (n_rows > 3 * 47), n_rows
    digests = {
        prepare.settings_digest(dataclasses.replace(config, rows=n_rows), "aa")
        for n_rows in (150, 2000)
    }
    assert len(digests) == 1  # a file can be made longer


def test_foreign_rows_and_other_settings_lose_nothing(written, tmp_path):
    foreign = tmp_path / "foreign.jsonl"
    foreign.write_text('{"mine": 1}\n')
    with pytest.raises(ConfigError, match="did not write"):
        prepare.main(["--out", str(foreign), "--rows", "4", *FLAGS])
    assert foreign.read_text() == '{"mine": 1}\n'
    foreign.write_text('{"mine": 1}')  # no line end: not a row of ours cut short
    with pytest.raises(ConfigError, match="did not write"):
        prepare.main(["--out", str(foreign), "--rows", "4", *FLAGS])
    assert foreign.read_text() == '{"mine": 1}'
    twice = tmp_path / "twice.jsonl"
    twice.write_bytes(2 * b"".join(written.read_bytes().splitlines(keepends=True)[:2]))
    with pytest.raises(ConfigError, match="did not write"):
        prepare.main(["--out", str(twice), "--rows", "4", *FLAGS])
    before = written.read_bytes()
    with pytest.raises(ConfigError, match="did not write"):
        prepare.main(["--out", str(written), "--rows", "8", *FLAGS, "--seed", "1"])
    assert written.read_bytes() == before


def test_a_chat_file_without_its_last_line_end_is_not_taken_for_a_cut_row(written, tmp_path):
    chat = json.dumps({"messages": [{"role": "user", "content": "precious"}]}).encode()
    first_round = b"".join(written.read_bytes().splitlines(keepends=True)[:2])
    out = tmp_path / "p.jsonl"
    for before, last in (
        (b"", chat),
        (first_round, chat),
        (b"", chat + b" {"),
        (chat + b"\n", b"{"),
    ):
        out.write_bytes(before + last)
        with pytest.raises(ConfigError, match="did not write"):
            prepare.main(["--out", str(out), "--rows", "4", *FLAGS])
        assert out.read_bytes() == before + last


def test_only_one_process_writes_a_file(written, tmp_path):
    out = tmp_path / "rows.jsonl"
    with (
        sole_writer(out.with_name(".rows.jsonl.lock")),
        pytest.raises(ConfigError, match="another process is writing there"),
    ):
        prepare.main(["--out", str(out), "--rows", "4", *FLAGS])
    assert not out.exists()


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--out", "."], "--out must name a file"),
        (["--out", "/dev/full"], "--out must name a file, got the link or device /dev/full"),
        (["--prompt-tokens", "100000"], "given tokens .* --prompt-tokens 100000 .* exceed the"),
        (["--answer-tokens", "100000"], "given tokens .* --answer-tokens 100000 exceed the"),
        (["--out", "x" * 256], "x: File name too long; give another path"),
        (["--out", "/proc/nowhere/rows.jsonl"], "cannot write there"),
    ],
)
def test_a_place_that_cannot_be_is_one_line(flags, line, tmp_path):
    with pytest.raises(ConfigError, match=line):
        prepare.main(["--out", str(tmp_path / "rows.jsonl"), "--rows", "4", *FLAGS, *flags])


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"seed": -1}, "seed must be from 0"),
        ({"temperatures": (float("inf"),)}, "temperatures must be"),
        ({"temperatures": (0.0, 1e300)}, "from 0 to 1000, as .* got 0.0, 1e.300"),
        ({"prompt_temperature": 1001.0}, "from 0 to 1000, as must prompt_temperature"),
        ({"batch_size": 2 * 10**9}, "batch_size must be at most 16384"),
        ({"rows": 10**23}, "rows must be at most 1000000000"),
        ({"temperatures": ()}, "temperatures must be"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"prompts": ()}, "prompts must name one place or more"),
    ],
)
def test_a_setting_that_cannot_be_is_one_line(fields, line, tmp_path):
    with pytest.raises(ConfigError, match=line):
        prepare.PrepareConfig(out=tmp_path / "rows.jsonl", **fields)


def test_a_prompt_beyond_the_context_is_named_before_anything_is_written(tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "rows.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in ("hi", "a" * 5000)))
    with pytest.raises(ConfigError, match=r"prompts.jsonl:2: prompt .*; .* or lower answer_tokens"):
        prepare.main(["--out", str(out), "--rows", "2", "--prompts", str(prompts), *FLAGS])
    assert not out.exists()


def test_rows_written_among_the_prompts_are_none(tmp_path):
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"turns": ["first"]}) + "\n")
    out = tmp_path / "rows.jsonl"
    argv = ["--out", str(out), "--prompts", str(tmp_path), *FLAGS, "--rows"]
    prepare.main([*argv, "4"])
    first = out.read_bytes()
    prepare.main([*argv, "6"])
    assert out.read_bytes().startswith(first) and len(rows_of(out)) == 6
    with pytest.raises(ConfigError, match="--prompts names only --out"):
        prepare.main([*argv, "6", "--prompts", str(out)])


def test_prompts_come_from_a_file_in_order(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    system = {"role": "system", "content": "be brief"}
    user = {"role": "user", "content": "second"}
    prompts.write_text(
        json.dumps({"turns": ["first"]}) + "\n" + json.dumps({"messages": [system, user]}) + "\n"
    )
    out = tmp_path / "rows.jsonl"
    prepare.main(["--out", str(out), "--rows", "2", "--prompts", str(prompts), *FLAGS])
    rows = rows_of(out)
    assert [row["messages"][0]["content"] for row in rows] == ["first", "be brief"]
    assert rows[1]["messages"][:2] == [system, user]
    assert all(sum(row["loss_mask"]) <= 6 for row in rows)


def test_every_answer_of_a_chat_is_the_targets_own_in_order(tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "rows.jsonl"
    said = [("human", "one"), ("gpt", "of the file"), ("human", "two"), ("gpt", "too")]
    chat = {"conversations": [{"from": role, "value": text} for role, text in said]}
    prompts.write_text(json.dumps({"turns": ["alone"]}) + "\n[]\n" + json.dumps(chat) + "\n")
    argv = ["--out", str(out), "--rows", "2", "--prompts", str(prompts), *FLAGS]
    argv += ["--temperatures", "0.0"]
    prepare.main(argv)
    target = spd_jax.load_target("tiny")
    written = {len(row["messages"]): row for row in rows_of(out)[1:]}
    turns = []
    for user in ("one", "two"):  # random bytes are no text: the first answer has its own row
        turns.append({"role": "user", "content": user})
        prompt = target.tokenizer.encode_chat(turns)
        answer = spd_jax.generate(target, prompt, max_new_tokens=6)
        turns.append({"role": "assistant", "content": answer.text})
        row = written[len(turns)]
        assert row["messages"] == turns
        assert row["input_ids"] == prompt + answer.tokens
        assert row["loss_mask"] == [0] * len(prompt) + [1] * 6


def test_prompts_that_cannot_be_read_are_counted_with_their_lines(tmp_path, capsys):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "rows.jsonl"
    half = '{"turns": ["a\\ud800"]}'
    prompts.write_text(json.dumps({"turns": ["fine"]}) + f"\n{half}\n[]\n")
    prepare.main(["--out", str(out), "--rows", "2", "--prompts", str(prompts), *FLAGS])
    said = capsys.readouterr().err
    assert "1 prompts; 2 skipped: 1 a turn with half a character (line 2), 1 not a JSON" in said
    prompts.write_text(f"{half}\n")
    with pytest.raises(ConfigError, match=r"no usable row; 1 skipped: .*half a char.* \(line 1\)"):
        prepare.main(["--out", str(out), "--rows", "2", "--prompts", str(prompts), *FLAGS])


def test_a_prompt_is_encoded_once(tmp_path, monkeypatch):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "rows.jsonl"
    prompts.write_text(json.dumps({"turns": ["again"]}) + "\n")
    seen = []
    original = ChatTokenizer.encode_chat

    def encode_chat(self, messages):
        seen.append(messages)
        return original(self, messages)

    monkeypatch.setattr(ChatTokenizer, "encode_chat", encode_chat)
    prepare.main(["--out", str(out), "--rows", "4", "--prompts", str(prompts), *FLAGS])
    assert len(rows_of(out)) == 4 and len(seen) == 1
