"""Decoding with golden heads: ids, flags, cycles, and every row that the draft module was fed."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spd_jax
from spd_jax import requests
from spd_jax.models import target as model
from spd_jax.pipeline import cycle
from spd_jax.pipeline.comm import LocalComm
from tests.expected import expected_cycles
from tests.pipeline.conftest import MESHES
from tests.pipeline.stepping import start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NEAR = {"rtol": 0, "atol": 1e-4}
RUNS = [(2, "virtual"), (4, "virtual"), (4, "sharded"), (8, "virtual")]


@pytest.fixture(autouse=True)
def one_bucket(monkeypatch):
    """Pads every prompt to 64, so that one prefill program serves them all."""
    monkeypatch.setattr(requests, "padded_prompt_len", lambda longest: 64)


@pytest.fixture(scope="module")
def llama(golden):
    return golden / "llama"


@pytest.fixture(scope="module")
def target(llama):
    return spd_jax.load_target(llama / "target")


@pytest.fixture(scope="module")
def load(llama, target):
    """N -> the golden draft module; one object each, so that its engines are kept."""
    return {n: spd_jax.load_draft(llama / f"n{n}" / "head.safetensors", target) for n in (2, 4, 8)}


def read_cases(path) -> list[dict]:
    """The single-chain cases of a file of decoding runs that ended."""
    cases = json.loads(path.read_text())["cases"]
    return [c for c in cases if c["draft_top_k"] == 1 and "exception" not in c]


@pytest.mark.parametrize(("n", "mode"), RUNS)
def test_greedy_runs(n, mode, llama, target, load):
    """The text is also that of HF transformers, as `ar_greedy.json` has it."""
    prompts = json.loads((llama / "ar_greedy.json").read_text())["cases"]
    cases = [c for c in read_cases(llama / f"n{n}" / "decode_greedy.json") if c["use_deepest"]]
    assert len(cases) >= 4
    for case in cases:
        result = spd_jax.decode(
            target,
            load[n],
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


@pytest.mark.parametrize(("n", "mode"), RUNS)
def test_edge_cases(n, mode, llama, target, load):
    """Short limits and prompts, and an end id wherever it comes."""
    kinds = set()
    for case in read_cases(llama / f"n{n}" / "decode_edge.json"):
        if not case.get("verify", True):
            continue  # unverified drafts: not what decode gives
        stop_ids = [case["eos_token_id"]] if "eos_token_id" in case else ()
        result = spd_jax.decode(
            target,
            load[n],
            case["prompt"],
            max_new_tokens=case["max_new_tokens"],
            stop_ids=stop_ids,
            mesh=MESHES[mode],
        )
        assert result.stats.mode == mode
        assert result.tokens == case["expected_ar"]
        assert result.finish_reason == ("stop" if stop_ids else "length")
        assert result.cycles == expected_cycles(n, result.accepted)
        if case["use_deepest"]:
            assert result.accepted == [flag == 1 for flag in case["token_acceptance"]]
            assert result.cycles == case["decode_steps"]
        kinds.add(case["kind"])
    assert len(kinds) >= 7


@pytest.mark.parametrize("n", [2, 4, 8])
def test_every_row_the_draft_module_reads(n, llama, target, load, monkeypatch):
    """The reference's window holds N or more rows; ours the in-flight ones and one completed.

    Its older rows are of completed tokens: ours of an earlier cycle, or of the prompt.
    """
    want = np.load(llama / f"n{n}" / "pdm_trace_deepest.npz")
    prompt, n_new = want["prompt"].tolist(), len(want["generated_ids"])
    run = start(target, load[n], [prompt], n_new, "virtual")
    spec, weights = run.engine.spec, run.engine.weights

    fed = {}

    def spy(*args, **kwargs):
        fed["rows"], fed["positions"] = args[4:6]
        return run_draft(*args, **kwargs)

    run_draft = cycle.run_draft
    monkeypatch.setattr(cycle, "run_draft", spy)

    @jax.jit
    def draft(state, weights):
        layers, cache = weights.ranks[n], state.caches[n]
        sent, _ = cycle._draft(spec, LocalComm(n), weights.projs, layers, cache, state)
        return fed.pop("rows")[0], fed.pop("positions")[0], sent[0, 0, -1]

    hidden = model.hidden_states(target.config, target.params, jnp.asarray([prompt]))
    anchors = jnp.concatenate([hidden[b][0] for b in spec.draft.anchors], axis=-1)
    proj = weights.projs[-1]["weight"]
    completed = dict(enumerate(np.asarray(anchors @ proj.T)))  # position -> row

    ends = np.cumsum(want["q_len"])
    calls = [slice(end - n_rows, end) for end, n_rows in zip(ends, want["q_len"], strict=True)]
    for i, (x, row) in enumerate(zip(want["positions"][calls[0]], want["rows"], strict=False)):
        np.testing.assert_allclose(completed[x], row, **NEAR, err_msg=f"prefill row {i}")
    for call, out in zip(calls[1:], want["out"][1:], strict=True):
        rows, positions, ours = jax.tree.map(np.asarray, draft(run.state, weights))
        newest, fill = int(run.state.newest[0]), int(run.state.fill[0])
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
