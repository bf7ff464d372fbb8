"""Prompt files: the first turn of each line, and errors that name the line."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from spd_jax.checks import ConfigError
from spd_jax.prompts import checked_prompt_ids, prompt_ids, read_prompts
from spd_jax.weights.tiny import TINY_CONFIG, byte_tokenizer

OWN_PROMPTS = Path(__file__).parent.parent / "infer" / "prompts.jsonl"


def write(tmp_path: Path, *lines: str) -> str:
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def test_the_first_turn_is_the_prompt(tmp_path):
    path = write(
        tmp_path,
        json.dumps({"turns": ["one", "two"]}),
        "",
        json.dumps({"turns": ["a\u2028b"]}, ensure_ascii=False),
    )
    rows = read_prompts(path)
    assert [(r.line, r.text) for r in rows] == [(1, "one"), (3, "a\u2028b")]
    assert [r.text for r in read_prompts(path, limit=1)] == ["one"]


def test_messages_give_the_first_of_the_user(tmp_path):
    system, user = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}
    assert [
        r.text for r in read_prompts(write(tmp_path, json.dumps({"messages": [system, user]})))
    ] == ["u"]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "3",
        "{}",
        '{"turns": []}',
        '{"turns": "text"}',
        '{"turns": [1]}',
        '{"turns": [""]}',
        '{"turns": [" "]}',
        '{"messages": [{"role": "system", "content": "x"}]}',
        '{"messages": [{"role": "user", "content": 3}]}',
        '{"messages": 3}',
        '{"turns": ["a\\ud800"]}',
        "[" * 100_000,
        '{"turns": ' + "9" * 5000 + "}",
    ],
)
def test_a_bad_line_is_named(line, tmp_path):
    path = write(tmp_path, '{"turns": ["good"]}', line)
    with pytest.raises(ConfigError) as caught:
        read_prompts(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert "\n" not in str(caught.value)


def test_an_unreadable_or_empty_file_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_prompts(str(tmp_path / "absent.jsonl"))
    with pytest.raises(ConfigError, match="got none"):
        read_prompts(write(tmp_path, "", ""))
    (tmp_path / "latin.jsonl").write_bytes(b'{"turns": ["\xe9"]}')
    with pytest.raises(ConfigError, match="UTF-8"):
        read_prompts(str(tmp_path / "latin.jsonl"))


def test_the_prompts_of_the_repository_can_be_read():
    rows = read_prompts(str(OWN_PROMPTS))
    assert len(rows) >= 5
    assert len({row.text for row in rows}) == len(rows)


def test_a_prompt_is_one_user_turn_of_the_chat_template():
    tokenizer = SimpleNamespace(encode_chat=lambda text: [len(text), 7])
    target = SimpleNamespace(tokenizer=tokenizer)
    assert prompt_ids(target, "x", ["a", "bcd"]) == [[1, 7], [3, 7]]


def test_prompts_of_files_are_named_where_they_cannot_be():
    target = SimpleNamespace(tokenizer=byte_tokenizer(), config=TINY_CONFIG)
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    (text, turns) = checked_prompt_ids(target, "tiny", [("a:1", "u"), ("a:2", chat)], 8)
    assert bytes(text) == b"user: u\nassistant: "
    assert bytes(turns) == b"system: s\nuser: u\nassistant: "
    for prompt, message in (("a\ud800", "a:3: the text is not valid"), ("x" * 4090, "a:3: prompt")):
        with pytest.raises(ConfigError) as caught:
            checked_prompt_ids(target, "tiny", [("a:1", "u"), ("a:3", prompt)], 8, limit="words")
        assert str(caught.value).startswith(message)
    assert "lower words" in str(caught.value)
    with pytest.raises(ConfigError, match="'tiny' has no tokenizer"):
        checked_prompt_ids(SimpleNamespace(tokenizer=None), "tiny", [], 8)


def test_text_for_a_target_without_a_tokenizer_is_an_error():
    with pytest.raises(ConfigError, match="'/models/x' has no tokenizer"):
        prompt_ids(SimpleNamespace(tokenizer=None), "/models/x", ["az"])


def test_an_empty_prompt_is_an_error():
    with pytest.raises(ConfigError, match="empty"):
        prompt_ids(SimpleNamespace(tokenizer=None), "tiny", [""])
