"""What the public functions pass around: a target or a draft as one pytree.

Parameters are the leaves; configuration, tokenizer and identity are static.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from spd_jax.checks import check_counts, require
from spd_jax.config import AnyDraftConfig, TargetConfig


@dataclasses.dataclass(frozen=True)
class Trained:
    """How a draft module was trained, as far as its use hangs on that."""

    thinking: bool | None  # what the chat template got as enable_thinking; None: nothing
    sequence_len: int  # tokens of the longest row

    def __post_init__(self) -> None:
        require(
            self.thinking is None or isinstance(self.thinking, bool),
            f"thinking must be true, false or null, got {self.thinking!r}",
        )
        check_counts(self, "sequence_len", least=2)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["params"],
    meta_fields=["config", "tokenizer", "stop_ids", "sha256", "name", "layout"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Target:
    """A target model: parameters per layer, and what goes with them."""

    params: Any  # tree of `models.target`; with a layout, of `pipeline.placing.shard_target`
    config: TargetConfig
    tokenizer: Any = None  # spd_jax.weights.tokenizer.ChatTokenizer, or None
    stop_ids: tuple[int, ...] = ()  # ids that end a text, from every source that names them
    sha256: str | None = None  # of the weight files
    name: str = "target"  # what it was loaded from, for messages
    layout: Any = None  # spd_jax.pipeline.placing.Layout of a target loaded onto a mesh


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["params"],
    meta_fields=["config", "name", "trained"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Draft:
    """A Pipeline Draft Module for one target."""

    params: Any  # {"projs", "layers", "lm_head" where the head is its own; "memory" of v10}
    config: AnyDraftConfig
    name: str = "draft"  # what it was loaded from, for messages
    trained: Trained | None = None  # None: not recorded, or not trained here
