"""`thinking` means the same wherever a chat becomes ids: training sees the prompts of decoding."""

import dataclasses
import json

import jax
import pytest

import spd_jax
from infer import decode, evaluate
from infer.decode import DecodeFlags
from infer.evaluate import EvaluateFlags
from spd_jax import loading
from spd_jax.checks import ConfigError
from spd_jax.commandline import parse_flags
from spd_jax.config import DraftConfig
from spd_jax.models.bundle import Trained
from spd_jax.prompts import checked_prompt_ids, prompt_ids
from spd_jax.requests import make_request
from spd_jax.weights import load_target_files
from spd_jax.weights.heads import save_head
from tests.train.templates import CHATML, SWITCHED, THINKING, markers_tokenizer
from train import dialogues, pdm, prepare, vocabulary
from train.config import TrainConfig, parse_config

TEMPLATES = {"no thoughts": CHATML, "empty thought": THINKING, "opened thought": SWITCHED}
CLOSED = {"no thoughts": "", "empty thought": "<think>\n\n</think>\n\n"}
CLOSED["opened thought"] = "<think>\n</think>\n\n"
OPEN = {"no thoughts": "", "empty thought": "", "opened thought": "<think>\n"}


@pytest.fixture
def files(monkeypatch):
    """Makes every main load the tiny target with the tokenizer of a template."""

    def use(template):
        tiny = load_target_files("tiny")
        config = dataclasses.replace(tiny.config, vocab_size=300)
        loaded = tiny._replace(config=config, tokenizer=markers_tokenizer(template))
        for module in (loading, vocabulary):
            monkeypatch.setattr(module, "load_target_files", lambda *_: loaded)
        return loaded

    return use


def trained_prompts(monkeypatch, loaded, data, argv):
    """The prompt ids of one chat in every main that makes training data of it."""

    def before(row):
        return row.ids[: row.scored_mask.argmax()].tolist()

    config = parse_config("x", ["--config", "tiny_n4", *argv])
    yield before(pdm.read_data([str(data)], config, loaded).rows[0])

    read_corpus, seen = vocabulary.read_corpus, []

    def kept(*args, **keywords):
        seen.append(read_corpus(*args, **keywords))
        return seen[-1]

    monkeypatch.setattr(vocabulary, "read_corpus", kept)
    out = ["--target", "tiny", "--out", str(data.with_suffix(".out")), *argv]
    vocabulary.main(["--data", str(data), "--size", "9", *out])
    yield before(seen[0].rows[0])

    monkeypatch.setattr(prepare, "write_rounds", lambda *args: seen.append(args))
    prepare.main(["--prompts", str(data), *out])
    target, _, (chat,) = seen[-1]
    yield chat.ids
    start, end = dialogues._around(target.tokenizer)
    yield start + target.tokenizer.encode("hi") + end


@pytest.mark.parametrize("thinking", [None, True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_training_sees_the_prompts_of_decoding(name, thinking, files, tmp_path, monkeypatch):
    loaded = files(TEMPLATES[name])
    argv = [] if thinking is None else ["--thinking", str(thinking)]
    answer = "ok" if thinking is False else "<think>\nhm\n</think>\n\nok"
    user = {"role": "user", "content": "hi"}
    data = tmp_path / "chats.jsonl"
    data.write_text(json.dumps({"messages": [user, {"role": "assistant", "content": answer}]}))

    flags = parse_flags(DecodeFlags, "x", argv)
    target = spd_jax.load_target("tiny", thinking=flags.thinking)
    (decoded,) = prompt_ids(target, "tiny", ["hi"])
    text = target.tokenizer.decode(decoded, with_markers=True)
    end = (CLOSED if thinking is False else OPEN)[name]
    assert text.endswith(f"<|im_start|>assistant\n{end}")
    request = make_request(target, "hi", 4, None, 0)
    assert request.prompts[0, : request.prompt_lens[0]].tolist() == decoded
    assert checked_prompt_ids(target, "tiny", [("a:1", "hi")], 4) == [decoded]
    for prompt in trained_prompts(monkeypatch, loaded, data, argv):
        assert prompt == decoded


def test_a_head_says_where_it_was_trained_with_another(files, tmp_path, caplog):
    loaded = files(SWITCHED)
    draft = DraftConfig(anchors=(0, 4, 8), n_stages=2, n_layers=1, draft_ids=(97, 98))
    params = spd_jax.init_draft(loaded_target(None), draft, jax.random.key(0)).params
    for trained in (None, True, False):
        made = Trained(trained, 256)
        save_head(tmp_path, draft, loaded.config, jax.device_get(params), "", trained=made)
        for thinking in (None, True, False):
            caplog.clear()
            spd_jax.load_draft(tmp_path, loaded_target(thinking))
            notes = [record.getMessage() for record in caplog.records]
            told = f"was trained with thinking {trained}, the target is loaded with {thinking}"
            assert [told in note for note in notes] == [True] * (trained != thinking)


def loaded_target(thinking):
    return spd_jax.load_target("tiny", thinking=thinking)


@pytest.mark.parametrize("main", [decode.main, evaluate.main])
def test_decoding_loads_the_target_with_it(main, tmp_path, monkeypatch):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["hi"]}\n')
    argv = ["--thinking", "False", *(["--prompts", str(prompts)] if main is evaluate.main else [])]
    seen = []

    def load_target(source, *, dtype, thinking):
        seen.append(thinking)
        raise ConfigError("loaded")

    monkeypatch.setattr(spd_jax, "load_target", load_target)
    with pytest.raises(ConfigError, match="loaded"):
        main(argv)
    assert seen == [False]


def test_every_main_leaves_thinking_to_the_template(tmp_path):
    assert parse_flags(DecodeFlags, "x", []).thinking is None
    assert parse_flags(EvaluateFlags, "x", ["--prompts", "a"]).thinking is None
    assert TrainConfig().thinking is None and prepare.PrepareConfig(tmp_path).thinking is None


def test_thinking_is_a_boolean_or_left_out():
    with pytest.raises(ConfigError, match="thinking must be None, True or False, got 'yes'"):
        spd_jax.load_target("tiny", thinking="yes")
