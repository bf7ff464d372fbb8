"""`train.pdm --dry-run`: builds the programs of a run and of its decoding from shapes alone.

settings + geometry -> shapes -> traced programs -> bytes of each rank and of the trainer. Nothing
is loaded (but the head of `start_from`), trained or written, and no network is used.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence

import jax
from rich.console import Console
from rich.table import Table

from spd_jax.checks import ConfigError
from spd_jax.commandline import say
from spd_jax.config import (
    DraftConfig,
    LayerKind,
    PipelineConfig,
    SamplingConfig,
    TargetConfig,
    refuse_v10,
)
from spd_jax.models import target as model
from spd_jax.models.draft import (
    check_grows,
    check_pair,
    check_row_types,
    init_params,
    known_ids,
    layer_config,
)
from spd_jax.pipeline.programs import trace
from spd_jax.pipeline.sizes import EngineBytes, count_engine, shape_engine
from spd_jax.pipeline.spec import EngineSpec
from spd_jax.weights import load_draft_file, load_target_config
from train.config import TrainConfig, parse_config
from train.memory import TrainerBytes, count_trainer, rows_per_device
from train.vocabulary import read_draft_ids

DRY_RUN_FLAGS = ("--dry-run", "--dry_run")
DRY_RUN_HELP = "With --dry-run, only says what memory the run and its decoding need."
GIB = 1 << 30
SAMPLED = SamplingConfig(temperature=1.0)  # it keeps more than greedy decoding
MOST_OF_A_SIZE, MOST_LAYERS = 1 << 24, 1 << 12  # of a target


@dataclasses.dataclass(frozen=True)
class DryRunConfig(TrainConfig):
    """Say what training this draft and decoding with it need, from shapes alone."""

    context_len: int | None = None
    """Tokens of a decode: a prompt of one half, new ones for the rest. None: 4096, or the target's
    context where that is less."""
    decode_batch: int = 1
    """Sequences decoded at once."""
    device_memory: float | None = None
    """GiB of one device: an error where something needs more. None: nothing is compared."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least, most in (("context_len", 2, 2**24), ("decode_batch", 1, 2**16)):
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ConfigError(f"{name} must be from {least} to {most}, got {value}")
        if self.device_memory is not None and not self.device_memory > 0:
            raise ConfigError(f"device_memory must be above 0 GiB, got {self.device_memory}")


class ReportConsole(Console):
    """Leaves a reader that has gone to `commandline.run`, as any other output does."""

    def on_broken_pipe(self) -> None:
        """Goes on raising: this is called while the error is handled."""
        raise


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a dry run found."""

    config: DryRunConfig
    spec: EngineSpec
    n_params: tuple[int, int]  # of the target, of the draft
    ranks: EngineBytes
    trainer: TrainerBytes


def parse_dry_run(prog: str, argv: Sequence[str]) -> DryRunConfig:
    """Reads the flags of a run, and those of a dry run beside them."""
    rest = [flag for flag in argv if flag not in DRY_RUN_FLAGS]
    return parse_config(prog, rest, DryRunConfig)


def dry_run(config: DryRunConfig) -> int:
    """Prints the report; returns the exit code.

    Raises:
      ConfigError: the settings cannot be, or something does not fit the device memory.
    """
    plan = make_plan(config)
    print_plan(plan, ReportConsole(highlight=False, markup=False, width=100))
    check_memory(plan)
    return 0


def make_plan(config: DryRunConfig) -> Plan:
    """Traces all programs on shapes and counts bytes; says what is inferred of the target."""
    target, note = load_target_config(config.target)
    if note:
        say(f"note: {note}")
    check_sizes(config.target, target)
    if config.context_len is None:
        config = dataclasses.replace(config, context_len=min(4096, target.max_context))
    if config.context_len > target.max_context:
        raise ConfigError(
            f"context_len must be at most {target.max_context} (the context of {config.target}), "
            f"got {config.context_len}"
        )
    start = None if config.start_from is None else _read_start(config)
    draft = config.draft_config(target, _stand_in_ids(config, target, start), None)
    check_pair(target, draft)
    if start is not None:
        check_grows(target, draft, start)
    check_row_types(target, draft)
    spec = EngineSpec(target, draft, PipelineConfig(target.n_layers, draft.n_stages))
    target_params = model.param_shapes(target, jax.numpy.dtype(config.dtype))
    init = functools.partial(init_params, target, draft)
    draft_params = jax.eval_shape(init, target_params, jax.random.key(config.seed))
    engine = shape_engine(spec, target_params, draft_params)
    prompt_len = config.context_len // 2
    state = trace(engine, config.decode_batch, prompt_len, config.context_len - prompt_len, SAMPLED)
    memory = None if config.device_memory is None else config.device_memory * GIB
    return Plan(
        config,
        spec,
        (_n_elements(target_params), _n_elements(draft_params)),
        count_engine(engine, state),
        count_trainer(config, target, draft, target_params, draft_params, memory),
    )


def check_sizes(source: str, target: TargetConfig) -> None:
    """Raises ConfigError where a size of the target is absurd: shapes of it would overflow."""
    parts = [target, *(part for part in (target.delta, target.experts) if part is not None)]
    for part in parts:
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            most = MOST_LAYERS if field.name == "n_layers" else MOST_OF_A_SIZE
            if isinstance(value, int) and value > most:
                raise ConfigError(
                    f"{source}: {field.name} must be at most {most}, got {value}; correct its "
                    "config.json"
                )


def check_memory(plan: Plan) -> None:
    """Raises ConfigError where a rank or the trainer needs more than a device has."""
    limit, missing = plan.config.device_memory, []
    if limit is None:
        return
    if plan.ranks.total > limit * GIB:
        missing.append(
            f"rank 0 and the {plan.spec.n_stages} others need {_size(plan.ranks.total)} each: "
            "raise n_stages, or lower context_len or decode_batch"
        )
    if plan.trainer.total > limit * GIB:
        change = "lower sequence_len or batch_tokens, or set remat True"
        if plan.trainer.fixed > limit * GIB:
            change = (
                f"{_size(plan.trainer.fixed)} of it are weights, moments and gradients; cut the "
                "target over several devices (devices, cut_target True), or give the draft fewer "
                "layers or ids"
            )
        missing.append(f"the trainer needs {_size(plan.trainer.total)}: {change}")
    if missing:
        raise ConfigError(f"device_memory is {limit:g} GiB, but {'; '.join(missing)}")


def print_plan(plan: Plan, console: Console) -> None:
    """Prints what was built and what it needs."""
    config, spec, ranks = plan.config, plan.spec, plan.ranks
    draft, n = spec.draft, spec.n_stages
    n_target, n_draft = plan.n_params
    console.print(f"dry run for {config.target} in {config.dtype}: shapes only, nothing is loaded")
    console.print(f"target      {n_target:,} parameters, {spec.target.n_layers} layers")
    console.print(f"draft       {n_draft:,} parameters, {_describe_draft(spec)}")
    console.print(f"anchors     {_numbers(draft.anchors)}")
    console.print(f"row types   {_numbers(spec.row_types)} at depths 0 to {n}")
    console.print()
    console.print(
        f"decoding    {n + 1} ranks, {config.decode_batch} x {config.context_len} tokens; padding: "
        "slots of weights and caches that a rank does not use"
    )
    console.print(_rank_table(plan))
    shared = {
        "layer slots": ranks.layers,
        "embedding and heads": ranks.heads,
        "draft projections": ranks.projs,
        "KV caches": ranks.kv_caches,
        "state rings": ranks.state_rings,
        "drafts in flight (sampling)": ranks.proposals,
        "rest of the state": ranks.rest,
        "in all": ranks.total,
    }
    console.print(_size_table("every rank", shared))
    trainer = plan.trainer
    shape = f"{rows_per_device(config)} x {config.sequence_len} tokens"
    if (config.devices or 1) > 1:
        shape = f"{config.devices} devices, {shape} each"
    step = {
        "target weights": trainer.target,
        "draft weights, float32": trainer.draft,
        "optimizer state, float32": trainer.optimizer,
        "average of the weights, float32": trainer.average,
        "batch with the target's hidden states": trainer.batch,
        "either: the target's logits": trainer.logits,
        "or: gradients, float32": trainer.gradients,
        "and what the backward pass keeps at fill N (estimate)": trainer.backward,
        "in all": trainer.total,
    }
    if not trainer.average:
        del step["average of the weights, float32"]
    console.print(_size_table(f"the trainer, {shape}", step))
    console.print("not counted: other temporary buffers of the compiled programs")
    limit = config.device_memory
    console.print(
        "device_memory is not given: nothing is compared with it"
        if limit is None
        else f"compared with device_memory {limit:g} GiB"
    )


def _read_start(config: TrainConfig) -> DraftConfig:
    """Returns the settings of the head to start from; refuses it as training would.

    Whether it belongs to the target's weights is not checked: these are not read.
    """
    draft, _, _ = load_draft_file(config.start_from)
    refuse_v10(draft, f"start_from {config.start_from}", "trained further")
    return draft


def _stand_in_ids(
    config: TrainConfig, target: TargetConfig, start: DraftConfig | None
) -> tuple[int, ...] | None:
    """As many draft ids as the run will choose from its data, spread evenly over the ranks.

    With a head to start from, the lowest of its ids.
    """
    if config.draft_vocab is not None:
        return read_draft_ids(config.draft_vocab, target.vocab_size)
    n_ids = config.draft_vocab_size
    if n_ids is not None and n_ids > target.vocab_size:
        raise ConfigError(
            f"draft_vocab_size must be at most the target's vocab_size {target.vocab_size}, got "
            f"{n_ids}"
        )
    if n_ids is not None and start is not None:
        return tuple(known_ids(target, start)[:n_ids].tolist())
    return None if n_ids is None else tuple(range(n_ids))


def _describe_draft(spec: EngineSpec) -> str:
    draft = spec.draft
    width = layer_config(spec.target, draft).d_ff
    head = "its own head" if draft.head == "own" else "the target's head"
    ids = "all ids" if draft.draft_ids is None else f"{len(draft.draft_ids):,} ids"
    layers = "1 layer" if draft.n_layers == 1 else f"{draft.n_layers} layers"
    return f"{layers} (MLP width {width:,}), {head} over {ids}"


def _rank_table(plan: Plan) -> Table:
    spec, ranks = plan.spec, plan.ranks
    table = Table("rank", "layers", "kinds")
    for name in ("weights", "padding", "caches", "padding"):
        table.add_column(name, justify="right", no_wrap=True)
    starts = spec.pipeline.starts
    for rank, kinds in enumerate(spec.rank_kinds):
        is_stage = rank < spec.n_stages
        weights, caches = ranks.wasted_layers[rank], ranks.wasted_caches[rank]
        table.add_row(
            f"{rank}" if is_stage else f"{rank} (draft)",
            f"{starts[rank]}-{starts[rank + 1] - 1}" if is_stage else f"{len(kinds)}",
            _describe_kinds(kinds),
            *map(_size, (ranks.layers - weights, weights, ranks.caches - caches, caches)),
        )
    return table


def _describe_kinds(kinds: Sequence[LayerKind]) -> str:
    counts = Counter(
        kind.mixer if kind.mlp == "dense" else f"{kind.mixer} + experts" for kind in kinds
    )
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _size_table(title: str, rows: dict[str, int]) -> Table:
    table = Table("", title)
    table.columns[1].justify = "right"
    for name, size in rows.items():
        table.add_row(name, _size(size), end_section=name == list(rows)[-2])
    return table


def _numbers(values: Sequence[int]) -> str:
    return " ".join(map(str, values))


def _size(n_bytes: int) -> str:
    if n_bytes < 1 << 20:
        return f"{n_bytes / (1 << 10):.1f} KiB"
    if n_bytes < GIB:
        return f"{n_bytes / (1 << 20):.1f} MiB"
    return f"{n_bytes / GIB:.2f} GiB"


def _n_elements(tree: object) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
