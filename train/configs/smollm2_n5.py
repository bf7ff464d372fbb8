"""SmolLM2-135M-Instruct (4-bit, one GGUF file) through five stages of six layers.

    python -m train.pdm --config smollm2_n5 --train_data data/train.jsonl \
        --heldout_data data/heldout.jsonl --workdir runs/smollm2_n5
"""

from train.config import TrainConfig


def get_config() -> TrainConfig:
    """Returns the record of this experiment."""
    return TrainConfig(
        target="smollm2-135m",
        train_data="data/train.jsonl",
        heldout_data="data/heldout.jsonl",
        workdir="runs/smollm2_n5",
        n_stages=5,  # anchors 0, 6, 12, 18, 24, 30: one row type per depth
        n_layers=2,
        draft_vocab_size=10240,  # with these the head file stays below 40 MB
        sequence_len=320,
        batch_tokens=640,
        state_cache=True,  # 14 kB a token
        epochs=2.0,
        lr=5e-4,
        warmup_steps=50,
        schedule="cosine",
        clip_norm=1.0,
        b2=0.95,
        log_every=10,
        save_every=100,
        eval_every=400,
        eval_rows=32,
    )
