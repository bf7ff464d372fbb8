"""The engine driven by hand: prefill, then any number of cycles at a time, the state in view."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp

from spd_jax.config import SamplingConfig
from spd_jax.engines import build_engine
from spd_jax.models.bundle import Draft, Target
from spd_jax.pipeline import programs
from spd_jax.pipeline.programs import Engine
from spd_jax.pipeline.state import Inputs, PipelineState
from spd_jax.requests import make_inputs, make_request


@dataclasses.dataclass
class Stepper:
    """A batch after its prefill."""

    engine: Engine
    inputs: Inputs
    state: PipelineState

    def run(self, n_cycles: int = 1) -> None:
        """Advances by so many cycles, fewer when all are done."""
        self.state = programs.chunk(self.engine, self.state, self.inputs, n_cycles)(self.state)

    @property
    def is_done(self) -> bool:
        return bool(jnp.all(self.state.done))

    def committed(self, row: int = 0) -> tuple[list[int], list[bool], int]:
        """Tokens, flags and cycles of a sequence so far."""
        s, n = self.state, int(self.state.n_committed[row])
        return s.tokens[row, :n].tolist(), s.accepted[row, :n].tolist(), int(s.n_cycles[row])


def start(
    target: Target,
    draft: Draft,
    prompts: list[list[int]],
    max_new_tokens: int,
    mesh: str | None,
    stop_ids: Sequence[int] = (),
    stage_layers: Sequence[int] | None = None,
    sampling: SamplingConfig = SamplingConfig(),  # noqa: B008
) -> Stepper:
    """Prefills a batch; mesh, stage_layers and sampling as in `decode`."""
    engine = build_engine(target, draft, None, stage_layers, mesh, "auto")
    request = make_request(target, prompts, max_new_tokens, stop_ids, 0)
    inputs = make_inputs(target, request, sampling)
    state = programs.prefill(engine, request.prompts, inputs, max_new_tokens)()
    return Stepper(engine, inputs, state)
