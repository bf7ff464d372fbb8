"""Qwen3.5-4B through eight stages of four layers, three delta-nets and full attention each.

    python -m train.prepare --target Qwen/Qwen3.5-4B --dtype bfloat16 --prompts chats.jsonl \\
        --answer-tokens 768 --rows 100000 --out data/qwen4b.jsonl
    python -m train.prepare --target Qwen/Qwen3.5-4B --dtype bfloat16 --prompts others.jsonl \\
        --answer-tokens 768 --rows 512 --seed 1 --out data/qwen4b_heldout.jsonl
    python -m train.pdm --config qwen4b_n8

Not yet run: there are no figures to expect. Planned for one device of 80 GB to train on and nine to
decode; `python -m train.pdm --config qwen4b_n8 --dry-run` says what each of them holds.

Anchors, layers, learning rate and 64 rows of up to 2048 tokens an update are those of the published
head of this size (three layers: one fewer than a stage, so the draft is done first). b2 is not: it
is the one that SmolLM2's head was trained with. bfloat16 is what target and draft compute in;
weights and moments are float32, so a b2 of 0.999 would work too. On eight devices `--batch-tokens
65536 --accumulate 2` makes the same updates of larger parts.
"""

from train.config import TrainConfig


def get_config() -> TrainConfig:
    """Returns the record of this experiment."""
    return TrainConfig(
        target="Qwen/Qwen3.5-4B",
        dtype="bfloat16",
        train_data="data/qwen4b.jsonl",
        heldout_data="data/qwen4b_heldout.jsonl",
        workdir="runs/qwen4b_n8",
        n_stages=8,
        anchors=(0, 8, 16, 24, 31),  # row types of depths 0 to 8: 0 0 1 1 2 2 3 3 4
        n_layers=3,
        draft_vocab_size=32000,
        sequence_len=2048,
        batch_tokens=4096,
        accumulate=32,
        remat=True,
        epochs=1.0,
        lr=1e-4,
        warmup_steps=100,
        schedule="linear",
        clip_norm=1.0,
        b2=0.95,
        log_every=10,
        eval_every=50,  # updates of 64 rows: some thirty evaluations in an epoch of 100,000
        save_every=50,
    )
