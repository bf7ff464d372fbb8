"""Named settings, overrides on the command line, and what a slip of the finger gets."""

import dataclasses
import importlib
import pkgutil

import pytest

from spd_jax.checks import ConfigError
from spd_jax.commandline import run
from spd_jax.weights import load_target_config, load_target_files
from train import configs
from train.config import TrainConfig, config_names, named_config, parse_config
from train.dry_run import DryRunConfig

PROG = "python -m train.pdm"


def test_every_config_file_is_a_valid_record():
    for module in pkgutil.iter_modules(configs.__path__):
        config = named_config(module.name)
        assert isinstance(config, TrainConfig)
        text = importlib.import_module(f"train.configs.{module.name}").__doc__
        assert f"--config {module.name}" in text  # the header holds the command


def test_every_config_has_rows_to_evaluate_on_and_says_how_they_are_made():
    for name in {*config_names()} - {"tiny_n4"}:  # it only tries the trainer
        config, text = named_config(name), importlib.import_module(f"train.configs.{name}").__doc__
        assert config.heldout_data and not {*config.heldout_data} & {*config.train_data}
        for path in (*config.train_data, *config.heldout_data):
            assert f"--out {path}" in " ".join(text.split())


def test_fields_are_overridden_on_the_command_line():
    argv = ["--lr", "0.5", "--config", "tiny_n4", "--anchors", "0", "5", "--state-cache", "True"]
    config = parse_config(PROG, argv)
    assert (config.lr, config.anchors, config.state_cache) == (0.5, (0, 5), True)
    assert config.n_stages == named_config("tiny_n4").n_stages
    assert parse_config(PROG, ["--config=tiny_n4", "--batch_tokens", "128"]).batch_tokens == 128


def test_data_are_one_place_or_several():
    assert TrainConfig(train_data="a.jsonl").train_data == ("a.jsonl",)
    argv = ["--config", "tiny_n4", "--train-data", "a", "b*.parquet", "--heldout-data", "c"]
    config = parse_config(PROG, argv)
    assert (config.train_data, config.heldout_data) == (("a", "b*.parquet"), ("c",))
    assert parse_config(PROG, ["--config", "smollm2_n5"]).heldout_data == ("data/heldout.jsonl",)
    assert parse_config(PROG, [*argv[:2], "--heldout-data", "None"]).heldout_data is None


def test_an_unknown_config_is_an_error_that_suggests():
    with pytest.raises(ConfigError, match="'smolm2_n5' is unknown; did you mean 'smollm2_n5'"):
        parse_config(PROG, ["--config", "smolm2_n5"])
    with pytest.raises(ConfigError, match=f"there are {', '.join(config_names())}"):
        parse_config(PROG, ["--config", "zzz"])
    for argv in ([], ["--config"]):
        with pytest.raises(ConfigError, match="--config"):
            parse_config(PROG, argv)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--warmup-step", "3"], ["--warmup-step", "--warmup-steps"]),
        (["--lr", "fast"], ["--lr", "fast"]),
        (["--schedule", "square"], ["square", "linear", "cosine"]),
    ],
)
def test_a_wrong_flag_is_one_line_and_exit_code_2(argv, words, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_config(PROG, ["--config", "tiny_n4", *argv])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.strip().split("\n")
    assert line.startswith("error: ") and all(word in line for word in words)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lr": 0.0}, "lr must be a number above 0"),
        ({"b2": 1.0}, "b2 must be between"),
        ({"keep": 0}, "keep must be at least 1"),
        ({"batch_tokens": 100}, "batch_tokens must hold one row of sequence_len"),
        ({"sequence_len": 1}, "sequence_len must be at least 2"),
        ({"lr": float("nan")}, "lr must be a number above 0"),
        ({"warmup_steps": -1}, "warmup_steps must be at least 0"),
        ({"epochs": float("inf")}, "epochs must be at most 2147483647, got inf"),
        ({"expected_alpha": 1.0}, "expected_alpha must be between 0 and 1"),
        ({"seed": 2**70}, "seed must be below"),
        ({"eval_stages": (4, 1)}, "eval_stages must be numbers of at least 2, got"),
        ({"decode_every": -1}, "decode_every must be at least 0"),
        ({"decode_tokens": 0}, "decode_tokens must be at least 1"),
        ({"train_data": ()}, "train_data must name one place or more"),
        ({"heldout_data": (3,)}, "heldout_data must be a path or several"),
        ({"tv_weight": 1.5}, "tv_weight must be from 0 to 1"),
        ({"packing": True, "state_cache": True}, "packing and state_cache exclude each other"),
        ({"draft_vocab": "v.json", "draft_vocab_size": 9}, "draft_vocab_size exclude each other"),
        ({"ema": 1.0}, "ema must be between 0 and 1"),
        ({"b1": 0.0}, "b1 must be between 0 and 1"),
        ({"eps": 0.0}, "eps must be a number above 0"),
        ({"lr_final": 1.5}, "lr_final must be from 0 to 1, .* got 1.5"),
        ({"accumulate": 0}, "accumulate must be at least 1"),
        ({"keep_best": -1}, "keep_best must be at least 0"),
        ({"steps": 10**30}, "steps must be at most 2147483647"),
        ({"lr": 1e30}, "lr must be at most 1000"),
        ({"lr": 1e-300}, "lr must be at least 1e-20"),
        ({"epochs": 1e308}, "epochs must be at most"),
        ({"temperature": 1e-300}, "temperature must be at least 0.001"),
        ({"temperature": 1e30}, "temperature must be at most 1000"),
        ({"clip_norm": 1e-40}, "clip_norm must be at least"),
        ({"eps": 1e-300}, "eps must be at least"),
    ],
)
def test_values_that_cannot_be_are_errors(fields, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**fields)


CHOICES = ("overflow", "dtype", "feature_norm", "head", "init", "schedule", "loss", "outside")
CHOICES += ("mask_mode", "best_by")


@pytest.mark.parametrize("cls", [TrainConfig, DryRunConfig])
@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_that_a_config_file_misspells_is_an_error(cls, name):
    """No command line stands between: a config is Python."""
    (default,) = (field.default for field in dataclasses.fields(cls) if field.name == name)
    for wrong in (default[:-1], default.upper(), None):
        with pytest.raises(ConfigError, match=f"{name} must be .*{default}.*, got {wrong!r}"):
            cls(**{name: wrong})


def test_a_config_error_ends_a_main_with_one_line_and_code_2(capsys):
    def main():
        raise ConfigError("first\nsecond")

    with pytest.raises(SystemExit) as stop:
        run(main)
    assert stop.value.code == 2
    assert capsys.readouterr().err == "error: first second\n"


def test_rows_beyond_the_targets_context_are_refused():
    target = load_target_files("tiny").config
    config = parse_config(
        PROG, ["--config", "tiny_n4", "--sequence-len", "4097", "--batch-tokens", "5000"]
    )
    with pytest.raises(ConfigError, match="sequence_len must be at most 4096 .* got 4097"):
        config.draft_config(target, None, "")


def test_packing_is_refused_for_delta_nets():
    target, _ = load_target_config("Qwen/Qwen3.5-4B")
    config = dataclasses.replace(named_config("qwen4b_n8"), packing=True)
    with pytest.raises(ConfigError, match="packing puts several texts into a row"):
        config.draft_config(target, None, None)
