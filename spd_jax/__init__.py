"""Speculative Pipeline Decoding in JAX: exact, fast decoding of one sequence over a pipeline."""

from spd_jax.api import decode, draft_predictions, generate, pdm_loss, target_logits
from spd_jax.checks import ConfigError
from spd_jax.config import DraftConfig, LossConfig, PipelineConfig, SamplingConfig
from spd_jax.loading import init_draft, load_draft, load_target
from spd_jax.models.bundle import Draft, Target
from spd_jax.results import DecodeResult, DecodeStats

__all__ = [
    "ConfigError",
    "DecodeResult",
    "DecodeStats",
    "Draft",
    "DraftConfig",
    "LossConfig",
    "PipelineConfig",
    "SamplingConfig",
    "Target",
    "decode",
    "draft_predictions",
    "generate",
    "init_draft",
    "load_draft",
    "load_target",
    "pdm_loss",
    "target_logits",
]
