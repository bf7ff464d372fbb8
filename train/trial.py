"""A true decode of a few held-out prompts with the weights as they are, beside plain decoding.

Greedy, all ranks on one device. It reads the weights, draws no random numbers and gives its memory
back, so training goes on as if it had not been.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax

import spd_jax
from spd_jax.checks import ConfigError
from spd_jax.config import DraftConfig
from spd_jax.models.bundle import Draft, Target
from spd_jax.weights import LoadedTarget
from train.data import Row
from train.simulate import Counts


class Trial:
    """Decodes the first held-out prompts; what `generate` writes for them is computed once."""

    def __init__(
        self,
        target: LoadedTarget,
        target_params: Any,  # on the device
        draft: DraftConfig,
        rows: Sequence[Row],
        n_rows: int,
        max_new_tokens: int,
    ) -> None:
        """Chooses the prompts.

        Raises:
          ConfigError: no prompt leaves room in the target's context.
        """
        self._target = Target(
            target_params, target.config, target.tokenizer, target.stop_ids, target.sha256
        )
        self._draft, self._max_new_tokens = draft, max_new_tokens
        room = target.config.max_context - max_new_tokens
        prompts = dict.fromkeys(prompt_ids(row) for row in rows)
        self._prompts = [list(ids) for ids in prompts if len(ids) <= room][:n_rows]
        if not self._prompts:
            raise ConfigError(
                f"no held-out prompt leaves room for decode_tokens {max_new_tokens} in the "
                f"target's context of {target.config.max_context}; lower decode_tokens or set "
                "decode_every 0"
            )
        self._plain: list[list[int]] | None = None

    def __call__(self, params: Any) -> dict[str, Any]:
        """Returns counts and rates over all prompts, and what the decode took."""
        began, peak = time.perf_counter(), peak_bytes()
        draft = Draft(params, self._draft)
        options = {"max_new_tokens": self._max_new_tokens}
        # The guard is for the training loop, where a copy in each step would cost its speed.
        with jax.transfer_guard_host_to_device("allow"):
            if self._plain is None:
                plain = spd_jax.generate(self._target, self._prompts, **options)
                self._plain = [result.tokens for result in plain]
            results = spd_jax.decode(self._target, draft, self._prompts, mesh="virtual", **options)
        counts = Counts(
            sum(len(r.tokens) for r in results),
            sum(len(r.tokens) - 1 for r in results),
            sum(r.accepted.count(True) - 1 for r in results),
            sum(r.cycles for r in results),
        )
        n_stages, pairs = self._draft.n_stages, zip(results, self._plain, strict=True)
        return {
            "rows": len(results),
            "tokens": counts.tokens,
            "cycles": counts.cycles,
            "alpha": counts.alpha,
            "tau": counts.tau(n_stages),
            "tokens_per_cycle": counts.tokens_per_cycle,
            "identical": sum(result.tokens == tokens for result, tokens in pairs),
            "seconds": time.perf_counter() - began,  # compiling and `generate` included
            "peak_bytes_added": peak_bytes() - peak,
        }


def prompt_ids(row: Row) -> tuple[int, ...]:
    """Returns the ids before the first that is scored; the first one where all are scored."""
    return tuple(row.ids[: max(1, int(row.scored_mask.argmax()))].tolist())


def peak_bytes() -> int:
    """The most memory used so far: the device's where it tells, else that of this process."""
    stats = jax.local_devices()[0].memory_stats() or {}
    unit = 1 if sys.platform == "darwin" else 1024
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return stats.get("peak_bytes_in_use", resident)
