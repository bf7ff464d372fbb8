"""Conversations answered turn by turn: what each answer is given, and what becomes a row."""

from types import SimpleNamespace

import pytest

from tests.train.templates import ALTERNATING, CHATML, THINKING, markers_tokenizer
from train import dialogues
from train.chats import ChatReader
from train.dialogues import ChatPrompt, answer_chats, open_chat, prompt_parts
from train.sources import UnusableError


def turn(role, content):
    return {"role": role, "content": content}


USER, ANSWER, SYSTEM = turn("user", "hi"), turn("assistant", "old"), turn("system", "Be brief")
SETTINGS = {"max_new_tokens": 40, "temperature": 0.5}


class Echo:
    """Stands in for `generate`: each answer tells how long its prompt was; keeps the calls."""

    def __init__(self, tokenizer, end="<|im_end|>"):
        self.tokenizer, self.end, self.calls = tokenizer, end, []

    def __call__(self, target, prompts, *, max_new_tokens, sampling, seed):
        self.calls.append((prompts, seed))
        texts = [f"{len(ids)} ids" for ids in prompts]
        return [
            SimpleNamespace(text=text, tokens=self.tokenizer.encode(text + self.end))
            for text in texts
        ]


def answered(monkeypatch, template, chats_parts, max_context=10_000, **echo):
    tokenizer = markers_tokenizer(template).with_thinking(False)
    target = SimpleNamespace(
        tokenizer=tokenizer, config=SimpleNamespace(max_context=max_context), stop_ids=()
    )
    generate = Echo(tokenizer, **echo)
    monkeypatch.setattr(dialogues.spd_jax, "generate", generate)
    chats = [
        open_chat(ChatPrompt("x", parts), tokenizer.encode_chat(parts[0])) for parts in chats_parts
    ]
    rows, n_left_out = answer_chats(target, chats, lambda b, t: 100 * t + b, **SETTINGS)
    return rows, n_left_out, generate.calls, tokenizer


@pytest.mark.parametrize(
    ("fields", "regenerate", "parts"),
    [
        ({"turns": ["a", "b"]}, "all", ([turn("user", "a")], [turn("user", "b")])),
        ({"turns": ["a"]}, "last", ([turn("user", "a")],)),
        ({"messages": [SYSTEM, USER, ANSWER, USER]}, "all", ([SYSTEM, USER], [USER])),
        ({"messages": [SYSTEM, USER, ANSWER, USER]}, "last", ([SYSTEM, USER, ANSWER, USER],)),
        ({"messages": [ANSWER, USER, ANSWER]}, "all", ([USER],)),
        ({"messages": [USER, ANSWER, SYSTEM, USER, ANSWER]}, "all", ([USER], [SYSTEM, USER])),
        ({"messages": [USER, USER]}, "all", ([USER], [USER])),
    ],
)
def test_a_chat_is_cut_where_the_target_answers(fields, regenerate, parts):
    assert prompt_parts(fields, regenerate) == parts


@pytest.mark.parametrize(
    ("fields", "regenerate", "reason"),
    [
        ({"turns": "a"}, "all", "turns is not a list"),
        ({"turns": []}, "all", "not a list of turns"),
        ({"turns": [3]}, "all", "a turn without text"),
        ({"turns": ["a", "b"]}, "last", "turns without the answers between them"),
        ({"messages": [SYSTEM]}, "all", "no user turn"),
        ({"text": "a"}, "all", "none of messages"),
    ],
)
def test_a_record_without_a_prompt_has_a_reason(fields, regenerate, reason):
    with pytest.raises(UnusableError, match=reason):
        prompt_parts(fields, regenerate)


def test_rows_are_those_that_reading_the_written_chat_gives(monkeypatch):
    parts = [([SYSTEM, USER], [USER], [USER]), ([USER],), ([USER], [USER])]
    for template in (CHATML, THINKING):
        rows, n_left_out, calls, tokenizer = answered(monkeypatch, template, parts)
        assert n_left_out == 0
        whole = [row["messages"] for row in rows]
        if template == THINKING:  # a row of each answer: earlier ones are shown otherwise
            assert [len(turns) for turns in whole] == [3, 5, 7, 2, 2, 4]
            whole = [whole[2], whole[3], whole[5]]
        assert [len(turns) for turns in whole] == [7, 2, 4]
        read = ChatReader(tokenizer)
        expected = [tokens for turns in whole for tokens in read.tokens({"messages": turns})[0]]
        assert [(row["input_ids"], row["loss_mask"]) for row in rows] == expected
        for turns in whole:
            for k, answer in enumerate(turns):
                if answer["role"] == "assistant":  # Echo tells what it was given
                    given = tokenizer.encode_chat(turns[:k])
                    assert answer["content"] == f"{len(given)} ids"
        prompts = [len(prompts) for prompts, _ in calls]
        assert prompts == [3, 2, 1]  # few sizes, each compiled once
        assert [seeds for _, seeds in calls] == [[0, 1, 2], [100, 102], [200]]


def test_an_answer_cut_at_its_limit_begins_the_next_turn_with_its_end(monkeypatch):
    rows, _, _, tokenizer = answered(monkeypatch, CHATML, [([USER], [USER])], end="")
    (row,) = rows
    first = row["loss_mask"].index(1)
    n = row["loss_mask"][first:].index(0)
    text = tokenizer.decode(row["input_ids"][first + n :], with_markers=True)
    assert text.startswith("<|im_end|>\n<|im_start|>user\nhi<|im_end|>")


def test_a_batch_that_shrinks_is_filled_up_to_a_power_of_two(monkeypatch):
    parts = [([USER], [USER])] * 3 + [([USER],)] * 4
    rows, _, calls, _ = answered(monkeypatch, CHATML, parts)
    assert [len(prompts) for prompts, _ in calls] == [7, 4] and len(rows) == 7


def test_what_the_context_or_the_template_does_not_allow_is_left_out_and_counted(monkeypatch):
    parts = [([USER], [turn("user", "x" * 200)], [USER]), ([USER], [USER])]
    rows, n_left_out, _, _ = answered(monkeypatch, CHATML, parts, max_context=250)
    assert [len(row["messages"]) for row in rows] == [2, 4] and n_left_out == 2
    rows, n_left_out, _, _ = answered(monkeypatch, ALTERNATING, [([USER], [SYSTEM, USER])])
    assert [len(row["messages"]) for row in rows] == [2] and n_left_out == 1
