"""Decodes one prompt through the pipeline, streams the text and closes with a table.

python -m infer.decode --prompt "Why is the sky blue?"
python -m infer.decode --cpu-devices 6 --compare      # six virtual CPU devices: sharded mode
python -m infer.decode --temperature 0.7 --top-p 0.9   # sampled, from the target's distribution
python -m infer.decode --target tiny                  # random weights, no download
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import IO, Any, Literal

import spd_jax
from infer import report
from infer.agreement import compare_tokens
from infer.startup import SamplingFlags, load_subject, start_devices
from spd_jax.commandline import EXIT_INTERRUPTED, parse_flags, run, say
from spd_jax.prompts import prompt_ids


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeFlags(SamplingFlags):
    """Decode one prompt with Speculative Pipeline Decoding; the text is exactly the target's."""

    prompt: str = "Explain in simple words how a pipeline of workers can build cars faster."
    """One user turn; the target's chat template is put around it."""
    target: str = "smollm2-135m"
    """smollm2-135m, tiny (random weights, no download), an HF directory, a .gguf file or a hub
    id."""
    draft: str | None = None
    """The draft head: a directory, head.pt or head.safetensors. None: the one shipped for the
    target."""
    max_new_tokens: int = 128
    """Stop after this many tokens at the latest."""
    n_stages: int | None = None
    """Pipeline stages. None: as many as the draft head was trained for."""
    stage_layers: str | None = None
    """Layers of each stage, like 6,6,6,6,6. None: as even as possible."""
    mesh: Literal["auto", "virtual"] = "auto"
    """auto: one device per stage where there are enough; virtual: all stages on one device."""
    placement: Literal["auto", "dedicated", "virtual"] = "auto"
    """dedicated: one device per stage and one for the draft module; virtual: one for all; auto:
    dedicated where there are enough devices."""
    cpu_devices: int | None = None
    """Split the CPU into this many virtual devices, to try the sharded mode on any machine."""
    thinking: bool | None = None
    """Whether the target is to think first: what its chat template gets as enable_thinking. None:
    nothing, so that the template's own default holds."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype that the target and the draft run in."""
    seed: int = 0
    """Seed of everything random: of sampled text, and of a random head."""
    compare: bool = False
    """Decode autoregressively too and say whether the tokens are identical; exit code 1 where they
    differ by more than rounding explains."""
    json: bool = False
    """Make the last line of stdout one JSON object; everything else goes to stderr."""


class TextSink:
    """Writes committed tokens as text, whole characters only; without a tokenizer, as ids."""

    def __init__(self, tokenizer: Any, file: IO[str]):
        self._stream = tokenizer.stream() if tokenizer is not None else None
        self._tokenizer = tokenizer
        self._file = file
        self._is_terminal = file.isatty()
        self.tokens: list[int] = []  # all committed so far

    def push(self, ids: Sequence[int]) -> None:
        """Writes newly committed ids."""
        ids = [int(i) for i in ids]
        self.tokens += ids
        self._write(self._stream.push(ids) if self._stream else "".join(f"{i} " for i in ids))

    def close(self) -> None:
        """Writes what is left of a broken character and ends the line."""
        self._write((self._stream.flush() if self._stream else "") + "\n")

    def text(self) -> str | None:
        """The text so far; None without a tokenizer."""
        return None if self._tokenizer is None else self._tokenizer.decode(self.tokens)

    def _write(self, text: str) -> None:
        if self._is_terminal:  # a model may write escape codes; a terminal would obey them
            text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
        self._file.write(text)
        self._file.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    flags = parse_flags(DecodeFlags, "python -m infer.decode", argv)
    if flags.compare:
        flags.check_comparable("--compare")
    sampling = flags.sampling
    start_devices(flags.cpu_devices)
    subject = load_subject(flags)
    target = subject.target
    (prompt,) = prompt_ids(target, flags.target, [flags.prompt])
    say("compiling the prefill and the decode cycle ...")
    sink = TextSink(target.tokenizer, sys.stderr if flags.json else sys.stdout)
    try:
        result = spd_jax.decode(
            target,
            subject.draft,
            prompt,
            max_new_tokens=flags.max_new_tokens,
            sampling=sampling,
            seed=flags.seed,
            on_tokens=lambda _, ids: sink.push(ids),
            **subject.decode_settings,
        )
    except KeyboardInterrupt:
        return _end_interrupted(sink, flags.json)
    sink.close()

    figures = {"pipeline": report.decode_figures(result)}
    agreement = None
    if flags.compare:
        say("compiling and running the autoregressive loop ...")
        reference = spd_jax.generate(
            target,
            prompt,
            max_new_tokens=flags.max_new_tokens,
            sampling=sampling,
            seed=flags.seed,
        )
        figures["autoregressive"] = report.decode_figures(reference)
        agreement = compare_tokens(
            target, prompt, result.tokens, reference.tokens, sampling, flags.seed
        )
    report.print_figures(figures, sys.stderr if flags.json else sys.stdout)
    if agreement is not None:
        line = f"compare: {agreement.describe()}"
        print(line, file=sys.stderr if flags.json else sys.stdout)
    if flags.json:
        print(report.decode_json(result, agreement.identical if agreement else None))
    fine = agreement is None or agreement.identical or agreement.is_rounding
    return 0 if fine else 1


def _end_interrupted(sink: TextSink, as_json: bool) -> int:
    """Ends after Ctrl-C with what was committed, all of it verified."""
    sink.close()
    say(f"stopped by Ctrl-C after {len(sink.tokens)} committed tokens")
    if as_json:
        absent = dict.fromkeys(("cycles", "rejects", "alpha", "tau", "mode"))
        record = {"text": sink.text(), "tokens": sink.tokens, **absent}
        print(json.dumps({**record, "finish_reason": "interrupted"}))
    return EXIT_INTERRUPTED


if __name__ == "__main__":
    run(main)
