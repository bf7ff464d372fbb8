"""Every shape of pipeline and draft module: what is drafted is what the definition says.

The oracle runs the whole text through the target, makes each row of the draft module from the
hidden states its token has passed by then, and runs the module over all rows at once.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spd_jax
from spd_jax.config import DraftConfig, PipelineConfig
from spd_jax.models import draft as pdm
from spd_jax.models import target as model
from spd_jax.ops.attention import causal_mask
from spd_jax.ops.norms import rms_norm
from tests.expected import GAP, expected_cycles
from tests.pipeline.conftest import MESHES
from tests.pipeline.stepping import start
from tests.random_models import HYBRID, make_draft, make_prompt, make_target

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

N_ROWS = 64  # texts of the oracle are padded to it


@dataclasses.dataclass(frozen=True)
class Shape:
    """A target cut into stages, and a draft module."""

    n_layers: int
    stage_layers: tuple[int, ...]
    draft: DraftConfig

    @property
    def pipeline(self) -> PipelineConfig:
        return PipelineConfig(self.n_layers, len(self.stage_layers), self.stage_layers)


SHAPES = {
    "anchors inside stages": Shape(
        4, (1, 2, 1), DraftConfig((0, 1, 2, 4), 3, n_layers=1, qk_norm=True)
    ),
    "the target's head": Shape(
        4, (1, 3), DraftConfig((0, 2, 3), 2, n_layers=2, head="target", feature_norm="none")
    ),
    "draft ids": Shape(
        8,
        (3, 1, 2, 2),
        DraftConfig((0, 1, 4), 4, n_layers=2, d_ff=80, draft_ids=tuple(range(2, 97, 3))),
    ),
    "the target's rows of draft ids, one row type": Shape(
        8,
        (1, 1, 1, 4, 1),
        DraftConfig((0,), 5, n_layers=1, head="target", draft_ids=(1, 6, 12, 36, 61, 84)),
    ),
}


@functools.partial(jax.jit, static_argnums=(0, 1))
def draft_logits(shape, config, target_params, params, ids, newest, fill):
    """Logits [W] of what the module proposes after position `newest` of ids [T]."""
    n, anchors = len(shape.stage_layers), shape.draft.anchors
    hidden = model.hidden_states(config, target_params, ids[None])
    features = [hidden[b][0] for b in anchors]  # M of [T, D]
    if shape.draft.feature_norm == "rms":
        features = [rms_norm(x, None, config.norm_eps) for x in features]
    layers_done = np.cumsum([0, *shape.stage_layers])
    rows = jnp.zeros_like(features[0])
    age = newest - jnp.arange(len(ids))
    for depth in range(n + 1):
        passed = [x for b, x in zip(anchors, features, strict=True) if b <= layers_done[depth]]
        weight = params["projs"][len(passed) - 1]["weight"]
        row = jnp.concatenate(passed, axis=-1) @ weight.T
        here = (age == depth) & (age < fill) if depth < n else age >= fill
        rows = jnp.where(here[:, None], row, rows)
    layers = pdm.layer_config(config, shape.draft)
    turn = model.rotation(layers, jnp.arange(len(ids))[None])
    outs, _ = model.run_layers(layers, params["layers"], rows[None], turn, causal_mask(len(ids)))
    return pdm.logits(config, shape.draft, params, target_params, outs[-1][0, newest])


@pytest.mark.parametrize("name", SHAPES)
def test_drafts_are_what_the_definition_says(name, mode):
    shape = SHAPES[name]
    n = len(shape.stage_layers)
    target = make_target(shape.n_layers, seed=n)
    draft = make_draft(target, shape.draft, "random", seed=1)
    ids_of = np.asarray(shape.draft.draft_ids or range(target.config.vocab_size))
    prompt = make_prompt(2 * n + 1)
    run = start(target, draft, [prompt], 40, MESHES[mode], stage_layers=shape.stage_layers)
    proposed, fills = [], []
    for _ in range(30):
        newest, fill = int(run.state.newest[0]), int(run.state.fill[0])
        new = run.state.tokens[0, : newest + 1 - len(prompt)].tolist()
        text = np.asarray(prompt + new + [0] * (N_ROWS - newest - 1))
        params = (target.params, draft.params, text, newest, fill)
        logits = np.asarray(draft_logits(shape, target.config, *params))
        best = int(np.argmax(logits))
        n_rejects = run.committed()[1].count(False)
        run.run()
        if run.committed()[1].count(False) > n_rejects:
            continue  # the draft of this cycle was dropped with all that was in flight
        got = int(run.state.tokens[0, newest + 1 - len(prompt)])
        at = np.searchsorted(ids_of, got)
        assert got == ids_of[best] or logits[best] - logits[at] < GAP
        proposed.append(got)
        fills.append(fill)
    assert set(fills) >= set(range(1, n))
    assert len(set(proposed)) > 2


@pytest.mark.parametrize("split", [(3, 1, 2, 2), (1, 1, 1, 4, 1), (1,) * 8], ids=str)
def test_stages_of_unlike_layers_write_the_targets_text(split, mode, golden_pair, comparison):
    """Hybrid: some stages have no attention, some nothing else, some both."""
    target, draft = golden_pair("qwen3_5/n8")
    prompts = [make_prompt(length) for length in (1, 64, 65, 140)]  # chunks of prefill are of 64
    options = dict(max_new_tokens=40, stop_ids=())
    texts = spd_jax.generate(target, prompts, **options)
    mesh = MESHES[mode]
    results = spd_jax.decode(target, draft, prompts, stage_layers=split, mesh=mesh, **options)
    for prompt, result, want in zip(prompts, results, texts, strict=True):
        assert result.stats.mode == mode
        comparison.check(target, prompt, result.tokens, want.tokens)
        assert result.cycles == expected_cycles(len(split), result.accepted)


def test_experts_write_the_targets_text(mode, comparison):
    """Delta-nets, gated attention and mixtures of experts, split unevenly."""
    target = make_target(8, seed=1, base=HYBRID)
    draft = make_draft(target, DraftConfig((0, 5, 8), 2, n_layers=1, d_ff=48), "random")
    prompts = [make_prompt(length) for length in (1, 70)]
    options = dict(max_new_tokens=20, stop_ids=())
    texts = spd_jax.generate(target, prompts, **options)
    mesh = MESHES[mode]
    results = spd_jax.decode(target, draft, prompts, stage_layers=(5, 3), mesh=mesh, **options)
    for prompt, result, want in zip(prompts, results, texts, strict=True):
        assert result.stats.mode == mode
        comparison.check(target, prompt, result.tokens, want.tokens)
        assert result.cycles == expected_cycles(2, result.accepted)


@pytest.mark.parametrize("name", SHAPES)
def test_both_modes_decode_every_shape_alike(name, comparison):
    shape = SHAPES[name]
    n = len(shape.stage_layers)
    target = make_target(shape.n_layers, seed=n)
    for seed, length in enumerate((1, n, 2 * n + 1), start=1):
        draft, prompt = make_draft(target, shape.draft, "random", seed), make_prompt(length)
        options = dict(max_new_tokens=40, stop_ids=())
        want = spd_jax.generate(target, prompt, **options).tokens
        runs = {
            mode: spd_jax.decode(
                target, draft, prompt, stage_layers=shape.stage_layers, mesh=mesh, **options
            )
            for mode, mesh in MESHES.items()
        }
        assert [result.stats.mode for result in runs.values()] == list(runs)
        equal = [comparison.check(target, prompt, r.tokens, want) for r in runs.values()]
        if all(equal):
            virtual, sharded = runs.values()
            assert virtual.accepted == sharded.accepted
            assert virtual.cycles == sharded.cycles == expected_cycles(n, virtual.accepted)
