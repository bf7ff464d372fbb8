"""Answers found by the chat template itself: training sees the ids that decoding sees."""

import pytest

from spd_jax.weights import load_target_files
from spd_jax.weights.tiny import byte_tokenizer
from tests.train.templates import (
    ALTERNATING,
    CHATML,
    HEADERS,
    SWITCHED,
    THINKING,
    UNMARKED,
    markers_tokenizer,
)
from train.chats import ChatReader, read_turns
from train.sources import UnusableError


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


ONE = [turn("user", "hi"), turn("assistant", "hello you")]
SEVERAL = [turn("system", "Be brief"), *ONE, turn("user", " and? "), turn("assistant", "é\n\nbye")]


def reader(template, thinking=None):
    return ChatReader(markers_tokenizer(template), (), thinking)


def spans(tokens):
    """The runs of scored ids of a row: (ids before, ids of the run)."""
    found, start = [], None
    for i, m in enumerate([*tokens.mask, 0]):
        if m and start is None:
            start = i
        elif not m and start is not None:
            found.append((tokens.ids[:start], tokens.ids[start:i]))
            start = None
    return found


def decoded_spans(read, turns, answers):
    """What decoding sees: the prompt of each answer, and the ids that the target would write."""
    served, encode = read.tokenizer.with_thinking(read.thinking), read.tokenizer.encode
    places = [k for k, t in enumerate(turns) if t["role"] == "assistant"]
    return [
        (served.encode_chat(turns[:k]), encode(answer))
        for k, answer in zip(places, answers, strict=True)
    ]


@pytest.mark.parametrize(
    ("template", "end"),
    [(CHATML, "<|im_end|>"), (HEADERS, "<|eot_id|>"), (UNMARKED, "")],
    ids=["chatml", "headers", "unmarked"],
)
def test_a_row_is_what_decoding_sees(template, end):
    read = reader(template)
    (row,), n_unscored = read.tokens({"messages": SEVERAL})
    assert n_unscored == 0
    assert spans(row) == decoded_spans(read, SEVERAL, [f"hello you{end}", f"é\n\nbye{end}"])
    assert row.mask[-1] == 1  # nothing follows that no one would write


def test_a_template_that_strips_content_scores_what_it_shows():
    read = reader(HEADERS)
    turns = [turn("user", "  hi "), turn("assistant", " \n hello  ")]
    (row,), _ = read.tokens({"messages": turns})
    assert spans(row) == decoded_spans(read, turns, ["hello<|eot_id|>"])


def test_turns_after_the_last_answer_are_left_out():
    read = reader(CHATML)
    assert read.tokens({"messages": [*ONE, turn("user", "more")]}) == read.tokens({"messages": ONE})


def test_an_empty_thought_of_the_prompt_is_not_scored():
    read = reader(THINKING, thinking=False)
    (row,), _ = read.tokens({"messages": ONE})
    ((before, written),) = spans(row)
    assert read.tokenizer.decode(before, with_markers=True).endswith("<think>\n\n</think>\n\n")
    assert read.tokenizer.decode(written, with_markers=True) == "hello you<|im_end|>"


@pytest.mark.parametrize("in_content", [True, False])
def test_thoughts_are_scored_where_the_target_is_served_thinking(in_content):
    answer = turn("assistant", "ok", reasoning_content="let me see")
    if in_content:
        answer = turn("assistant", "<think>\nlet me see\n</think>\n\nok")
    turns = [turn("user", "hi"), answer]
    read = reader(THINKING, thinking=True)
    (row,), _ = read.tokens({"messages": turns})
    written = "<think>\nlet me see\n</think>\n\nok<|im_end|>"
    assert spans(row) == decoded_spans(read, turns, [written])
    with pytest.raises(UnusableError, match="does not continue the generation prompt"):
        reader(THINKING, thinking=False).tokens({"messages": turns})  # it would not write this


@pytest.mark.parametrize("text", ["ok", "<b>", "<think", " \n ok "])
def test_an_empty_thought_that_is_shown_in_the_prompt_only_is_seen_and_not_scored(text):
    turns = [turn("user", "hi"), turn("assistant", text), turn("user", "a"), turn("assistant", "b")]
    read = reader(SWITCHED, thinking=False)
    rows, n_unscored = read.tokens({"messages": turns})
    written = [text.strip() + "<|im_end|>", "b<|im_end|>"]
    assert [span for row in rows for span in spans(row)] == decoded_spans(read, turns, written)
    assert len(rows) == 2 and n_unscored == 0


def test_an_opened_thought_is_the_targets_to_write():
    thought = turn("assistant", "<think>\nhm\n</think>\n\nok")
    read = reader(SWITCHED, thinking=True)
    (row,), _ = read.tokens({"messages": [turn("user", "hi"), thought]})
    written = ["hm\n</think>\n\nok<|im_end|>"]
    assert spans(row) == decoded_spans(read, [turn("user", "hi"), thought], written)
    always = SWITCHED.replace("enable_thinking is false", "false")
    for read, hint in (
        (reader(SWITCHED, thinking=True), r" \(thinking False changes it\)"),
        (reader(SWITCHED), r" \(thinking False changes it\)"),
        (reader(always), ""),
    ):
        with pytest.raises(UnusableError, match=f"not continue the generation prompt{hint}$"):
            read.tokens({"messages": ONE})


@pytest.mark.parametrize("thinking", [False, True])
def test_an_answer_that_is_shown_otherwise_later_has_a_row_of_its_own(thinking):
    turns = [
        turn("user", "hi"),
        turn("assistant", "<think>\nfirst\n</think>\n\none" if thinking else "one"),
        turn("user", "and"),
        turn("assistant", "<think>\nthen\n</think>\n\ntwo" if thinking else "two"),
    ]
    read = reader(THINKING, thinking)
    rows, n_unscored = read.tokens({"messages": turns})
    thought = "<think>\n{}\n</think>\n\n" if thinking else ""
    written = [thought.format("first") + "one<|im_end|>", thought.format("then") + "two<|im_end|>"]
    assert [span for row in rows for span in spans(row)] == decoded_spans(read, turns, written)
    assert len(rows) == 2 and n_unscored == 0


def test_a_role_order_that_the_template_refuses_is_a_reason():
    read = reader(ALTERNATING)
    with pytest.raises(UnusableError, match="refused the messages: roles must alternate"):
        read.tokens({"messages": SEVERAL})
    doubled = [*ONE, turn("user", "a"), turn("user", "b"), turn("assistant", "c")]
    (row,), n_unscored = read.tokens({"messages": doubled})
    assert spans(row) == decoded_spans(read, ONE, ["hello you<|im_end|>"])
    assert n_unscored == 1


def test_no_token_lies_across_the_seam_of_prompt_and_answer():
    tokenizer = markers_tokenizer(CHATML, merges=("\n\n",))
    read = ChatReader(tokenizer)
    turns = [turn("user", "hi"), turn("assistant", "\nhello")]
    (row,), _ = read.tokens({"messages": turns})
    assert spans(row) == decoded_spans(read, turns, ["\nhello<|im_end|>"])
    whole = tokenizer.encode(tokenizer.render_chat(turns, opens_turn=False))
    assert row.ids != whole[: len(row.ids)]  # or the merge was none


def test_a_marker_inside_an_answer_ends_it_as_it_ends_decoding():
    read = reader(CHATML)
    turns = [turn("user", "hi"), turn("assistant", "a<|im_end|>b")]
    (row,), _ = read.tokens({"messages": turns})
    assert spans(row) == decoded_spans(read, turns, ["a<|im_end|>"])
    turns = [turn("user", "hi"), turn("assistant", "a<|eot_id|>b")]
    other = ChatReader(read.tokenizer, stop_ids=tuple(read.tokenizer.encode("<|eot_id|>")))
    (row,), _ = other.tokens({"messages": turns})
    assert spans(row) == decoded_spans(other, turns, ["a<|eot_id|>"])


def test_roles_and_parts_are_read_in_every_usual_form():
    expected = read_turns({"messages": ONE})
    share = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello you"}]
    parts = [turn("user", [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]), ONE[1]]
    model = [ONE[0], turn("model", "hello you")]
    assert read_turns({"conversations": share}) == expected
    assert read_turns({"messages": parts}) == expected
    assert read_turns({"messages": model, "conversations": None}) == expected
    assert read_turns({"conversations": ONE}) == expected


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "none of messages, conversations, text and input_ids"),
        ({"messages": []}, "messages is not a list of turns"),
        ({"messages": "hi"}, "messages is not a list of turns"),
        ({"conversations": {"a": 1}}, "conversations is not a list of turns"),
        ({"messages": ["hi"]}, "a turn is not an object"),
        ({"messages": [{"content": "hi"}]}, "a turn without a role"),
        ({"messages": [turn("owner", "hi")]}, "a turn of unknown role"),
        ({"messages": [turn(["user"], "hi")]}, "a turn of unknown role"),
        ({"messages": [turn("user", None)]}, "a turn without text"),
        ({"messages": [turn("user", 7)]}, "a turn without text"),
        ({"messages": [turn("user", [{"type": "image"}])]}, "a turn without text"),
        ({"messages": [turn("user", " \n")]}, "a turn that is empty"),
        ({"messages": [turn("user", "a\ud800")]}, "a turn with half a character"),
        ({"messages": [turn("user", "hi")]}, "no assistant turn"),
        ({"messages": [turn("assistant", "hi")]}, "an answer without a prompt"),
        ({"messages": [*ONE, turn("assistant", "x", tool_calls=[1])]}, "a turn with tool calls"),
        ({"text": 3}, "text without text"),
        ({"text": ""}, "text that is empty"),
        ({"input_ids": "abc"}, "input_ids is not a list of integers"),
        ({"input_ids": [1, 2.5]}, "input_ids is not a list of integers"),
        ({"input_ids": [True]}, "input_ids is not a list of integers"),
        ({"input_ids": [1], "loss_mask": [2]}, "loss_mask is not a list of 0 and 1"),
        ({"input_ids": [1], "loss_mask": [1.0]}, "loss_mask is not a list of 0 and 1"),
        ({"input_ids": [1], "loss_mask": [1, 1]}, "loss_mask has not one entry per id"),
    ],
)
def test_what_cannot_be_used_is_said(fields, reason):
    with pytest.raises(UnusableError, match=reason) as error:
        reader(CHATML).tokens(fields)
    assert "\n" not in str(error.value)


def test_text_and_ids_without_a_mask_are_scored_whole():
    read = ChatReader(byte_tokenizer())
    assert read.tokens({"text": "ab", "messages": None}) == ([([97, 98], [1, 1])], 0)
    assert read.tokens({"input_ids": [5, 6], "messages": []}) == ([([5, 6], [1, 1])], 0)
    masked = {"input_ids": [5, 6], "loss_mask": [False, True]}
    assert read.tokens(masked) == ([([5, 6], [0, 1])], 0)
    with pytest.raises(UnusableError, match="no tokenizer"):
        ChatReader(None).tokens({"text": "ab"})


@pytest.mark.network
def test_smollm2_rows_are_what_decoding_sees():
    target = load_target_files("smollm2-135m")
    read = ChatReader(target.tokenizer, target.stop_ids)
    for turns, n_rows in ((ONE, 1), (SEVERAL, 1), ([ONE[0], turn("assistant", "\n\n1. x")], 1)):
        rows, n_unscored = read.tokens({"messages": turns})
        answers = [t["content"] + "<|im_end|>" for t in turns if t["role"] == "assistant"]
        found = [span for row in rows for span in spans(row)]
        assert found == decoded_spans(read, turns, answers)
        assert (len(rows), n_unscored) == (n_rows, 0)
        assert all(row.ids[-1] in target.stop_ids for row in rows)
