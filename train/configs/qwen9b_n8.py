"""Qwen3.5-9B through eight stages of four layers; its head and embedding are two matrices.

    python -m train.prepare --target Qwen/Qwen3.5-9B --dtype bfloat16 --prompts chats.jsonl \\
        --answer-tokens 768 --rows 100000 --out data/qwen9b.jsonl
    python -m train.prepare --target Qwen/Qwen3.5-9B --dtype bfloat16 --prompts others.jsonl \\
        --answer-tokens 768 --rows 512 --seed 1 --out data/qwen9b_heldout.jsonl
    python -m train.pdm --config qwen9b_n8

Not yet run: there are no figures to expect. Planned for one device of 80 GB to train on and nine to
decode; `python -m train.pdm --config qwen9b_n8 --dry-run` says what each of them holds.

As `qwen4b_n8`, which has the published head's settings for this target too.
"""

import dataclasses

from train.config import TrainConfig
from train.configs import qwen4b_n8


def get_config() -> TrainConfig:
    """Returns the record of this experiment."""
    return dataclasses.replace(
        qwen4b_n8.get_config(),
        target="Qwen/Qwen3.5-9B",
        train_data="data/qwen9b.jsonl",
        heldout_data="data/qwen9b_heldout.jsonl",
        workdir="runs/qwen9b_n8",
    )
