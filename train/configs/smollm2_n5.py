"""SmolLM2-135M-Instruct (4-bit, one GGUF file) through five stages of six layers.

    python -m train.prepare --out data/train.jsonl --rows 2880 --temperatures 0.0 0.0 0.7
    python -m train.prepare --out data/heldout.jsonl --rows 96 --seed 1
    python -m train.pdm --config smollm2_n5

Two CPU cores (AMD EPYC), float32. The target writes about 120 tokens a second here, batches of the
first epoch run it too (3.2 s), later ones read its states from disk (1.3 s; every length of row and
fill is compiled first, about two minutes). How the shipped head came about is told in the README.
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
        draft_vocab_size=10000,  # with these the head file stays below 40 MB
        expected_alpha=0.5,  # most verified drafts are made soon after a reject
        sequence_len=256,
        batch_tokens=768,
        state_cache=True,  # 14 kB a token
        steps=4000,
        lr=1e-3,
        warmup_steps=100,
        schedule="cosine",
        clip_norm=1.0,
        b2=0.95,
        log_every=10,
        save_every=100,
        eval_every=500,
        eval_rows=96,
    )
