"""Decoding with golden heads: ids, flags, cycles, and every row that the draft module was fed."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spd_jax
from spd_jax import requests
from spd_jax.models import target as model
from spd_jax.models.aggregate import make_row
from spd_jax.ops.attention import causal_mask
from spd_jax.pipeline import cycle
from spd_jax.pipeline.comm import LocalComm
from spd_jax.pipeline.state import PipelineState
from tests.expected import expected_cycles
from tests.pipeline.conftest import MESHES
from tests.pipeline.stepping import Stepper, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NEAR = {"rtol": 0, "atol": 1e-4}
RUNS = [
    ("llama/n2", "virtual"),
    ("llama/n4", "virtual"),
    ("llama/n4", "sharded"),
    ("llama/n8", "virtual"),
    ("qwen3/n2", "virtual"),
    ("qwen3/n4", "sharded"),
    ("qwen3/n8", "virtual"),
    ("qwen3/n4_draft_vocab192", "virtual"),
    ("qwen3_5/n2", "sharded"),
    ("qwen3_5/n4", "virtual"),
    ("qwen3_5/n4", "sharded"),
    ("qwen3_5/n8", "sharded"),
]
EDGES = [run for run in RUNS if run[0] != "qwen3/n4_draft_vocab192"]  # it has none
TRACES = list(dict.fromkeys(head for head, _ in RUNS))
LAST_LAYER = "qwen3/n4_default_bound"  # a head whose deepest anchor is L


@pytest.fixture(autouse=True)
def one_bucket(monkeypatch):
    """Pads every prompt to 64, so that one prefill program serves them all."""
    monkeypatch.setattr(requests, "padded_prompt_len", lambda longest: 64)


@pytest.fixture(scope="module")
def load(golden, golden_pair):
    """Head -> its folder, the golden target and draft module."""
    return lambda head: (golden / head, *golden_pair(head))


def read_cases(path) -> list[dict]:
    """The single-chain cases of a file of decoding runs that ended."""
    cases = json.loads(path.read_text())["cases"]
    return [c for c in cases if c["draft_top_k"] == 1 and "exception" not in c]


@pytest.mark.parametrize(("head", "mode"), RUNS)
def test_greedy_runs(head, mode, load):
    """The text is also that of HF transformers, as `ar_greedy.json` has it."""
    folder, target, draft = load(head)
    prompts = json.loads((folder.parent / "ar_greedy.json").read_text())["cases"]
    cases = [c for c in read_cases(folder / "decode_greedy.json") if c["use_deepest"]]
    assert len(cases) >= 4
    for case in cases:
        result = spd_jax.decode(
            target,
            draft,
            prompts[case["prompt_idx"]]["prompt"],
            max_new_tokens=len(case["generated_ids"]),
            stop_ids=(),
            mesh=MESHES[mode],
        )
        assert result.stats.mode == mode
        assert result.tokens == case["generated_ids"]
        assert result.tokens == prompts[case["prompt_idx"]]["generated_ids"]
        assert result.accepted == [flag == 1 for flag in case["token_acceptance"]]
        assert result.cycles == case["decode_steps"]


@pytest.mark.parametrize(("head", "mode"), EDGES)
def test_edge_cases(head, mode, load):
    """Short limits and prompts, and an end id wherever it comes."""
    folder, target, draft = load(head)
    kinds = set()
    for case in read_cases(folder / "decode_edge.json"):
        if not case.get("verify", True):
            continue  # unverified drafts: not what decode gives
        stop_ids = [case["eos_token_id"]] if "eos_token_id" in case else ()
        result = spd_jax.decode(
            target,
            draft,
            case["prompt"],
            max_new_tokens=case["max_new_tokens"],
            stop_ids=stop_ids,
            mesh=MESHES[mode],
        )
        assert result.stats.mode == mode
        assert result.tokens == case["expected_ar"]
        assert result.finish_reason == ("stop" if stop_ids else "length")
        assert result.cycles == expected_cycles(draft.config.n_stages, result.accepted)
        if case["use_deepest"]:
            assert result.accepted == [flag == 1 for flag in case["token_acceptance"]]
            assert result.cycles == case["decode_steps"]
        kinds.add(case["kind"])
    assert len(kinds) >= 7


def start_trace(load, head: str) -> tuple[Stepper, list[jax.Array], dict]:
    """A run of the recorded prompt after its prefill, the prompt's hidden states, the record."""
    folder, target, draft_module = load(head)
    want = np.load(folder / "pdm_trace_deepest.npz")
    prompt, n_new = want["prompt"].tolist(), len(want["generated_ids"])
    run = start(target, draft_module, [prompt], n_new, "virtual")
    hidden = model.hidden_states(target.config, target.params, jnp.asarray([prompt]))
    return run, hidden, want


def prompt_rows(run: Stepper, hidden: list[jax.Array]) -> jax.Array:
    """Returns the completed rows [1, T, D] of a prompt with these hidden states."""
    features = jnp.stack([hidden[b] for b in run.engine.spec.draft.anchors], axis=2)
    return make_row(run.engine.weights.projs, features, features.shape[2] - 1)


def follow_trace(run: Stepper, hidden: list[jax.Array], want: dict, monkeypatch) -> None:
    """Compares each call's rows and output, and what is decoded, with the record.

    The reference's window holds N or more rows; ours the in-flight ones and one completed.
    Its older rows are of completed tokens: ours of an earlier cycle, or of the prompt.
    """
    spec, weights = run.engine.spec, run.engine.weights
    n, fed = spec.n_stages, {}

    def spy(*args, **kwargs):
        fed["rows"] = args[4]
        return run_draft(*args, **kwargs)

    run_draft = cycle.run_draft
    monkeypatch.setattr(cycle, "run_draft", spy)

    @jax.jit
    def draft(state, weights):
        parameters, cache = weights.ranks[n], state.caches[n]
        sent, _ = cycle._draft(
            spec,
            LocalComm(n),
            weights.projs,
            parameters,
            cache,
            state,
            cycle.draft_rotation(spec, state),
        )
        return fed.pop("rows")[0], sent[0, 0, -1]

    completed = dict(enumerate(np.asarray(prompt_rows(run, hidden)[0])))  # position -> row
    ends = np.cumsum(want["q_len"])
    calls = [slice(end - n_rows, end) for end, n_rows in zip(ends, want["q_len"], strict=True)]
    for i, (x, row) in enumerate(zip(want["positions"][calls[0]], want["rows"], strict=False)):
        np.testing.assert_allclose(completed[x], row, **NEAR, err_msg=f"prefill row {i}")
    for call, out in zip(calls[1:], want["out"][1:], strict=True):
        rows, ours = jax.tree.map(np.asarray, draft(run.state, weights))
        newest, fill = int(run.state.newest[0]), int(run.state.fill[0])
        positions = newest - np.arange(n, -1, -1)
        in_flight = dict(zip(positions[n - fill :], rows[n - fill :], strict=True))
        completed[newest - fill] = in_flight[newest - fill]
        assert want["positions"][call][-1] == newest
        for x, row in zip(want["positions"][call], want["rows"][call], strict=True):
            np.testing.assert_allclose({**completed, **in_flight}[x], row, **NEAR)
        np.testing.assert_allclose(ours, out, **NEAR)
        run.run()
    assert run.is_done
    tokens, accepted, cycles = run.committed()
    assert tokens == want["generated_ids"].tolist()
    assert accepted == want["token_acceptance"].tolist()
    assert cycles == want["decode_steps"] == len(calls) - 1


@pytest.mark.parametrize("head", TRACES)
def test_every_row_the_draft_module_reads(head, load, monkeypatch):
    run, hidden, want = start_trace(load, head)
    follow_trace(run, hidden, want, monkeypatch)


def reread_prompt(run: Stepper, hidden: list[jax.Array]) -> PipelineState:
    """The state after a prefill in which the draft module read these hidden states."""
    spec, state, rows = run.engine.spec, run.state, prompt_rows(run, hidden)
    n, n_tokens = spec.n_stages, rows.shape[1]
    positions, layers = jnp.arange(n_tokens)[None], run.engine.weights.ranks[n]
    turn = model.rotation(spec.draft_layer, positions)
    _, made = model.run_layers(spec.draft_layer, layers, rows, turn, causal_mask(n_tokens))
    cache = [
        {
            "k": old["k"].at[..., :n_tokens].set(new["k"]),
            "v": old["v"].at[:, :, :n_tokens].set(new["v"]),
        }
        for old, new in zip(state.caches[n]["attention"], made, strict=True)
    ]
    last = jnp.stack([hidden[b][:, -1] for b in spec.draft.anchors], axis=1)  # [1, M, D]
    ring = state.ring.at[:, (n_tokens - 1) % (n + 1)].set(last)
    return dataclasses.replace(state, caches=[*state.caches[:n], {"attention": cache}], ring=ring)


def test_an_anchor_at_the_last_layer_is_recorded_after_the_norm_on_the_prompt(load, monkeypatch):
    """Here, and in training, it is before the norm; nothing else differs from the record."""
    run, hidden, want = start_trace(load, LAST_LAYER)
    target = load(LAST_LAYER)[1]
    assert run.engine.spec.draft.anchors[-1] == target.config.n_layers
    recorded = want["rows"][: want["q_len"][0]]  # of the prefill
    ours = prompt_rows(run, hidden)[0, : len(recorded)]
    assert (np.abs(ours - recorded).max(axis=1) > 0.1).all()

    normed = [*hidden[:-1], model.normed(target.config, target.params, hidden[-1])]
    run.state = reread_prompt(run, normed)
    follow_trace(run, normed, want, monkeypatch)


def test_reading_the_same_prompt_again_changes_nothing(load, monkeypatch):
    run, hidden, want = start_trace(load, "qwen3/n4")
    run.state = reread_prompt(run, hidden)
    follow_trace(run, hidden, want, monkeypatch)


def test_an_anchor_at_the_last_layer_leaves_the_text_alone(load):
    folder, target, draft = load(LAST_LAYER)
    prompts = json.loads((folder.parent / "ar_greedy.json").read_text())["cases"]
    cases = [c for c in read_cases(folder / "decode_greedy.json") if c["use_deepest"]]
    assert len(cases) >= 4
    for case in cases:
        prompt, n_new = prompts[case["prompt_idx"]], len(case["generated_ids"])
        options = {"max_new_tokens": n_new, "stop_ids": (), "mesh": "virtual"}
        result = spd_jax.decode(target, draft, prompt["prompt"], **options)
        assert result.tokens == case["generated_ids"] == prompt["generated_ids"]
        assert result.cycles == expected_cycles(draft.config.n_stages, result.accepted)
