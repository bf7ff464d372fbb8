"""The head directories of a run: what `--draft` takes, one beside each checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from spd_jax.config import DraftConfig, TargetConfig
from spd_jax.weights.heads import save_head
from train.config import TrainConfig


def save_run_head(
    directory: Path,
    position: int,
    config: TrainConfig,
    draft: DraftConfig,
    target: TargetConfig,
    params: Any,
    judged: tuple[int, dict[str, Any]] | None,
) -> None:
    """Writes directory/<position> in bfloat16.

    Args:
      judged: the last held-out figures, and after how many batches they were taken.
    Raises:
      ConfigError: the disk refuses.
    """
    card = model_card(position, config, draft, judged)
    save_head(directory / str(position), draft, target, jax.device_get(params), card)


def model_card(
    position: int,
    config: TrainConfig,
    draft: DraftConfig,
    judged: tuple[int, dict[str, Any]] | None,
) -> str:
    """Returns the card of a head (Markdown)."""
    n_ids = "all" if draft.draft_ids is None else len(draft.draft_ids)
    lines = [
        f"# Pipeline draft module for {config.target}",
        "",
        f"- trained for {draft.n_stages} stages, anchors {list(draft.anchors)}, "
        f"{draft.n_layers} layers, {n_ids} draft ids",
        f"- {position * config.accumulate} batches of up to {config.batch_tokens} tokens, "
        f"distilled from the target (sha256 {draft.target_sha256}) on text it wrote itself",
    ]
    if config.start_from is not None:
        lines.append("- begun from the weights of an earlier head, not from the target's layers")
    judged_at, figures = judged or (position, {})
    when = "" if judged_at == position else f" at batch {judged_at * config.accumulate}"
    for group, rates in figures.items():
        lines.append(
            f"- held out{when}, {group}: agreement with the text {rates['agree_text']:.3f}, with "
            f"the target's choice {rates['agree_target']:.3f} (mean over fills 1..N); 2-gram "
            f"lookup {rates['lookup']:.3f}; {rates['n_scored']} positions"
        )
    lines += ["", "The head fits this target's weights only; other weights are refused.", ""]
    return "\n".join(lines)
