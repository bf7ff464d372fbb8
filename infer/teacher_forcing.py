"""How often a draft names the next id of a given text, fed the true text at every fill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import spd_jax
from infer.agreement import padded_to_bucket


def draft_agreement(
    target: Any,
    draft: Any,
    prompt: Sequence[int],
    tokens: Sequence[int],
    n_stages: int,
    stage_layers: Sequence[int] | None,
) -> float:
    """Counts the tokens (but the first) that the draft's best guess names; mean over fills 1..N.

    The exact mask is used, so at each fill the draft sees what it would see in the pipeline.

    Returns:
      The mean count, between 0 and len(tokens) - 1.
    """
    ids = [*prompt, *tokens]
    wanted = np.arange(len(prompt) + 1, len(ids))  # positions of the scored tokens
    padded = padded_to_bucket(ids, target.config.max_context)
    predicted = spd_jax.draft_predictions(
        target,
        draft,
        padded,
        fill=range(1, n_stages + 1),
        n_stages=n_stages,
        stage_layers=stage_layers,
    )  # [N, T]
    agreed = np.asarray(predicted)[:, wanted - 1] == padded[wanted]
    return float(agreed.sum(axis=1).mean())
