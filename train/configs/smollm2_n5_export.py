"""The recipe of smollm2_n5 for a head that users of the reference implementation can serve too.

    python -m train.prepare --out data/train.jsonl --rows 2880 --temperatures 0.0 0.0 0.7
    python -m train.prepare --out data/heldout.jsonl --rows 96 --seed 1
    python -m train.pdm --config smollm2_n5_export
    python -m train.export runs/smollm2_n5_export/heads/4000 exported/smollm2_n5

That format knows no norm of the features, and norms of queries and keys in every layer; its
program reads an anchor at the last layer's output in two ways, so the deepest anchor is one lower.
Not yet run: there are no figures to expect. Features that are not normalised differ in size by
anchor; should the loss jump, lower lr.
"""

import dataclasses

from train.config import TrainConfig
from train.configs import smollm2_n5


def get_config() -> TrainConfig:
    """Returns the record of this experiment."""
    return dataclasses.replace(
        smollm2_n5.get_config(),
        workdir="runs/smollm2_n5_export",
        anchors=(0, 6, 12, 18, 24, 29),
        feature_norm="none",
        qk_norm=True,
    )
