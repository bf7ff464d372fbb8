"""infer.decode as a person runs it: the JSON contract, exit codes, and how it stops."""

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import spd_jax
from infer import decode
from spd_jax.checks import ConfigError

JSON_KEYS = {"text", "tokens", "cycles", "rejects", "alpha", "tau", "mode"}
PROMPT = ["--target", "tiny", "--prompt", "A pipeline.", "--max-new-tokens", "12"]


def run_decode(*argv: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "infer.decode", *argv], capture_output=True, text=True, timeout=240
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("devices", "mode"), [("1", "virtual"), ("4", "sharded")])
def test_json_is_the_last_line_and_the_only_one_on_stdout(devices, mode):
    done = run_decode(*PROMPT, "--cpu-devices", devices, "--n-stages", "3", "--compare", "--json")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.strip().split("\n")
    record = json.loads(line)
    assert JSON_KEYS | {"identical"} <= record.keys()
    assert record["mode"] == mode
    assert record["identical"] is True
    assert 1 <= len(record["tokens"]) <= 12
    assert all(type(i) is int for i in record["tokens"])
    assert record["text"] == bytes(record["tokens"]).decode(errors="replace")  # tiny: byte ids
    assert type(record["cycles"]) is int
    assert type(record["rejects"]) is int
    assert "3 stages" in done.stderr
    assert f"mode {mode}" in done.stderr
    assert "untrained" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_without_json_the_tokens_and_the_table_are_on_stdout():
    done = run_decode(*PROMPT, "--cpu-devices", "1", "--n-stages", "3")
    assert done.returncode == 0, done.stderr
    for row in ("tokens", "cycles", "rejects", "alpha", "tau", "mode", "virtual", "placement"):
        assert row in done.stdout
    assert "identical" not in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--n-stages", "1"], ["2", "1"]),
        (["--n-stages", "99"], ["99", "layers"]),
        (["--n-stages", "2", "--stage-layers", "1,x"], ["--stage-layers", "1,x"]),
        (["--prompt", ""], ["empty"]),
        (["--max-new-tokens", "0"], ["max_new_tokens", "0"]),
        (["--max-new-tokens", "1000000"], ["context"]),
        (["--draft", "/nowhere/at/all"], ["/nowhere/at/all"]),
        (["--placement", "sideways"], ["placement", "sideways"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(argv, words, capsys):
    with pytest.raises(SystemExit) as stop:
        decode.run(lambda: decode.main(["--target", "tiny", *argv]))
    captured = capsys.readouterr()
    assert stop.value.code == 2
    assert captured.out == ""
    last = captured.err.strip().split("\n")[-1]
    assert last.startswith("error: ")
    assert [w for w in words if w not in last] == []
    assert captured.err.count("error: ") == 1


class OneByteTokenizer:
    """Each id is one byte; a stream emits whole characters only, like the real one."""

    def encode_chat(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")

    def stream(self):
        pending = bytearray()

        def push(ids):
            pending.extend(ids)
            try:
                text = pending.decode()
            except UnicodeDecodeError:
                return ""
            pending.clear()
            return text

        return SimpleNamespace(push=push, flush=lambda: pending.decode(errors="replace"))


@pytest.fixture
def fake_api(monkeypatch):
    """spd_jax without models: `decode` is replaced by the test."""
    target = SimpleNamespace(
        tokenizer=OneByteTokenizer(),
        config=SimpleNamespace(n_layers=6, vocab_size=256),
        params={"embed": {"weight": np.zeros(1, np.float32)}},
    )
    draft = SimpleNamespace(name="a head", config=SimpleNamespace(n_stages=3))
    monkeypatch.setattr(spd_jax, "load_target", lambda *a, **k: target)
    monkeypatch.setattr(spd_jax, "load_draft", lambda *a, **k: draft)
    return lambda fake: monkeypatch.setattr(spd_jax, "decode", fake)


def result_of(ids, accepted, cycles):
    stats = SimpleNamespace(
        rejects=1, alpha=0.5, expected_alpha=None, tokens_per_cycle=0.5, tau=1.5, speedup=1.5,
        prefill_seconds=0.1,
        decode_seconds=0.2, tokens_per_second=None, mode="virtual", placement="virtual", devices=1,
    )  # fmt: skip
    return SimpleNamespace(
        tokens=ids,
        accepted=accepted,
        cycles=cycles,
        text=bytes(ids).decode(),
        finish_reason="length",
        stats=stats,
    )


def test_text_is_streamed_in_whole_characters(fake_api, capsys):
    seen = []

    def chunks(*args, on_tokens, **kwargs):
        for ids in (b"gr", "ü".encode()[:1], "ü".encode()[1:] + b"n"):
            on_tokens(0, list(ids))
            seen.append(capsys.readouterr().out)
        return result_of(list("grün".encode()), [True] * 5, 8)

    fake_api(chunks)
    assert decode.main([]) == 0
    assert seen == ["gr", "", "ün"]


def test_ctrl_c_ends_with_what_was_committed(fake_api, capsys):
    def interrupted(*args, on_tokens, **kwargs):
        on_tokens(0, [104, 105])
        raise KeyboardInterrupt

    fake_api(interrupted)
    assert decode.main(["--json"]) == 130
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    assert JSON_KEYS <= record.keys()
    assert (record["text"], record["tokens"]) == ("hi", [104, 105])
    assert "2 committed tokens" in captured.err


@pytest.mark.parametrize(("other", "code"), [([104, 105], 0), ([104, 106], 1)])
def test_compare_fails_where_the_tokens_differ(other, code, fake_api, monkeypatch, capsys):
    ids = [104, 105]
    fake_api(lambda *a, **k: result_of(ids, [True, False], 4))
    monkeypatch.setattr(spd_jax, "generate", lambda *a, **k: result_of(other, None, None))
    monkeypatch.setattr("infer.agreement.deciding_margin", lambda *a: 0.25)
    assert decode.main(["--compare", "--json"]) == code
    captured = capsys.readouterr()
    assert json.loads(captured.out)["identical"] is (code == 0)
    if code:
        assert "new token 1" in captured.err
        assert "decided by 0.25" in captured.err


def test_an_error_after_loading_is_a_config_error(fake_api):
    def refuse(*args, **kwargs):
        raise ConfigError("more tokens than the context")

    fake_api(refuse)
    with pytest.raises(ConfigError, match="context"):
        decode.main([])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--compare", "--temperature", "0.7"], ["--compare", "--verifier coupled"]),
        (["--temperature", "-1"], ["temperature must be 0", "-1"]),
        (["--top-p", "0"], ["top_p", "(0, 1]"]),
    ],
)
def test_sampling_that_cannot_be_is_refused_before_anything_is_loaded(argv, words, capsys):
    with pytest.raises(ConfigError) as error:
        decode.main(["--target", "tiny", *argv])
    assert all(word in str(error.value) for word in words)
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_coupled_text_compares_identical(capsys):
    argv = ["--target", "tiny", "--max-new-tokens", "12", "--mesh", "virtual", "--json"]
    sampled = ["--temperature", "0.8", "--top-p", "0.9", "--verifier", "coupled", "--seed", "3"]
    assert decode.main([*argv, *sampled, "--compare"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["identical"] and len(record["tokens"]) == 12
