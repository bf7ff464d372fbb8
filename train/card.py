"""The model card of a head: YAML front matter as on the Hugging Face hub, then what its user has to
know.

settings + data + held-out figures -> the text of README.md
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from spd_jax.config import DraftConfig, PipelineConfig, TargetConfig
from spd_jax.models.draft import mlp_width
from train.config import TrainConfig
from train.data import Corpus

# Of targets with a short name: 4-bit files, so that the weights there are not quite the target's.
HUB_IDS = {"smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct"}
TAGS = ["speculative-decoding", "speculative-pipeline-decoding", "draft-model", "jax"]
# Held-out figures and their headings, in order; a figure that no group has gets no column.
COLUMNS = {
    "n_scored": "positions",
    "agree_text": "agreement with the text",
    "agree_target": "with the target's choice",
    "lookup": "2-gram lookup",
    "alpha": "alpha",
    "tau": "tau",
    "lookup_tau": "tau of lookup",
    "acceptance": "acceptance",
    "coverage": "coverage",
    "kl": "KL (nats)",
    "loss": "training loss",  # of the kind that the card names; not all of them are in nats
}
BY_FILL = {
    "agree_text_by_fill": "agreement with the text",
    "agree_target_by_fill": "with the target's choice",
    "acceptance_by_fill": "acceptance",
    "kl_by_fill": "KL (nats)",
}
LOSSES = {
    "kl": "KL(target || draft)",
    "reverse_kl": "KL(draft || target)",
    "js": "Jensen-Shannon divergence",
    "tv": "total variation",
    "ce": "cross-entropy on the target's choice",
    "hybrid": "KL(target || draft) and total variation",
}
BY_STAGES = {"alpha_by_stages": "alpha", "tau_by_stages": "tau"}


@dataclasses.dataclass(frozen=True)
class Origin:
    """What a card tells beside the settings; what is None is left out."""

    target: TargetConfig | None = None
    training: Corpus | None = None
    heldout: Corpus | None = None
    command: str | None = None  # that started the run


def model_card(
    position: int,
    config: TrainConfig,
    draft: DraftConfig,
    judged: tuple[int, dict[str, Any]] | None,
    origin: Origin | None = None,
) -> str:
    """Returns the card of a head (Markdown with YAML front matter).

    Args:
      position: updates made.
      judged: the last held-out figures by group, and after how many updates they were taken.
    """
    origin = origin or Origin()
    lines = [
        *_front_matter(config),
        f"# Pipeline draft module for {_shown_target(config)}",
        "",
        "A draft head for Speculative Pipeline Decoding with spd_jax: it guesses tokens while they "
        "pass through the target's pipeline stages. The target verifies every guess, so the text "
        "is the target's own whatever the head is worth; the head decides how fast it comes.",
        "",
        "## Target and architecture",
        "",
        *(f"- {line}" for line in _architecture(draft, origin.target)),
        *_other_weights(config),
        "",
        "## Training",
        "",
        *(f"- {line}" for line in _training(position, config)),
        "",
        *_data(config, origin),
        *_settings(config, origin.command),
        *_figures(position, config, judged),
        *_use(config),
    ]
    return "\n".join(lines) + "\n"


def hub_id(target: str) -> str | None:
    """Returns the Hugging Face id of a target by its name; None for a local one."""
    if target in HUB_IDS:
        return HUB_IDS[target]
    parts = target.split("/")
    is_id = len(parts) == 2 and all(parts) and parts[0] not in (".", "..", "~")
    return target if is_id and not Path(target).exists() else None


def _front_matter(config: TrainConfig) -> list[str]:
    from huggingface_hub import ModelCardData

    fields = ModelCardData(
        library_name="spd_jax",
        license=config.license,
        base_model=hub_id(config.target),
        tags=TAGS,
    )
    return ["---", fields.to_yaml().rstrip(), "---", ""]


def _shown_target(config: TrainConfig) -> str:
    """The target's name; of a local one the last part of its path."""
    target = config.target
    return target if hub_id(target) else Path(target).name or target


def _architecture(draft: DraftConfig, target: TargetConfig | None) -> list[str]:
    n_ids = "all" if draft.draft_ids is None else f"{len(draft.draft_ids):,}"
    split, width = draft.stage_layers, draft.d_ff
    lines = [f"target: weights with sha256 `{draft.target_sha256}`"]
    if target is not None:
        lines[0] += (
            f"; {target.model_type}, {target.n_layers} layers, width {target.d_model}, "
            f"{target.vocab_size:,} ids"
        )
        split = PipelineConfig(target.n_layers, draft.n_stages, split).stage_layers
        width = mlp_width(target.d_ff, width)
    stages = f"trained for {draft.n_stages} stages"
    stages += f" of {', '.join(map(str, split))} layers" if split else ""
    layers = f"{draft.n_layers} layer{'s' if draft.n_layers > 1 else ''}"
    return [
        *lines,
        f"{stages}, anchors {list(draft.anchors)}, {layers}, {n_ids} draft ids",
        f"MLP width {width or 'of the target'}, feature_norm {draft.feature_norm}, qk_norm "
        f"{str(draft.qk_norm).lower()}, head {draft.head}; stored in bfloat16",
    ]


def _other_weights(config: TrainConfig) -> list[str]:
    if config.target not in HUB_IDS:
        return []
    return [
        f"- the target is a 4-bit file of {HUB_IDS[config.target]}, which is named as base_model: "
        "the weights there differ a little, and where an exported head runs on them it may accept "
        "less than the figures say"
    ]


def _training(position: int, config: TrainConfig) -> list[str]:
    parts = "a batch" if config.accumulate == 1 else f"{config.accumulate} batches"
    loss = LOSSES[config.loss]
    if config.loss == "hybrid":
        loss += f" ({config.tv_weight:g} of the latter)"
    if config.temperature != 1:
        loss += f", at temperature {config.temperature:g}"
    if config.outside == "miss":
        loss += ", the target's mass on other ids counted as lost"
    lines = [
        f"{position} updates, each from {parts} of up to {config.batch_tokens} tokens",
        f"distilled from the target over the draft ids; loss: {loss}",
        f"rows of up to {config.sequence_len} tokens; the chat template's enable_thinking: "
        + ("its own default" if config.thinking is None else str(config.thinking).lower()),
    ]
    if config.start_from is not None:
        lines.append("begun from the weights of an earlier head, not from the target's layers")
    return lines


def _data(config: TrainConfig, origin: Origin) -> list[str]:
    used = [
        ("trained on", config.train_data, origin.training),
        ("held out", config.heldout_data, origin.heldout),
    ]
    rows = []
    for use, places, corpus in used:
        if corpus is not None:
            n_tokens = sum(len(row.ids) for row in corpus.rows)
            n_scored = sum(int(row.scored_mask.sum()) for row in corpus.rows)
            counts = (f"{n:,}" for n in (len(corpus.rows), n_tokens, n_scored))
            paths = ", ".join(map(_code, places or ()))
            rows.append([use, paths, *counts, _temperatures(corpus), _code(corpus.sha256)])
    if not rows:
        return []
    heads = ["data", "file", "rows", "tokens", "scored", "temperature: rows", "sha256"]
    return [
        *_table(heads, rows),
        "",
        "Scored are the ids that the target wrote itself, at these temperatures; the sha256 is "
        "that of all ids and of which are scored.",
        "",
    ]


def _temperatures(corpus: Corpus) -> str:
    counts = sorted(Counter(row.temperature for row in corpus.rows).items())
    return ", ".join(f"{temperature:g}: {n:,}" for temperature, n in counts)


def _settings(config: TrainConfig, command: str | None) -> list[str]:
    default, rows = TrainConfig(), []
    for field in dataclasses.fields(TrainConfig):
        value = getattr(config, field.name)
        if value != getattr(default, field.name):
            rows.append([f"`{field.name}`", _code(value)])
    lines = []
    if command is not None:
        lines += ["```", command, "```", ""]
    if rows:
        lines += ["Settings that differ from the trainer's defaults:", ""]
        lines += [*_table(["field", "value"], rows), ""]
    return lines


def _figures(
    position: int, config: TrainConfig, judged: tuple[int, dict[str, Any]] | None
) -> list[str]:
    judged_at, groups = judged or (position, {})
    if not groups:
        return []
    when = "" if judged_at == position else f" at update {judged_at}"
    names = [name for name in COLUMNS if any(name in rates for rates in groups.values())]
    rows = [[group, *(_rate(rates.get(name)) for name in names)] for group, rates in groups.items()]
    lines = [
        "## Figures",
        "",
        f"On held-out text{when}, {config.eval_rows} rows at most, by the temperature it was "
        "written at. Agreement, KL and training loss are means over fills 1..N (tokens in flight); "
        "alpha and tau are those of decoding replayed along the text, where the head proposes its "
        "best guess; acceptance is the alpha expected of sampling at temperature 1. 2-gram lookup "
        "is the baseline, on the same positions.",
        "",
        *_table(["text", *(COLUMNS[name] for name in names)], rows),
        "",
    ]
    rates = groups.get("all", {})
    return lines + _by_fill(rates) + _by_stages(rates) + _decoded(rates.get("decode"))


def _by_fill(rates: dict[str, Any]) -> list[str]:
    by_fill = {name: rates[name] for name in BY_FILL if isinstance(rates.get(name), list)}
    if not by_fill:
        return []
    fills = range(1, max(map(len, by_fill.values())) + 1)
    rows = [[BY_FILL[name], *map(_rate, values)] for name, values in by_fill.items()]
    return [*_table(["by tokens in flight", *map(str, fills)], rows), ""]


def _by_stages(rates: dict[str, Any]) -> list[str]:
    by_stages = {name: rates[name] for name in BY_STAGES if isinstance(rates.get(name), dict)}
    if not by_stages:
        return []
    counts = sorted({n for values in by_stages.values() for n in values}, key=int)
    rows = [
        [BY_STAGES[name], *(_rate(values.get(n)) for n in counts)]
        for name, values in by_stages.items()
    ]
    return [*_table(["at other numbers of stages", *counts], rows), ""]


def _decoded(decode: dict[str, Any] | None) -> list[str]:
    if not decode:
        return []
    return [
        f"Decoding {decode['rows']} held-out prompts greedily took {decode['cycles']:,} cycles for "
        f"{decode['tokens']:,} tokens: alpha {_rate(decode['alpha'])}, tau {_rate(decode['tau'])}; "
        f"the text was identical to plain decoding in {decode['identical']} of {decode['rows']}.",
        "",
    ]


def _rate(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3f}" if isinstance(value, float) else "-"


def _use(config: TrainConfig) -> list[str]:
    name = config.target if hub_id(config.target) else f"path/to/{_shown_target(config)}"
    name = "tiny" if config.target == "tiny" else name
    return [
        "## Use",
        "",
        "From a clone of spd_jax, with this directory as `path/to/head`:",
        "",
        "```",
        f"python -m infer.decode --target {shlex.quote(name)} --draft path/to/head",
        "```",
        "",
        "```python",
        "import spd_jax",
        "",
        f"target = spd_jax.load_target({json.dumps(name)})",
        'draft = spd_jax.load_draft("path/to/head", target)',
        'result = spd_jax.decode(target, draft, "Why is the sky blue?", max_new_tokens=128)',
        "print(result.text, result.stats.alpha, result.stats.tau)",
        "```",
        "",
        "## Limits",
        "",
        "- The head fits this target's weights only; other weights are refused.",
        "- It is no language model of its own: it reads the target's hidden states.",
        "- It decodes at any number of stages, best at the one it was trained for.",
        "- The figures are of text like its training data; on other text it may guess worse.",
    ]


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """The lines of a Markdown table."""
    heads = list(heads)
    cells = [heads, ["---"] * len(heads), *rows]
    return ["| " + " | ".join(str(c).replace("|", "\\|") for c in row) + " |" for row in cells]


def _code(value: Any) -> str:
    return f"`{value}`"
