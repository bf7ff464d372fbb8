"""Rows: what is used, skipped with a reason, cut or discarded; the digest; hostile files."""

import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spd_jax.checks import ConfigError
from spd_jax.weights.tokenizer import ChatTokenizer
from tests.train.templates import ALTERNATING, THINKING, markers_tokenizer
from train import chats
from train.chats import ChatReader
from train.data import Corpus, Row, count_shared, last_answers, read_corpus
from train.sources import find_files, read_records

GOOD = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "temperature": 0.7}
CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}
VOCAB_SIZE = 300


def write(path, *rows, end="\n"):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + end)
    return path


def reader(template=ALTERNATING):
    return ChatReader(markers_tokenizer(template))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{not json}", "not JSON"),
        ("[1]", "not a JSON object"),
        ("[" * 100_000, "not JSON"),
        ('{"input_ids": [' + "9" * 5000 + "]}", "not JSON"),
        ({**GOOD, "input_ids": "abc"}, "input_ids is not a list of integers"),
        ({**GOOD, "loss_mask": [0, 1]}, "loss_mask has not one entry per id"),
        ({**GOOD, "loss_mask": [1, 0, 0]}, "nothing to score"),
        ({**GOOD, "temperature": "warm"}, "temperature is not a number from 0 to 1000"),
        ({**GOOD, "temperature": 10**400}, "temperature is not a number from 0 to 1000"),
        ({**GOOD, "temperature": float("nan")}, "temperature is not a number from 0 to 1000"),
        ({"text": "no tokenizer"}, "text for a target that has no tokenizer"),
    ],
)
def test_a_bad_row_is_skipped_and_counted_with_its_line(tmp_path, row, reason):
    path = write(tmp_path / "rows.jsonl", GOOD, "", row, GOOD, row)
    corpus = read_corpus(path, 64, 8)
    assert len(corpus.rows) == 2
    (line,) = corpus.describe()
    assert line == (f"{path}: 2 rows, 6 tokens, 4 scored; 2 skipped: 2 {reason} (lines 3, 5)")


def test_parquet_that_python_cannot_hold_is_skipped_or_refused(tmp_path):
    path = tmp_path / "times.parquet"
    times = pa.array([0, 2**62], pa.int64()).cast(pa.timestamp("us"))
    ids = pa.array([GOOD["input_ids"]] * 2)
    pq.write_table(pa.table({"input_ids": ids, "text": times}), path)
    (line,) = read_corpus(path, 64, 8).describe()
    assert "1 rows" in line and "1 a value that Python has no form for (row 2)" in line
    pq.write_table(pa.Table.from_arrays([ids, ids], ["input_ids", "input_ids"]), path)
    with pytest.raises(ConfigError, match="times.parquet: has two columns input_ids"):
        read_corpus(path, 64, 8)


@pytest.mark.parametrize("template", [ALTERNATING, THINKING])
def test_a_chat_is_rendered_no_further_than_it_is_used(tmp_path, template, monkeypatch):
    said = [CHAT["messages"][i % 2] for i in range(60)]
    path = write(tmp_path / "rows.jsonl", {"messages": said})
    whole = read_corpus(path, VOCAB_SIZE, reader=reader(template)).rows[-1]
    seen, original = [], ChatTokenizer.render_chat

    def render_chat(self, messages, **settings):
        seen.append(len(messages))
        return original(self, messages, **settings)

    monkeypatch.setattr(ChatTokenizer, "render_chat", render_chat)
    for n in (40, 100, 150):
        corpus = read_corpus(path, VOCAB_SIZE, n, reader(template))
        assert max(seen) < 20
        n_unscored = 30 - len(corpus.rows)  # THINKING: a row for each answer
        if template == ALTERNATING:  # one row, as the whole chat begins
            (row,) = corpus.rows
            assert row.ids.tolist() == whole.ids[:n].tolist()
            assert row.scored_mask.tolist() == whole.scored_mask[:n].tolist()
            n_unscored = 30 - max(seen) // 2
            with pytest.raises(ConfigError, match=f"longer than sequence_len {n}"):
                read_corpus(path, VOCAB_SIZE, n, reader(template), "discard")
        assert f"{n_unscored} answers unscored" in corpus.describe()[0]
        seen.clear()


def test_a_chat_of_endless_turns_is_not_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(chats, "MAX_RENDERED", 10_000)
    said = [CHAT["messages"][i % 2] for i in range(400)]
    path = write(tmp_path / "rows.jsonl", {"messages": said}, CHAT)
    (line,) = read_corpus(path, VOCAB_SIZE, reader=reader()).describe()
    assert "2 rows" in line and "188 answers unscored" in line  # 12 * 13 / 2 * 145 > 10,000


@pytest.mark.parametrize("wrong", [64, -1, 10**300])
def test_an_id_beyond_the_vocabulary_is_an_error_that_names_the_line(tmp_path, wrong):
    path = write(tmp_path / "rows.jsonl", GOOD, {**GOOD, "input_ids": [1, 2, wrong]})
    with pytest.raises(ConfigError, match="from 0 to 63, got .*with the same target") as error:
        read_corpus(path, 64, 8)
    assert str(error.value).startswith(f"{path}:2: ") and len(str(error.value)) < 300


def test_a_file_that_gives_no_row_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the data"):
        read_corpus(tmp_path / "absent.jsonl", 64, 8)
    with pytest.raises(ConfigError, match="no usable row; it has no rows"):
        read_corpus(write(tmp_path / "empty.jsonl"), 64, 8)
    unscored = write(tmp_path / "unscored.jsonl", {**GOOD, "loss_mask": [1, 0, 0]}, "[]")
    with pytest.raises(ConfigError) as error:
        read_corpus([write(tmp_path / "good.jsonl", GOOD), unscored], 64, 8)
    assert str(error.value) == (
        f"{unscored}: no usable row; 2 skipped: 1 nothing to score (line 1), 1 not a JSON object "
        "(line 2); give chats, text or the rows of train.prepare"
    )


def test_long_rows_are_cut_or_discarded(tmp_path):
    long = {"input_ids": [5] * 10, "loss_mask": [0, *[1] * 9]}
    late = {"input_ids": [5] * 10, "loss_mask": [*[0] * 8, 1, 1]}
    path = write(tmp_path / "rows.jsonl", GOOD, long, late)
    cut = read_corpus(path, 64, 8)
    assert [len(row.ids) for row in cut.rows] == [3, 8]
    assert [row.number for row in cut.rows] == [0, 1]
    (line,) = cut.describe()
    assert "2 rows, 11 tokens, 9 scored; 2 tokens beyond sequence_len cut; 1 skipped" in line
    assert "1 nothing to score before sequence_len (line 3)" in line
    discarded = read_corpus(path, 64, 8, overflow="discard")
    assert [len(row.ids) for row in discarded.rows] == [3]
    assert "2 longer than sequence_len 8 (lines 2, 3)" in discarded.describe()[0]


def test_a_line_that_a_writer_left_unfinished_is_skipped(tmp_path):
    path = write(tmp_path / "rows.jsonl", GOOD, '{"input_ids": [1,', end="")
    assert "1 not JSON, cut short (line 2)" in read_corpus(path, 64, 8).describe()[0]


def test_bytes_that_are_no_text_and_enormous_lines_are_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr("train.sources.MAX_LINE", 2**20)
    path = tmp_path / "rows.jsonl"
    good = json.dumps(GOOD).encode()
    huge = b'{"text": "' + b"a" * 3 * 2**20 + b'"}'
    path.write_bytes(b"\xef\xbb\xbf" + b"\n".join([good, b'{"text": "\xe9"}', huge, good]))
    corpus = read_corpus(path, 64, 8)
    assert len(corpus.rows) == 2  # a byte order mark is no reason
    assert "1 not UTF-8 (line 2), 1 larger than 1 MiB (line 3)" in corpus.describe()[0]


def test_every_form_may_be_mixed_in_a_file(tmp_path):
    share = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}
    path = write(tmp_path / "rows.jsonl", CHAT, share, {"text": "plain"}, {"input_ids": [7, 8]})
    corpus = read_corpus(path, VOCAB_SIZE, 64, reader())
    chat, same, text, ids = corpus.rows
    np.testing.assert_array_equal(chat.ids, same.ids)
    assert chat.scored_mask.sum() == 3  # y, o and the end of the turn
    assert bytes(text.ids.tolist()) == b"plain" and text.scored_mask.all()
    assert ids.ids.tolist() == [7, 8] and text.temperature == 1.0


def test_parquet_gives_the_rows_of_jsonl(tmp_path):
    bad = {"messages": [{"role": "owner", "content": "x"}]}
    rows = [CHAT, {"text": "plain"}, {**GOOD, "input_ids": [1, 2, 3]}, bad]
    names = ("messages", "text", "input_ids", "loss_mask", "temperature", "other")
    table = pa.Table.from_pylist([{n: row.get(n) for n in names[:-1]} for row in rows])
    pq.write_table(table, tmp_path / "rows.parquet")
    lines = write(tmp_path / "rows.jsonl", *rows)
    ours, theirs = (
        read_corpus(path, VOCAB_SIZE, 64, reader()) for path in (tmp_path / "rows.parquet", lines)
    )
    assert ours.sha256 == theirs.sha256 and len(ours.rows) == 3
    assert "1 skipped: 1 a turn of unknown role (row 4)" in ours.describe()[0]
    with pytest.raises(ConfigError, match=r"rows.parquet:row 3: ids must be from 0 to 2"):
        read_corpus(tmp_path / "rows.parquet", 3, 64)


def test_ids_that_another_target_wrote_are_an_error(tmp_path):
    lines = write(tmp_path / "a.jsonl", GOOD, {**GOOD, "target_sha256": "a" * 64})
    read_corpus(lines, 64, 8, target_sha256="a" * 64)
    read_corpus(lines, 64, 8)  # nobody says whose
    pq.write_table(
        pa.Table.from_pylist([{**GOOD, "target_sha256": "a" * 64}]), tmp_path / "a.parquet"
    )
    for path, place in ((lines, "a.jsonl:2"), (tmp_path / "a.parquet", "a.parquet:row 1")):
        with pytest.raises(ConfigError, match=f"{place}: its ids are those of .*aaa, this one has"):
            read_corpus(path, 64, 8, target_sha256="b" * 64)
    chat = write(tmp_path / "chat.jsonl", {**CHAT, "target_sha256": "a" * 64})
    read_corpus(chat, VOCAB_SIZE, 64, reader(), target_sha256="b" * 64)  # its text is any target's


def test_a_parquet_file_that_is_none_is_an_error(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["x"]}), path)
    with pytest.raises(ConfigError, match="expected one of the columns .* got prompt"):
        read_corpus(path, 64, 8)
    whole = path.read_bytes()
    for damaged in (b"", b"PAR1", whole[: len(whole) // 2], whole[:-6] + b"\xff" * 6):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"rows.parquet: ") as error:
            read_corpus(path, 64, 8)
        assert "\n" not in str(error.value)


def test_bytes_that_are_no_text_in_parquet_are_skipped(tmp_path):
    binary = pa.array([b"fine", b"\xff\xfe"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 2, binary.buffers())
    pq.write_table(pa.table({"text": text}), tmp_path / "rows.parquet")
    corpus = read_corpus(tmp_path / "rows.parquet", VOCAB_SIZE, 64, reader())
    assert "1 rows, 4 tokens, 4 scored; 1 skipped: 1 not UTF-8 (row 2)" in corpus.describe()[0]


def test_a_byte_order_mark_is_no_record(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf\r\n{"text": "hello"}\r\n')
    assert [(r.number, r.value) for r in read_records(path)] == [(2, {"text": "hello"})]


def test_what_is_no_file_is_an_error(tmp_path):
    """It could not be read twice, or never to its end."""
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    for name in (pipe, "/dev/zero"):
        with pytest.raises(ConfigError, match="expected a file or a folder, got a pipe or device"):
            find_files(name)


def test_suffixes_in_capitals_mean_the_same(tmp_path):
    (tmp_path / "a.JSONL").write_text('{"text": "a"}\n')
    pq.write_table(pa.table({"text": ["b"]}), tmp_path / "b.PARQUET")
    files = find_files(tmp_path)
    assert [record.value for file in files for record in read_records(file)] == [
        {"text": "a"},
        {"text": "b"},
    ]


def test_folders_and_patterns_name_their_files_once_and_in_order(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    for name in ("b.jsonl", "a.jsonl", "sub/c.jsonl", "notes.txt", ".hidden/d.jsonl"):
        write(tmp_path / name, GOOD)
    expected = [tmp_path / name for name in ("a.jsonl", "b.jsonl", "sub/c.jsonl")]
    assert find_files(tmp_path) == expected
    assert find_files(tmp_path / ".hidden") == [tmp_path / ".hidden" / "d.jsonl"]  # asked for
    assert find_files([tmp_path / "a.jsonl", str(tmp_path / "*.jsonl")]) == expected[:2]
    corpus = read_corpus(tmp_path, 64, 8)
    assert corpus.describe()[-1] == "3 files: 3 rows, 9 tokens, 6 scored; 0 skipped"
    for nowhere in (tmp_path / "sub" / "*.parquet", [], tmp_path / ".hidden" / "e*"):
        with pytest.raises(ConfigError, match="expected"):
            find_files(nowhere)
    with pytest.raises(ConfigError, match="cannot look for data there") as error:
        find_files('{"text": "a row, no name"}' * 200)
    assert len(str(error.value)) < 200


def test_the_digest_is_of_ids_and_masks(tmp_path):
    digests = [
        read_corpus(write(tmp_path / f"{i}.jsonl", *rows), 64, 8).sha256
        for i, rows in enumerate(
            [[GOOD], ["[]", GOOD], [GOOD, GOOD], [{**GOOD, "loss_mask": [0, 0, 1]}]]
        )
    ]
    assert digests[0] == digests[1] and len(set(digests)) == 3


def test_answers_that_only_some_templates_allow_are_counted(tmp_path):
    doubled = {"messages": [*CHAT["messages"], *CHAT["messages"][:1] * 2, CHAT["messages"][1]]}
    path = write(tmp_path / "rows.jsonl", doubled, doubled)
    (line,) = read_corpus(path, VOCAB_SIZE, 64, reader()).describe()
    assert "2 answers unscored" in line
    (line,) = read_corpus(path, VOCAB_SIZE, 128, reader(THINKING)).describe()
    assert "unscored" not in line


def test_last_answers_leave_out_a_self_written_prompt():
    mask = np.array([0, 1, 1, 0, 0, 1, 1, 1], bool)
    corpus = Corpus((Row(np.arange(8, dtype=np.int32), mask, 0.0, 0),), "aa")
    (row,) = last_answers(corpus).rows
    assert row.scored_mask.tolist() == [False] * 5 + [True] * 3
    whole = Corpus((Row(np.arange(3, dtype=np.int32), np.ones(3, bool), 0.0, 0),), "aa")
    assert last_answers(whole).rows[0].scored_mask.all()


def test_rows_that_both_corpora_hold_are_counted():
    def corpus(*rows):
        mask = np.ones(3, bool)
        return Corpus(tuple(Row(np.array(ids, np.int32), mask, 0.0) for ids in rows), "aa")

    training = corpus([1, 2, 3], [4, 5, 6], [4, 5, 6])
    assert count_shared(corpus([4, 5, 6], [3, 2, 1], [1, 2, 3]), training) == 2
    assert count_shared(corpus([1, 2, 4]), training) == 0


PIECES = [
    "hi", "", " ", "\n", "a\ud800b", "<|im_end|>", "é🎉", None, True, 0, 3, 2.5, [], {}, [[]],
    ["x"], {"role": "user"}, "x" * 3000, "\x00",
]  # fmt: skip
NUMBERS = [0, 0.7, -1, 10**30, 10**400, 1e999, float("nan"), "0.7", None, True, [1]]
ROLES = ["user", "assistant", "system", "human", "gpt", "owner", "", None, 3, ["user"]]


def pick(rng, values):
    return values[rng.integers(len(values))]


def hostile_value(rng, depth=0):
    """A value of any type; no integer in it is an id beyond the vocabulary, which is fatal."""
    kind = rng.integers(4)
    if kind == 0 and depth < 4:
        return [hostile_value(rng, depth + 1) for _ in range(rng.integers(4))]
    if kind == 1 and depth < 4:
        names = rng.choice(["role", "content", "from", "value", "text"], 2)
        return {str(name): hostile_value(rng, depth + 1) for name in names}
    return pick(rng, PIECES)


def nearly_a_chat(rng):
    """Turns in any order, of which some are spoilt."""
    names = pick(rng, [("role", "content"), ("from", "value")])
    turns = []
    for _ in range(rng.integers(1, 5)):
        role = pick(rng, ROLES[:5] if rng.random() < 0.95 else ROLES)
        content = "text" if rng.random() < 0.9 else pick(rng, PIECES)
        turns.append(dict(zip(names, (role, content), strict=True)))
    return turns if rng.random() < 0.95 else [*turns, hostile_value(rng)]


def hostile_record(rng):
    """Some of the known fields, nearly right or of any type."""
    n = int(rng.integers(1, 6))
    makers = {
        "messages": nearly_a_chat,
        "conversations": nearly_a_chat,
        "text": lambda rng: pick(rng, PIECES),
        "input_ids": lambda rng: rng.integers(0, VOCAB_SIZE, n).tolist(),
        "loss_mask": lambda rng: rng.integers(0, 2, n).tolist(),
        "temperature": lambda rng: pick(rng, NUMBERS),
    }
    chosen = rng.permutation(list(makers))[: rng.integers(4)]
    return {
        str(name): hostile_value(rng) if rng.random() < 0.2 else makers[name](rng)
        for name in chosen
    }


def hostile_line(rng):
    """A line of a file: a record, or no record at all."""
    kind = rng.integers(12)
    if kind == 0:
        return pick(rng, [b"{", b"null", b"3", b'"x"', b"[]", b"NaN", b"{}x", b"\x00"])
    if kind == 1:
        depth = int(rng.integers(1, 3000))
        return b'{"text": ' * depth + b"1" + b"}" * depth
    if kind == 2:
        return b'{"text": ' + b"9" * int(rng.integers(4000, 6000)) + b"}"
    line = json.dumps(hostile_record(rng)).encode()
    if kind == 3:
        at = int(rng.integers(len(line)))
        return line[:at] + bytes([rng.integers(128, 256)]) + line[at:]
    return line[: rng.integers(1, len(line))] if kind == 4 else line


@pytest.mark.parametrize("template", [ALTERNATING, THINKING], ids=["alternating", "thinking"])
@pytest.mark.parametrize("seed", range(3))
def test_no_file_is_fatal_and_every_row_is_counted(tmp_path, seed, template):
    rng = np.random.default_rng(seed)
    lines = [hostile_line(rng) for _ in range(400)]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join([json.dumps(CHAT).encode(), *lines]))
    corpus = read_corpus(path, VOCAB_SIZE, 64, reader(template))
    (tally,) = corpus.tallies
    assert tally.n_records == len(lines) + 1
    assert tally.n_used + tally.n_skipped == tally.n_records
    assert tally.n_used > 20 and len(tally.reasons) > 8
    assert all(count > 0 and reason for reason, (count, _) in tally.reasons.items())
    assert "skipped: " in tally.describe() and "\n" not in tally.describe()
    assert all(row.scored_mask[1:].any() and len(row.ids) <= 64 for row in corpus.rows)
