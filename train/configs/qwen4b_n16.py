"""Qwen3.5-4B through sixteen stages of two layers: every other stage has no full attention.

    python -m train.prepare --target Qwen/Qwen3.5-4B --dtype bfloat16 --prompts chats.jsonl \\
        --answer-tokens 768 --rows 100000 --out data/qwen4b.jsonl
    python -m train.prepare --target Qwen/Qwen3.5-4B --dtype bfloat16 --prompts others.jsonl \\
        --answer-tokens 768 --rows 512 --seed 1 --out data/qwen4b_heldout.jsonl
    python -m train.pdm --config qwen4b_n16

Not yet run: there are no figures to expect. Planned for one device of 80 GB to train on and 17 to
decode; `python -m train.pdm --config qwen4b_n16 --dry-run` says what each of them holds.

As `qwen4b_n8`, with the two layers of the published head for sixteen stages: as many as a stage.
"""

import dataclasses

from train.config import TrainConfig
from train.configs import qwen4b_n8


def get_config() -> TrainConfig:
    """Returns the record of this experiment."""
    return dataclasses.replace(
        qwen4b_n8.get_config(),
        workdir="runs/qwen4b_n16",
        n_stages=16,
        anchors=(0, 8, 16, 24, 31),  # row types begin at depths 0, 4, 8, 12 and 16
        n_layers=2,
    )
