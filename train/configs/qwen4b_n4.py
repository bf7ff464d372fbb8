"""Qwen3.5-4B through four stages of eight layers: five devices, and one row type per depth.

    python -m train.prepare --target Qwen/Qwen3.5-4B --dtype bfloat16 --prompts chats.jsonl \\
        --answer-tokens 768 --rows 100000 --out data/qwen4b.jsonl
    python -m train.prepare --target Qwen/Qwen3.5-4B --dtype bfloat16 --prompts others.jsonl \\
        --answer-tokens 768 --rows 512 --seed 1 --out data/qwen4b_heldout.jsonl
    python -m train.pdm --config qwen4b_n4

Not yet run: there are no figures to expect. Planned for one device of 80 GB to train on and five to
decode; `python -m train.pdm --config qwen4b_n4 --dry-run` says what each of them holds.

As `qwen4b_n8`, with the four layers of the published head for four stages.
"""

import dataclasses

from train.config import TrainConfig
from train.configs import qwen4b_n8


def get_config() -> TrainConfig:
    """Returns the record of this experiment."""
    return dataclasses.replace(
        qwen4b_n8.get_config(),
        workdir="runs/qwen4b_n4",
        n_stages=4,
        anchors=(0, 8, 16, 24, 31),  # row types of depths 0 to 4: 0 1 2 3 4, training is exact
        n_layers=4,
    )
