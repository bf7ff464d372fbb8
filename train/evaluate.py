"""Held-out figures of a draft at every fill, beside the 2-gram lookup on the same positions.

Scored are the ids that the target wrote, but the first of each answer: decoding has that one
from the prefill and never drafts it. The draft sees what it would see while decoding (the exact
mask), whatever mask it is trained with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spd_jax.config import DraftConfig, LossConfig, PipelineConfig, TargetConfig
from spd_jax.models.distill import KL, compare_outputs, draft_outputs
from spd_jax.ops.lookup import hits_by_position
from spd_jax.results import ratio
from train.batches import ordered_batches
from train.data import Row
from train.parallel import (
    BY_ROW,
    BY_ROW_IN_EACH,
    WHOLE,
    Devices,
    gather,
    one_device,
    target_ends,
)
from train.simulate import Counts, answers, replay
from train.teacher import Teacher, teacher_outputs

REJECTION = LossConfig("tv", "miss")  # 1 minus the chance that a sampled draft is accepted
BY_FILL = ("kl", "loss", "agree_target", "agree_text", "acceptance")
MASKS = ("covered", "learnt")
EvalStep = Callable[[Any, Any, dict], dict[str, jax.Array]]
Figures = dict[str, dict[str, Any]]  # by group of rows


def make_eval_step(
    target: TargetConfig,
    draft: DraftConfig,
    loss: LossConfig = KL,
    temperature: float = 1.0,
    devices: Devices | None = None,
) -> EvalStep:
    """Returns the compiled (target_params, draft_params, batch) -> figures of each position.

    At each fill, [N, B, T-1], of the prediction made at t: kl, loss (the training's own, as the
    arguments say), acceptance, agree_target, agree_text; [B, T-1]: the masks covered, where there
    is a kl, and learnt, where there is a loss.

    Rows are over `devices`, None: one.
    """
    devices = devices or one_device()

    def score(target_params: Any, params: Any, batch: dict) -> dict[str, jax.Array]:
        taught = teacher_outputs(target, draft, batch)
        states, _, segments, _ = taught

        def at_fill(fill: jax.Array) -> dict[str, jax.Array]:
            out = draft_outputs(target, draft, params, states, segments, fill, "exact")
            asked = (KL, 1.0), (REJECTION, 1.0), (loss, float(temperature))
            scores = {
                (one, at): compare_outputs(
                    target, draft, target_params, params, *taught, out, loss=one, temperature=at
                )
                for one, at in dict.fromkeys(asked)
            }
            kl, rejection, trained = (scores[pair] for pair in asked)
            return {
                "kl": kl.loss,
                "loss": trained.loss,
                "acceptance": 1.0 - rejection.loss,
                "agree_target": kl.guess == kl.best,
                "agree_text": kl.guess == batch["input_ids"][:, 1:],
                "covered": kl.covered_mask,
                "learnt": trained.valid_mask,
            }

        figures = jax.lax.map(at_fill, jnp.arange(1, draft.n_stages + 1))
        masks = {name: figures[name][0] for name in MASKS}  # the same at any fill
        return figures | masks

    @jax.jit
    def eval_step(target_params: Any, params: Any, batch: dict) -> dict[str, jax.Array]:
        ends = target_ends(target_params)
        specs = devices.target_specs(ends)

        def work(ends: dict, params: Any, batch: dict) -> dict[str, jax.Array]:
            return gather(score(gather(ends, specs), params, batch), by_rows)

        by_rows = dict.fromkeys(BY_FILL, BY_ROW_IN_EACH) | dict.fromkeys(MASKS, BY_ROW)
        return devices.by_rows(work, (specs, WHOLE, BY_ROW), WHOLE)(ends, params, batch)

    return eval_step


def drafted(row: Row) -> np.ndarray:
    """Returns bool [T-1]: decoding drafts the id that follows position t."""
    return row.scored_mask[1:] & row.scored_mask[:-1]


def lookup_hits(row: Row) -> np.ndarray:
    """Returns one flag per drafted id: a 2-gram lookup names it."""
    return np.asarray(hits_by_position(row.ids.tolist()), bool)[1:][drafted(row)]


def count_row(row: Row, figures: dict[str, np.ndarray]) -> dict[str, Any]:
    """Sums a row's figures [N, T-1] and masks [T-1] over its drafted positions, and replays them.

    Returns sums [N] of `BY_FILL`, numbers of positions, and `Counts`.
    """
    scored, n_stages = drafted(row), len(figures["agree_text"])
    at = {name: x[..., : len(scored)][..., scored] for name, x in figures.items()}
    lookup = np.tile(lookup_hits(row), (n_stages, 1))
    replayed = {"decoded": at["agree_text"], "sampled": at["acceptance"], "looked_up": lookup}
    weights = {"kl": at["covered"], "loss": at["learnt"]}
    sums: dict[str, Any] = {
        name: np.sum(at[name] * weights.get(name, True), axis=1, dtype=np.float64)
        for name in BY_FILL
    }
    for name, hits in replayed.items():
        sums[name] = sum((replay(hits[:, part]) for part in answers(scored)), Counts())
    return sums | {
        "n_scored": int(scored.sum()),
        "n_covered": int(at["covered"].sum()),
        "n_learnt": int(at["learnt"].sum()),
    }


def at_stages(draft: DraftConfig, n_stages: int, n_layers: int) -> DraftConfig:
    """Returns a head as it decodes at a number of stages: its depth map is recomputed.

    Raises:
      ConfigError: a target of `n_layers` cannot be cut into as many.
    """
    if n_stages == draft.n_stages:
        return draft
    PipelineConfig(n_layers, n_stages)  # for its error
    return dataclasses.replace(draft, n_stages=n_stages, stage_layers=None)


def evaluate(
    eval_steps: Sequence[EvalStep],
    teacher: Teacher,
    target_params: Any,
    params: Any,
    rows: Sequence[Row],
    sequence_len: int,
    batch_tokens: int,
) -> list[Figures]:
    """Scores held-out rows, all together ("all") and by the temperature they were written at.

    The target runs once, whatever the number of steps: one head at several numbers of stages, say.

    Returns:
      Of each step, for each group, by fill 1..N (`*_by_fill`) and as means over fills: kl
      (forward, at temperature 1, among the draft ids), loss (the step's own), agree_target,
      agree_text. Once, since no fill changes them: n_scored, coverage, lookup. From `replay`:
      alpha and tau, where a hit is the text's own token; lookup_alpha and lookup_tau; and
      acceptance and acceptance_tau, those expected of sampling at temperature 1, with
      acceptance_by_fill.

      On greedy text, alpha and tau are those of decoding (up to rounding, for heads whose training
      equals decoding: of one row type per depth, or of one layer). On sampled text they are those
      of a draft that proposes its best guess; acceptance is meant for text sampled at 1.
    """
    totals: list[dict[str, dict[str, Any]]] = [{} for _ in eval_steps]
    for members, batch in ordered_batches(rows, sequence_len, batch_tokens):
        taught = teacher(batch)
        for eval_step, groups in zip(eval_steps, totals, strict=True):
            scores = jax.device_get(eval_step(target_params, params, taught))
            for b, row in enumerate(members):
                sums = count_row(row, {name: x[..., b, :] for name, x in scores.items()})
                for group in ("all", f"T={row.temperature:g}"):
                    _add(groups.setdefault(group, {}), sums)
    return [{group: _rates(total) for group, total in groups.items()} for groups in totals]


def _add(total: dict[str, Any], sums: dict[str, Any]) -> None:
    for name, value in sums.items():
        total[name] = total[name] + value if name in total else value


def _rates(total: dict[str, Any]) -> dict[str, Any]:
    n, n_stages = total["n_scored"], len(total["kl"])
    counted = {"kl": total["n_covered"], "loss": total["n_learnt"]}
    by_fill = {
        name: total[name] / counted.get(name, n) if counted.get(name, n) else None
        for name in BY_FILL
    }
    decoded, sampled, looked_up = (total[k] for k in ("decoded", "sampled", "looked_up"))
    return {
        "n_scored": total["n_scored"],
        **{
            name: None if x is None else float(x.mean())
            for name, x in by_fill.items()
            if name != "acceptance"
        },
        "coverage": ratio(total["n_covered"], n),
        "lookup": ratio(looked_up.accepted, n),
        "alpha": decoded.alpha,
        "tau": decoded.tau(n_stages),
        "lookup_alpha": looked_up.alpha,
        "lookup_tau": looked_up.tau(n_stages),
        "acceptance": sampled.alpha,
        "acceptance_tau": sampled.tau(n_stages),
        **{f"{name}_by_fill": None if x is None else x.tolist() for name, x in by_fill.items()},
    }


def describe_figures(figures: Figures) -> str:
    """Returns the figures of `evaluate`, and of a decode where there is one, a line per group."""
    return "\n  ".join(f"{group}: {_describe(rates)}" for group, rates in figures.items())


def _describe(r: dict[str, Any]) -> str:
    line = (
        f"loss {_shown(r['loss'])}, KL {_shown(r['kl'])}, agrees with target "
        f"{_shown(r['agree_target'])}, with text {_shown(r['agree_text'])}; alpha "
        f"{_shown(r['alpha'])}, tau {_shown(r['tau'])} (lookup {_shown(r['lookup_alpha'])}, "
        f"{_shown(r['lookup_tau'])}); acceptance at temperature 1 "
        f"{_shown(r['acceptance'])}"
    )
    if "decode" in r:
        d = r["decode"]
        line += (
            f"; decoded {d['tokens']} tokens: alpha {_shown(d['alpha'])}, tau {_shown(d['tau'])}, "
            f"the text of generate in {d['identical']} of {d['rows']}, {d['seconds']:.1f} s, peak "
            f"memory +{d['peak_bytes_added'] / 2**20:.0f} MiB"
        )
    return line


def _shown(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.3f}"
