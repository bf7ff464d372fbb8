"""The public functions that decode and score; loading is in `loading`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from spd_jax.autoregressive import Autoregression
from spd_jax.checks import ConfigError, as_ints
from spd_jax.config import LossConfig, SamplingConfig
from spd_jax.engines import (
    build_engine,
    check_belongs,
    check_not_traced,
    resolve_pipeline,
    whole_params,
)
from spd_jax.models import distill
from spd_jax.models import draft as pdm
from spd_jax.models import target as model
from spd_jax.models.bundle import Draft, Target
from spd_jax.models.cache import read_len
from spd_jax.ops.sampling import argmax_lowest
from spd_jax.pipeline.loop import OnTokens, Stopwatch, decode_batch
from spd_jax.program import is_traced
from spd_jax.requests import (
    Prompt,
    Request,
    check_batch,
    check_ids,
    is_int,
    make_inputs,
    make_request,
)
from spd_jax.results import DecodeResult, make_stats

GREEDY = SamplingConfig()
AR_CHUNK_STEPS = 128  # steps per compiled call of `generate`


def decode(
    target: Target,
    draft: Draft,
    prompt: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int = 128,
    sampling: SamplingConfig = GREEDY,
    stop_ids: Sequence[int] | None = None,
    seed: int | Sequence[int] = 0,
    n_stages: int | None = None,
    stage_layers: Sequence[int] | None = None,
    mesh: Mesh | str | None = None,
    placement: str = "auto",
    chunk_cycles: int = 32,
    on_tokens: OnTokens | None = None,
) -> DecodeResult | list[DecodeResult]:
    """Decodes with the target in a pipeline and the draft module beside it; exact.

    The draft decides only how many cycles a text takes. Greedy tokens, and with the verifier
    "coupled" sampled ones too, are those of `generate`; with "rejection" they have the same
    distribution, and another draw for another draft.

    Args:
      prompt: token ids, a string (chat template), or a list of either (a batch).
      max_new_tokens: at least 1; prompt and new tokens must fit the model's context.
      sampling: how tokens are chosen and drafts are verified; greedy by default.
      stop_ids: ids that end a text; None: the target's; (): never.
      seed: of random draws, one or one per prompt; greedy decoding makes none.
      n_stages: N, from 2 to the target's layers; None: what the draft was trained for.
      stage_layers: layers of each stage; None: as even as possible.
      mesh: None, "virtual" (all ranks on one device) or a 1-D Mesh of N + 1 devices.
      placement: "auto" (sharded where there are N + 1 devices), "dedicated" or "virtual".
      chunk_cycles: cycles per dispatch; the host looks at the result once per chunk.
      on_tokens: called as on_tokens(index of the prompt, verified new ids) once per chunk.

    Returns:
      A `DecodeResult`, or a list of them in the prompts' order.

    Raises:
      ConfigError: the input cannot be decoded; the text says what to change.
    """
    check_not_traced((target, draft), "decode")
    _check_sampling(sampling)
    if not is_int(chunk_cycles) or not 1 <= chunk_cycles < 2**31:
        raise ConfigError(f"chunk_cycles must be an integer from 1 to 2^31 - 1, got {chunk_cycles}")
    request = make_request(target, prompt, max_new_tokens, stop_ids, seed)
    engine = build_engine(target, draft, n_stages, stage_layers, mesh, placement)
    inputs = make_inputs(target, request, sampling)
    decoded = decode_batch(
        engine, request.prompts, inputs, request.max_new_tokens, chunk_cycles, on_tokens
    )
    results = [
        finish_result(
            target,
            request,
            sequence.tokens,
            decoded.prefill_seconds,
            decoded.decode_seconds,
            accepted=sequence.accepted,
            overlap=sequence.overlap,
            cycles=sequence.cycles,
            n_stages=engine.spec.n_stages,
            mode=engine.mode,
            placement=engine.placement,
            devices=engine.n_devices,
        )
        for sequence in decoded.sequences
    ]
    return results[0] if request.single else results


def generate(
    target: Target,
    prompt: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int = 128,
    sampling: SamplingConfig = GREEDY,
    stop_ids: Sequence[int] | None = None,
    seed: int | Sequence[int] = 0,
) -> DecodeResult | list[DecodeResult]:
    """Decodes autoregressively: the baseline and the oracle of `decode`.

    Args:
      prompt: token ids, a string (chat template), or a list of either (a batch).
      max_new_tokens: at least 1; sampling: temperature, top-k and top-p.
      stop_ids: ids that end a text; None: the target's; (): never.
      seed: prompt b draws from seed + b, or from its own entry of a list.

    Returns:
      A `DecodeResult` (accepted and cycles None), or a list of them in the prompts' order.

    Raises:
      ConfigError: the input cannot be decoded; the text says what to change.
    """
    check_not_traced(target, "generate")
    _check_sampling(sampling)
    request = make_request(target, prompt, max_new_tokens, stop_ids, seed)
    decoder = Autoregression(target, request, sampling)
    start, clock = decoder.prefill(), Stopwatch()
    state = start()
    prefill_seconds, decode_seconds = clock.lap(), 0.0
    while not bool(np.all(np.asarray(state.done))):
        reach = int(request.prompt_lens.max()) + int(state.step) + AR_CHUNK_STEPS
        proceed = decoder.steps(state, AR_CHUNK_STEPS, read_len(reach, decoder.capacity))
        clock.lap()  # compiling is not decoding
        state = proceed(state)
        decode_seconds += clock.lap()
    tokens, counts = np.asarray(state.tokens), np.asarray(state.n_tokens)
    results = [
        finish_result(target, request, row[:n].tolist(), prefill_seconds, decode_seconds)
        for row, n, length in zip(tokens, counts, request.prompt_lens, strict=True)
        if length
    ]
    return results[0] if request.single else results


def _check_sampling(sampling: object) -> None:
    if not isinstance(sampling, SamplingConfig):
        raise ConfigError(f"sampling must be a SamplingConfig, got {sampling!r}")


def finish_result(
    target: Target,
    request: Request,
    tokens: list[int],
    prefill_seconds: float,
    decode_seconds: float,
    accepted: list[bool] | None = None,
    overlap: float | None = None,
    cycles: int | None = None,
    n_stages: int | None = None,
    mode: str = "virtual",
    placement: str = "virtual",
    devices: int = 1,
) -> DecodeResult:
    """Adds text, reason and figures to one sequence's tokens."""
    stopped = tokens[-1] in request.stop_ids.tolist()
    stats = make_stats(
        tokens,
        accepted,
        overlap,
        cycles,
        n_stages,
        prefill_seconds,
        decode_seconds,
        mode,
        placement,
        devices,
    )
    text = None if target.tokenizer is None else target.tokenizer.decode(tokens)
    return DecodeResult(tokens, accepted, cycles, text, "stop" if stopped else "length", stats)


def target_logits(
    target: Target, input_ids: Sequence[int] | jax.Array, *, hidden_states: bool = False
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Returns the target's float32 logits [T, V] of one sequence of ids [T].

    With hidden_states=True also the hidden states [L+1, T, D]: index 0 is the embedding, index L
    the last layer's output before the final norm.
    """
    ids = _scored_ids(target, input_ids)
    return _score(whole_params(target), ids, target.config, hidden_states)


def pdm_loss(
    target: Target,
    draft: Draft,
    batch: dict[str, jax.Array],
    *,
    fill: jax.Array | int,
    temperature: float = 1.0,
    mask_mode: str = "exact",
    loss: LossConfig = distill.KL,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The distillation loss of a draft module on a batch, differentiable in the draft.

    The target is frozen: no gradient flows into it.

    Args:
      batch: input_ids, attention_mask and labels, int [B, T]; label -100 is ignored, label t is
        scored against the prediction made at t-1. attention_mask is 0 on padding and else 1, or
        1, 2, ... where a row holds several texts.
      fill: tokens in flight to simulate, 1..N.
      temperature: of both distributions; the loss is multiplied by its square.
      mask_mode: "exact" (what decoding does) or "reference" (as published).
      loss: what the distributions are compared by; KL by default.

    Returns:
      The loss (mean over valid positions) and metrics: accuracy, coverage, n_valid.
    """
    if not isinstance(loss, LossConfig):
        raise ConfigError(f"loss must be a LossConfig, got {loss!r}")
    check_belongs(target, draft)
    check_batch(target, draft, batch)
    if not is_traced(temperature) and not 0 < temperature < np.inf:
        raise ConfigError(f"temperature must be a number above 0, got {temperature}")
    return distill.distillation_loss(
        target.config,
        draft.config,
        jax.lax.stop_gradient(whole_params(target)),
        draft.params,
        batch,
        fill=fill,
        temperature=temperature,
        mask_mode=mask_mode,
        loss=loss,
    )


def draft_predictions(
    target: Target,
    draft: Draft,
    input_ids: Sequence[int] | jax.Array,
    *,
    fill: int | Sequence[int],
    n_stages: int | None = None,
    stage_layers: Sequence[int] | None = None,
    mask_mode: str = "exact",
) -> jax.Array:
    """Returns what the draft proposes to follow each position of a text, fed the true ids [T].

    Args:
      fill: tokens in flight to simulate, 1..N; a sequence of fills shares the target's pass.
      n_stages, stage_layers: as for `decode`.

    Returns:
      int32 [T], or [n_fills, T] for a sequence.
    """
    check_belongs(target, draft)
    pipeline = resolve_pipeline(target, draft, n_stages, stage_layers)
    fills = as_ints("fill", np.atleast_1d(fill))
    if not fills:
        raise ConfigError("fill must be an integer or a sequence of them, got an empty one")
    config = dataclasses.replace(
        draft.config, n_stages=pipeline.n_stages, stage_layers=pipeline.stage_layers
    )
    ids, params = _scored_ids(target, input_ids), whole_params(target)
    best = _predict(params, draft.params, ids, fills, target.config, config, mask_mode)
    return best if np.ndim(fill) else best[0]


def _scored_ids(target: Target, input_ids: Sequence[int] | jax.Array) -> jax.Array:
    """Returns ids int32 [1, T]; checked unless traced."""
    if is_traced(input_ids):
        return input_ids[None]
    ids = check_ids(target, input_ids, "input_ids")
    if len(ids) > target.config.max_context:
        raise ConfigError(
            f"input_ids: expected at most {target.config.max_context} ids (the context of "
            f"{target.name}), got {len(ids)}; cut them"
        )
    return jnp.asarray(ids, jnp.int32)[None]


@functools.partial(jax.jit, static_argnums=(2, 3))
def _score(params, input_ids, config, hidden_states):
    hidden = model.hidden_states(config, params, input_ids)
    logits = model.logits(config, params, hidden[-1])[0]
    return (logits, jnp.concatenate(hidden)) if hidden_states else logits


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6))
def _predict(params, draft_params, input_ids, fills, config, draft, mask_mode):
    hidden = model.hidden_states(config, params, input_ids)
    one_text = jnp.ones_like(input_ids)

    def at_fill(fill):
        out = distill.draft_outputs(config, draft, draft_params, hidden, one_text, fill, mask_mode)
        logits = pdm.logits(config, draft, draft_params, params, out)
        return argmax_lowest(logits[0])

    best = jnp.stack([at_fill(fill) for fill in fills])
    ids = draft.draft_ids
    return best if ids is None else jnp.asarray(ids, jnp.int32)[best]
