"""The settings of one training run: a frozen dataclass, its named records, the command line.

A name such as `smollm2_n5` is one file, train/configs/smollm2_n5.py, with get_config().
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import pkgutil
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from spd_jax.checks import ConfigError, suggest
from spd_jax.commandline import parse_flags
from spd_jax.config import DraftConfig, LossConfig, LossName, Outside, PipelineConfig, TargetConfig
from train import configs

# Larger numbers are slips of the finger; they would end in overflows far from here.
MOST = dict.fromkeys(("n_stages", "n_layers", "accumulate"), 2**16)
MOST |= dict.fromkeys(("d_ff", "draft_vocab_size", "sequence_len", "batch_tokens"), 2**24)
MOST |= dict.fromkeys(("steps", "warmup_steps", "log_every", "eval_every", "eval_rows"), 2**31 - 1)
MOST |= dict.fromkeys(("save_every", "keep", "keep_best"), 2**31 - 1)
MOST |= {"lr": 1e3, "weight_decay": 1e3, "epochs": 2**31 - 1, "temperature": 1e3}
MOST |= {"clip_norm": 1e30, "eps": 1e3}
LEAST = {"lr": 1e-20, "temperature": 1e-3, "clip_norm": 1e-20, "eps": 1e-20}  # less: 0 in float32


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Train a Pipeline Draft Module (PDM) for a target model."""

    train_data: tuple[str, ...] = ("train.jsonl",)
    """JSONL or parquet files, folders of them or glob patterns, of chats, text or token ids."""
    heldout_data: tuple[str, ...] | None = None
    """The same to evaluate on. None: no evaluation."""
    thinking: bool | None = None
    """As in infer.decode: training sees the prompts that decoding with the same setting sees."""
    overflow: Literal["cut", "discard"] = "cut"
    """What becomes of rows longer than sequence_len."""
    packing: bool = False
    """Fill sequences of sequence_len with several rows each, which do not see each other."""
    draft_vocab: str | None = None
    """JSON file of the ids that the draft can propose (of train.vocabulary), in place of
    draft_vocab_size."""
    workdir: str = "runs/pdm"
    """Folder of this run: checkpoints, heads, metrics.jsonl, run.json. A run there goes on."""
    target: str = "smollm2-135m"
    """smollm2-135m, tiny, an HF directory, a .gguf file or a hub id."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What target and draft compute in; trained weights and AdamW's moments are float32 always."""

    n_stages: int = 5
    """Pipeline stages N that the draft is trained for."""
    anchors: tuple[int, ...] | None = None
    """Hidden-state indices that the draft reads. None: the stage boundaries, 0 to L."""
    n_layers: int = 2
    """Decoder layers of the draft."""
    d_ff: int | None = None
    """Feed-forward width of the draft's layers. None: the target's, 9216 where it has none."""
    draft_vocab_size: int | None = None
    """Ids the draft can propose, the most frequent of the training data. None: all."""
    feature_norm: Literal["rms", "none"] = "rms"
    """rms: each anchor is normalised per token before it is projected."""
    qk_norm: bool | None = None
    """Per-head RMSNorm of queries and keys in the draft's layers. None: as the target has it."""
    head: Literal["own", "target"] = "own"
    """own: a trained head; target: the target's frozen rows, not stored with the draft."""
    init: Literal["target", "random"] = "target"
    """target: layers begin as copies of the target's, rows as their deepest anchor; random: both at
    random, as first published. The head begins as the target's rows either way."""
    start_from: str | None = None
    """Head directory to begin from, with as many layers or fewer; the draft ids are chosen among
    its own. None: copies of the target's layers, all ids."""

    sequence_len: int = 256
    """Longest row in tokens; what becomes of longer ones is said by overflow. Rows are padded to
    one of at most eight lengths up to it, steps of 64 tokens or more: each length is compiled."""
    batch_tokens: int = 512
    """Tokens of a batch, padding included: as many rows of one length as fit."""
    state_cache: bool = False
    """Keep the target's hidden states of each row in workdir/states, for later epochs; the folder
    may be deleted after the run."""
    epochs: float = 1.0
    """Passes over the training rows, where steps is None."""
    steps: int | None = None
    """Updates of the weights, each from `accumulate` batches."""
    accumulate: int = 1
    """Batches of an update: the gradient is that of the mean over the scored positions of all."""
    lr: float = 3e-4
    """Highest learning rate."""
    warmup_steps: int = 50
    """Updates in which the learning rate rises from 0."""
    schedule: Literal["linear", "cosine"] = "cosine"
    """How the learning rate falls after that."""
    lr_final: float = 0.0
    """Where it ends, as a fraction of lr."""
    clip_norm: float = 1.0
    """Gradients are scaled down to this global norm."""
    b1: float = 0.9
    """AdamW's decay of the first moment."""
    b2: float = 0.95
    """AdamW's decay of the second moment."""
    eps: float = 1e-8
    """AdamW's addition to the root of the second moment."""
    weight_decay: float = 0.0
    """AdamW's weight decay, of matrices only: norms keep their scale."""
    decay_head: bool = True
    """Whether weight decay reaches the draft's own head too."""
    ema: float | None = None
    """Decay of an average of the weights over updates, such as 0.999: it is then what is evaluated
    and written as head. None: the weights themselves are."""
    temperature: float = 1.0
    """Temperature of the distillation loss."""
    loss: LossName = "kl"
    """kl: KL(target || draft), as published; reverse_kl: KL(draft || target); js: Jensen-Shannon;
    tv: total variation, 1 minus the chance of acceptance; ce: cross-entropy on the target's choice;
    hybrid: kl and tv."""
    outside: Outside = "renormalise"
    """The target's mass on ids that the draft lacks: renormalise leaves it out, as published; miss
    counts it as lost, so that a position weighs as much as the draft can win there."""
    tv_weight: float = 0.5
    """Share of tv in the hybrid loss."""
    mask_mode: Literal["exact", "reference"] = "exact"
    """exact: a simulated fill sees what decoding sees; reference: as first published."""
    expected_alpha: float | None = None
    """Draw simulated fills as decoding meets them where this share of drafts is accepted. None: N
    half of the time, else uniform from 1..N-1, as first published."""
    remat: bool = False
    """Keep only what enters each layer of the draft and compute the rest again for the gradient:
    less memory, about a third more time in the draft."""
    devices: int | None = None
    """Devices to train on, the rows of a batch over all of them; of several processes together.
    None: as many as there are, but one CPU of each process."""
    cut_target: bool | None = None
    """Cut the target's weights over the devices and put layers together as they are used. None:
    where they take more than half of a device's memory."""
    seed: int = 0
    """Seed of the initial parameters, the data order and the simulated fills."""

    log_every: int = 10
    """Updates between lines of metrics.jsonl."""
    eval_every: int = 500
    """Updates between evaluations; one follows the last too."""
    eval_rows: int = 64
    """Held-out rows used at most."""
    eval_stages: tuple[int, ...] = ()
    """Other numbers of stages to simulate the head at, in the evaluation after the last step."""
    decode_every: int = 0
    """Evaluations between true decodes of held-out prompts; one follows the last step too. 0: none
    at all."""
    decode_rows: int = 4
    """Prompts of a true decode."""
    decode_tokens: int = 64
    """New tokens of each of them at most."""
    save_every: int = 200
    """Updates between checkpoints."""
    keep: int = 2
    """Newest checkpoints kept, each with its head."""
    keep_best: int = 1
    """Best checkpoints kept beside them: an evaluation is followed by a save, and best.json names
    the best. 0: none."""
    best_by: Literal["agree_target", "agree_text", "loss"] = "agree_target"
    """The held-out figure that says which is best, over all held-out rows and fills."""
    tensorboard: bool = True
    """Write the figures of metrics.jsonl to workdir/tensorboard too."""
    max_minutes: float | None = None
    """Save and stop after so many minutes; the same command goes on from there."""
    license: str | None = None
    """Licence of the trained head, such as apache-2.0, for its card. None: the card names none."""

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_data()
        for name, most in MOST.items():
            value = getattr(self, name)
            if value is not None and value > most:
                raise ConfigError(f"{name} must be at most {most}, got {value}")
        for name in ("batch_tokens", "sequence_len", "log_every", "eval_every", "eval_rows"):
            _at_least(name, getattr(self, name), 1)
        for name in ("save_every", "keep", "steps", "draft_vocab_size", "d_ff", "accumulate"):
            _at_least(name, getattr(self, name), 1)
        _at_least("devices", self.devices, 1)
        for name in ("decode_rows", "decode_tokens"):
            _at_least(name, getattr(self, name), 1)
        for name in ("warmup_steps", "weight_decay", "seed", "keep_best", "decode_every"):
            _at_least(name, getattr(self, name), 0)
        for name in ("epochs", "lr", "clip_norm", "temperature", "max_minutes", "eps"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} must be a number above 0, got {value}")
        for name, least in LEAST.items():
            _at_least(name, getattr(self, name), least)
        for name in ("b1", "b2", "ema", "expected_alpha"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise ConfigError(f"{name} must be between 0 and 1, got {value}")
        _ = self.scoring  # for its error
        if not 0 <= self.lr_final <= 1:
            raise ConfigError(
                f"lr_final must be from 0 to 1, a fraction of lr, got {self.lr_final}"
            )
        if min(self.eval_stages, default=2) < 2:
            raise ConfigError(f"eval_stages must be numbers of at least 2, got {self.eval_stages}")
        if self.seed >= 2**63:
            raise ConfigError(f"seed must be below 2^63, got {self.seed}")
        if self.sequence_len < 2:
            raise ConfigError(f"sequence_len must be at least 2, got {self.sequence_len}")
        if self.batch_tokens < self.sequence_len:
            raise ConfigError(
                f"batch_tokens must hold one row of sequence_len ({self.sequence_len}), got "
                f"{self.batch_tokens}; raise batch_tokens or lower sequence_len"
            )

    def _check_choices(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            choices, value = get_args(hint), getattr(self, name)
            if get_origin(hint) is Literal and value not in choices:
                known = f"{', '.join(choices[:-1])} or {choices[-1]}"
                raise ConfigError(f"{name} must be {known}, got {value!r}")

    def _check_data(self) -> None:
        for name in ("train_data", "heldout_data"):
            value = getattr(self, name)
            if isinstance(value, str):  # one place: the usual case
                object.__setattr__(self, name, (value,))
            elif value is not None and not all(isinstance(one, str) for one in value):
                raise ConfigError(f"{name} must be a path or several, got {value!r}")
        if not self.train_data:
            raise ConfigError("train_data must name one place or more, got none")
        if self.packing and self.state_cache:
            raise ConfigError(
                "packing and state_cache exclude each other (states are kept row by row); set one "
                "of them False"
            )
        if self.draft_vocab is not None and self.draft_vocab_size is not None:
            raise ConfigError(
                "draft_vocab and draft_vocab_size exclude each other; set one of them None"
            )

    @property
    def scoring(self) -> dict[str, Any]:
        """How a draft is compared with its target: settings of `distill.score_positions`."""
        return {
            "temperature": self.temperature,
            "mask_mode": self.mask_mode,
            "loss": LossConfig(self.loss, self.outside, self.tv_weight),
            "remat": self.remat,
        }

    def draft_config(
        self, target: TargetConfig, draft_ids: tuple[int, ...] | None, target_sha256: str | None
    ) -> DraftConfig:
        """Returns the settings of the draft this run trains for a target."""
        if self.sequence_len > target.max_context:
            raise ConfigError(
                f"sequence_len must be at most {target.max_context} (the target's context), got "
                f"{self.sequence_len}"
            )
        if self.packing and target.delta is not None:
            raise ConfigError(
                "packing puts several texts into a row, which the delta-nets of "
                f"{target.model_type} cannot keep apart; set it False"
            )
        pipeline = PipelineConfig(target.n_layers, self.n_stages)
        return DraftConfig(
            anchors=pipeline.default_anchors() if self.anchors is None else self.anchors,
            n_stages=self.n_stages,
            n_layers=self.n_layers,
            d_ff=self.d_ff,
            feature_norm=self.feature_norm,
            qk_norm=target.qk_norm if self.qk_norm is None else self.qk_norm,
            head=self.head,
            draft_ids=draft_ids,
            target_sha256=target_sha256,
        )


Settings = TypeVar("Settings", bound=TrainConfig)


def _at_least(name: str, value: float | None, least: int) -> None:
    if value is not None and value < least:
        raise ConfigError(f"{name} must be at least {least}, got {value}")


def config_names() -> list[str]:
    """Returns the names that `--config` takes."""
    return sorted(module.name for module in pkgutil.iter_modules(configs.__path__))


def named_config(name: str) -> TrainConfig:
    """Returns the record of that name.

    Raises:
      ConfigError: there is none; a close name is suggested.
    """
    names = config_names()
    if name not in names:
        raise ConfigError(f"--config {name!r} is unknown; {suggest(name, names)}")
    return importlib.import_module(f"{configs.__name__}.{name}").get_config()


def parse_config(
    prog: str, argv: Sequence[str], cls: type[Settings] = TrainConfig, more: str = ""
) -> Settings:
    """Reads `--config NAME` and any `--field value` after or before it.

    Args:
      cls: TrainConfig or a dataclass that adds fields to it; more: said at the end of `--help`.
    Raises:
      ConfigError: no such config, or a field has a value that cannot be.
      SystemExit: a flag is unknown or malformed (code 2, one line), or `--help` was asked.
    """
    rest, name = list(argv), None
    for i, arg in enumerate(rest):
        if arg == "--config" or arg.startswith("--config="):
            name = arg.partition("=")[2] or (rest[i + 1] if i + 1 < len(rest) else "")
            del rest[i : i + (1 if "=" in arg else 2)]
            break
    if name is None:
        if "--help" not in rest and "-h" not in rest:
            raise ConfigError(f"give --config NAME; there are {', '.join(config_names())}")
        default, text = cls(), f"Give --config NAME first: {', '.join(config_names())}."
    else:
        named = named_config(name)
        fields = {field.name: getattr(named, field.name) for field in dataclasses.fields(named)}
        default, text = cls(**fields), f"Defaults are those of --config {name}."
    return parse_flags(cls, prog, rest, default, f"{cls.__doc__} {text} {more}".rstrip())
