"""Speculative Pipeline Decoding in JAX: exact, fast decoding of one sequence over a pipeline."""

from spd_jax.api import generate, load_target
from spd_jax.config import ConfigError, DraftConfig, SamplingConfig

__all__ = ["ConfigError", "DraftConfig", "SamplingConfig", "generate", "load_target"]
