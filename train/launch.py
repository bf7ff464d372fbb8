"""How a run starts in one process or several: their flags, and what must be the same in all."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Sequence
from importlib import metadata

from spd_jax.checks import ConfigError
from spd_jax.processes import Launch, Processes
from spd_jax.weights import LoadedTarget
from train.config import TrainConfig, parse_config
from train.data import Corpus

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "transformers", "tokenizers")
# Hosts may keep their files in other places: what these hold is compared by its digest.
PLACES = ("train_data", "heldout_data", "workdir", "target", "start_from", "draft_vocab")


@dataclasses.dataclass(frozen=True)
class RunFlags(Launch, TrainConfig):
    __doc__ = TrainConfig.__doc__

    def __post_init__(self) -> None:
        TrainConfig.__post_init__(self)
        Launch.__post_init__(self)


def parse_run(prog: str, argv: Sequence[str], more: str = "") -> tuple[TrainConfig, Launch]:
    """Reads the settings of a run and which process this is; errors are those of parse_config."""
    flags = parse_config(prog, argv, RunFlags, more)

    def part(cls: type) -> TrainConfig | Launch:
        return cls(**{field.name: getattr(flags, field.name) for field in dataclasses.fields(cls)})

    return part(TrainConfig), part(Launch)


def check_settings(config: TrainConfig, processes: Processes) -> None:
    """Raises ConfigError where settings or libraries differ, or need one process."""
    if processes.n > 1 and config.state_cache:
        raise ConfigError(
            "state_cache keeps what one process computes, and the rows of a batch are over "
            f"{processes.n}; set it False"
        )
    fields = dataclasses.asdict(config)
    what = {name: value for name, value in fields.items() if name not in PLACES}
    versions = {name: metadata.version(name) for name in PACKAGES}
    processes.agree({**what, "python": platform.python_version(), **versions})


def check_data(
    target: LoadedTarget, corpus: Corpus, heldout: Corpus | None, processes: Processes
) -> None:
    """Raises ConfigError where the processes have read other weights or rows."""
    processes.agree(
        {
            "target": target.sha256,
            "train_data": corpus.sha256,
            "heldout_data": heldout and heldout.sha256,
        }
    )
