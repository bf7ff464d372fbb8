"""The random `tiny` target through four stages: a run of a minute or two, to try the trainer.

    python -m train.prepare --target tiny --out data/tiny.jsonl --rows 96 \\
        --prompt-tokens 16 --answer-tokens 32
    python -m train.prepare --target tiny --out data/tiny_heldout.jsonl --rows 24 \\
        --prompt-tokens 16 --answer-tokens 32 --seed 1
    python -m train.pdm --config tiny_n4 --heldout-data data/tiny_heldout.jsonl

Without the held-out rows it trains the same and makes no held-out figures.
"""

from train.config import TrainConfig


def get_config() -> TrainConfig:
    """Returns the record of this experiment."""
    return TrainConfig(
        target="tiny",
        train_data="data/tiny.jsonl",
        workdir="runs/tiny_n4",
        n_stages=4,
        n_layers=1,
        draft_vocab_size=192,
        sequence_len=96,
        batch_tokens=384,
        epochs=4.0,
        lr=1e-3,
        warmup_steps=5,
        schedule="linear",
        save_every=20,
        eval_every=20,
    )
