"""What the mains of this room do before their work: devices, stage layers, models."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax

import spd_jax
from spd_jax.checks import ConfigError
from spd_jax.commandline import say
from spd_jax.engines import resolve_pipeline
from spd_jax.pipeline.mesh import resolve_mesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """How tokens are chosen: flags that mains share."""

    temperature: float = 0.0
    """0: greedy. Above: sample, exactly from the target's distribution at this temperature."""
    top_k: int = 0
    """Keep the k most probable ids, and those tied with the last of them. 0: all."""
    top_p: float = 1.0
    """Keep the most probable ids until their sum reaches this. 1: all."""
    verifier: Literal["rejection", "coupled"] = "rejection"
    """Of sampling. rejection: accepts most, the text depends on the draft; coupled: draft and
    target share their noise, and a seed gives the text of autoregressive decoding."""

    @property
    def sampling(self) -> spd_jax.SamplingConfig:
        """The settings of `decode` and `generate`."""
        return spd_jax.SamplingConfig(self.temperature, self.top_k, self.top_p, self.verifier)

    def check_comparable(self, flag: str) -> None:
        """Raises ConfigError where a decode cannot be compared with `generate`, token for token."""
        if self.temperature > 0 and self.verifier == "rejection":
            raise ConfigError(
                f"{flag} needs one text per seed, and with the rejection verifier it depends on "
                "the draft; add --verifier coupled or --temperature 0"
            )


def start_devices(cpu_devices: int | None) -> None:
    """Makes jax start with `cpu_devices` virtual CPU devices; None leaves jax to itself.

    Raises:
      ConfigError: the count is below 1, or jax has already used its devices.
    """
    if cpu_devices is None:
        return
    if cpu_devices < 1:
        raise ConfigError(f"--cpu-devices must be at least 1, got {cpu_devices}")
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", cpu_devices)
    except RuntimeError:
        raise ConfigError(
            "--cpu-devices must be set before jax starts; run the command in a process of its own"
        ) from None


def parse_stage_layers(text: str | None) -> tuple[int, ...] | None:
    """Reads `--stage-layers 6,6,6,6,6`.

    Raises:
      ConfigError: the text is not a comma list of integers.
    """
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--stage-layers must be layer counts separated by commas, like 6,6,6,6,6; got {text!r}"
        ) from None


@dataclasses.dataclass(frozen=True)
class Subject:
    """A target, its draft module, and how the two are to be run."""

    target: Any
    draft: Any
    n_stages: int
    decode_settings: dict[str, Any]  # keywords of spd_jax.decode: stages, mesh, placement


def load_subject(flags: Any) -> Subject:
    """Loads what the flags name and says in one line what will run where.

    Args:
      flags: has target, thinking, draft, dtype, n_stages, stage_layers, mesh, placement and seed.
        The tiny target has no trained head: without a draft it gets a random one, and a line says
        so.

    Raises:
      ConfigError: a file or a setting is wrong.
    """
    stage_layers = parse_stage_layers(flags.stage_layers)
    if not -(2**63) <= flags.seed < 2**63:
        raise ConfigError(f"--seed must be a 64-bit integer, got {flags.seed}")
    say(f"loading {flags.target} ...")
    target = spd_jax.load_target(flags.target, dtype=flags.dtype, thinking=flags.thinking)
    n_stages = flags.n_stages
    if n_stages is None and stage_layers is not None:
        n_stages = len(stage_layers)
    if flags.draft is None and flags.target == "tiny":
        draft = _random_draft(target, n_stages, flags.seed)
    else:
        draft = spd_jax.load_draft(flags.draft, target)
    pipeline = resolve_pipeline(target, draft, n_stages, stage_layers)
    n_stages = pipeline.n_stages
    mesh = None if flags.mesh == "auto" else flags.mesh
    devices = resolve_mesh(mesh, flags.placement, n_stages)
    where = (
        "placement virtual, mode virtual (one device)"
        if devices is None
        else f"placement dedicated, mode sharded ({devices.size} devices)"
    )
    layers = ",".join(map(str, pipeline.stage_layers))
    say(f"target {flags.target}, {draft.name}, {n_stages} stages of {layers} layers, {where}")
    settings = {"n_stages": n_stages, "stage_layers": stage_layers, "mesh": mesh}
    return Subject(target, draft, n_stages, {**settings, "placement": flags.placement})


def _random_draft(target: Any, n_stages: int | None, seed: int) -> Any:
    n_layers = target.config.n_layers
    pipeline = spd_jax.PipelineConfig(n_layers, min(5, n_layers) if n_stages is None else n_stages)
    config = spd_jax.DraftConfig(
        anchors=pipeline.default_anchors(), n_stages=pipeline.n_stages, n_layers=1
    )
    say("note: no head is shipped for the tiny target; using an untrained one, random in part")
    return spd_jax.init_draft(target, config, jax.random.key(seed))
