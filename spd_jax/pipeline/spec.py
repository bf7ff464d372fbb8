"""The static description of one engine: who computes what, and where each anchor appears."""

from __future__ import annotations

import dataclasses
import functools

from spd_jax.config import DraftConfig, LayerKind, PipelineConfig, TargetConfig
from spd_jax.models.draft import KIND, layer_config


@dataclasses.dataclass(frozen=True)
class EngineSpec:
    """What every program of the engine is compiled for; hashable."""

    target: TargetConfig
    draft: DraftConfig
    pipeline: PipelineConfig

    @property
    def n_stages(self) -> int:
        """N."""
        return self.pipeline.n_stages

    @property
    def n_anchors(self) -> int:
        """M."""
        return len(self.draft.anchors)

    @functools.cached_property
    def draft_layer(self) -> TargetConfig:
        """Geometry of the PDM's layers."""
        return layer_config(self.target, self.draft)

    @functools.cached_property
    def rank_kinds(self) -> tuple[tuple[LayerKind, ...], ...]:
        """The layers of each stage, and of the PDM."""
        starts, kinds = self.pipeline.starts, self.target.layer_kinds
        stages = [kinds[starts[s] : starts[s + 1]] for s in range(self.n_stages)]
        return (*stages, (KIND,) * self.draft.n_layers)

    @functools.cached_property
    def patterns(self) -> tuple[tuple[LayerKind, ...], ...]:
        """The unlike sequences of layers that stages run."""
        return tuple(dict.fromkeys(self.rank_kinds[: self.n_stages]))

    @functools.cached_property
    def work_of(self) -> tuple[int, ...]:
        """Per rank: which of the patterns it runs, or the PDM, which comes after them."""
        stages = [self.patterns.index(kinds) for kinds in self.rank_kinds[: self.n_stages]]
        return (*stages, len(self.patterns))

    @functools.cached_property
    def row_types(self) -> tuple[int, ...]:
        """f(d) for d = 0..N."""
        return self.pipeline.row_types(self.draft.anchors)

    @functools.cached_property
    def emits(self) -> tuple[tuple[int, ...], ...]:
        """Per stage: how many of its layers precede each hidden state it sends out.

        The first is the stage's output, then its anchors that are not; padded with the output
        so that every stage sends as many.
        """
        starts, sizes = self.pipeline.starts, self.pipeline.stage_layers
        inner = [
            [b - starts[s] for b in self.draft.anchors if starts[s] < b < starts[s + 1]]
            for s in range(self.n_stages)
        ]
        width = 1 + max(map(len, inner))
        return tuple(
            tuple([size, *more] + [size] * (width - 1 - len(more)))
            for size, more in zip(sizes, inner, strict=True)
        )

    @functools.cached_property
    def anchor_sites(self) -> tuple[tuple[int, int], ...]:
        """(stage, index into what it sends out) of anchors 1..M-1; anchor 0 is the embedding."""
        sites = []
        for b in self.draft.anchors[1:]:
            stage = next(s for s in range(self.n_stages) if b <= self.pipeline.starts[s + 1])
            sites.append((stage, self.emits[stage].index(b - self.pipeline.starts[stage])))
        return tuple(sites)
