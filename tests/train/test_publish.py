"""Model cards: valid front matter, and every figure and setting that a user of a head asks for."""

import dataclasses
from typing import get_args

import pytest
from huggingface_hub import ModelCard

from spd_jax.config import DraftConfig, LossName
from train.card import Origin, hub_id, model_card
from train.config import TrainConfig, named_config
from train.publish import command_line

RATES = {"agree_text": 0.5, "agree_target": 0.25, "lookup": 0.125, "n_scored": 7000}
DRAFT = DraftConfig((0, 2), n_stages=2, target_sha256="ab12")


def table_rows(card: str, first: str) -> list[dict[str, str]]:
    """The rows of the table whose first heading is this, by heading."""
    lines = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in card.split(f"| {first} |")[1].split("\n\n")[0].split("\n")
    ]
    heads = [first, *[cell.strip(" |") for cell in lines[0]]]
    assert all(set(cell) <= {"-", " "} for cell in lines[1])
    return [dict(zip(heads, row, strict=True)) for row in lines[2:]]


def test_a_card_says_when_its_figures_were_taken():
    config = named_config("tiny_n4")
    groups = {"all": RATES, "T=0": RATES | {"agree_text": 0.75}}
    card = model_card(9, config, DRAFT, (9, groups))
    assert "On held-out text, 64 rows at most, by" in card
    first, second = table_rows(card, "text")
    assert first["text"] == "all" and first["agreement with the text"] == "0.500"
    assert (first["2-gram lookup"], first["positions"]) == ("0.125", "7,000")
    assert second["agreement with the text"] == "0.750"
    assert "On held-out text at update 5, 64 rows" in model_card(
        9, config, DRAFT, (5, {"all": RATES})
    )
    assert "held-out" not in model_card(9, config, DRAFT, None)


def test_new_and_missing_figures_are_tolerated():
    groups = {
        "all": RATES | {"new_by_fill": [1.0], "new": "?", "tau": 1.5, "agree_text_by_fill": [0.5]},
        "T=0": {"n_scored": 3},
    }
    card = model_card(9, named_config("tiny_n4"), DRAFT, (9, groups))
    first, second = table_rows(card, "text")
    assert first["tau"] == "1.500" and second["tau"] == second["2-gram lookup"] == "-"
    assert table_rows(card, "by tokens in flight")[0]["1"] == "0.500"
    assert "new" not in card.split("## Figures")[1].split("## Use")[0]


def test_other_stage_counts_and_a_true_decode_are_told():
    decode = {"rows": 4, "tokens": 2560, "cycles": 3000, "alpha": 0.5, "tau": None, "identical": 3}
    stages = {"alpha_by_stages": {"16": 0.25, "4": 0.5}, "tau_by_stages": {"4": None}}
    card = model_card(9, named_config("tiny_n4"), DRAFT, (9, {"all": RATES | stages}))
    alpha, tau = table_rows(card, "at other numbers of stages")
    assert list(alpha.values()) == ["alpha", "0.500", "0.250"] and tau["16"] == tau["4"] == "-"
    assert "held-out prompts" not in card
    card = model_card(9, named_config("tiny_n4"), DRAFT, (9, {"all": RATES | {"decode": decode}}))
    assert "3,000 cycles for 2,560 tokens: alpha 0.500, tau -; the text was identical" in card
    assert "in 3 of 4." in card


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "- 9 updates, each from a batch of up to 512 tokens\n"),
        ({"sequence_len": 96}, "- rows of up to 96 tokens; the chat template's enable_thinking: "
         "its own default\n"),
        ({"thinking": False}, "the chat template's enable_thinking: false\n"),
        ({"accumulate": 32}, "- 9 updates, each from 32 batches of up to 512 tokens\n"),
        ({}, "over the draft ids; loss: KL(target || draft)\n"),
        ({"loss": "ce"}, "loss: cross-entropy on the target's choice\n"),
        ({"loss": "hybrid", "tv_weight": 0.25, "temperature": 2.0}, "total variation (0.25 of the "
         "latter), at temperature 2\n"),
        ({"loss": "tv", "outside": "miss"}, "loss: total variation, the target's mass on other ids "
         "counted as lost\n"),
    ],
)  # fmt: skip
def test_a_card_tells_updates_and_the_loss_they_lower(fields, words):
    card = model_card(9, TrainConfig(**fields), DRAFT, (9, {"all": RATES | {"loss": 0.5}}))
    assert words in card
    assert table_rows(card, "text")[0]["training loss"] == "0.500"


@pytest.mark.parametrize("loss", get_args(LossName))
def test_every_loss_has_words(loss):
    assert model_card(9, TrainConfig(loss=loss), DRAFT, None)


def test_front_matter_is_what_the_hub_reads():
    config = dataclasses.replace(named_config("smollm2_n5"), license="apache-2.0")
    read = ModelCard(model_card(9, config, DRAFT, None)).data.to_dict()
    assert read["library_name"] == "spd_jax" and read["license"] == "apache-2.0"
    assert read["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert "speculative-decoding" in read["tags"]
    differs = "a 4-bit file of HuggingFaceTB/SmolLM2-135M-Instruct, which is named as base_model"
    assert differs in model_card(9, config, DRAFT, None)
    local = TrainConfig(target="some/where/a: model")
    card = model_card(9, local, DRAFT, None)
    read = ModelCard(card).data.to_dict()
    assert "4-bit" not in card
    assert "base_model" not in read and "license" not in read
    assert (
        "# Pipeline draft module for a: model\n" in card and "some/where" not in card.split("##")[0]
    )


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-4B"),
        ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("tiny", None),
        ("./model", None),
        ("tests/golden", None),  # a directory that is there
        ("a/b/model.gguf", None),
    ],
)
def test_only_a_hub_id_is_a_base_model(target, expected):
    assert hub_id(target) == expected


def test_data_settings_and_use_are_told(small, corpus):
    config = TrainConfig(
        target="Qwen/Qwen3.5-4B", train_data="d/a|b.jsonl", heldout_data="d/h.jsonl", lr=0.5,
        start_from="heads/1",
    )  # fmt: skip
    origin = Origin(small.target, corpus, corpus, "python -m train.pdm --config x")
    card = model_card(7, config, small.draft, None, origin)
    trained, held = table_rows(card, "data")
    assert trained["file"] == "`d/a\\|b.jsonl`" and held["file"] == "`d/h.jsonl`"
    n_tokens = sum(len(row.ids) for row in corpus.rows)
    assert (trained["rows"], trained["tokens"]) == ("13", f"{n_tokens}")
    assert trained["temperature: rows"] == "0: 7, 0.7: 6" and corpus.sha256 in trained["sha256"]
    fields = {row["field"]: row["value"] for row in table_rows(card, "field")}
    assert fields["`lr`"] == "`0.5`" and "`seed`" not in fields
    for words in (
        "python -m train.pdm --config x",
        "begun from the weights of an earlier head",
        "python -m infer.decode --target Qwen/Qwen3.5-4B --draft path/to/head",
        "3 stages of 2, 1, 1 layers",
        "MLP width 48",
        "40 draft ids",
        "other weights are refused",
    ):
        assert words in card, words


def test_the_command_is_that_of_the_trainer_or_none():
    argv = ["/usr/bin/python3.11", "-X", "dev", "-m", "train.pdm", "--workdir", "my run"]
    assert command_line(argv) == "python -m train.pdm --workdir 'my run'"
    assert command_line(["python", "-m", "pytest", "train.pdm"]) is None
