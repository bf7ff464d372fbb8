"""SmolLM2-135M-Instruct (4-bit, one GGUF file) through five stages of six layers.

    python -m train.prepare --out data/train.jsonl --rows 1680
    python -m train.prepare --out data/heldout.jsonl --rows 48 --seed 1
    python -m train.pdm --config smollm2_n5

Two CPU cores (AMD EPYC), float32. Data: 300,000 tokens written by the target in 40 minutes of
both cores. Training: the first epoch also runs the target (about 2 s a batch), later ones read its
states from disk (about 0.6 s). The draft has one layer: two learn more per batch but cost four
times as much, which two cores do not have.
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
        n_layers=1,
        draft_vocab_size=14336,  # with these the head file stays below 40 MB
        sequence_len=320,
        batch_tokens=640,
        state_cache=True,  # 14 kB a token
        steps=1200,
        lr=2e-3,
        warmup_steps=50,
        schedule="cosine",
        clip_norm=1.0,
        b2=0.95,
        log_every=10,
        save_every=100,
        eval_every=300,
        eval_rows=48,
    )
