"""Writes a head in the reference implementation's format, for those who run that program.

    python -m train.export runs/smollm2_n5_export/heads/4000 exported/head.pt   # this one file
    python -m train.export runs/smollm2_n5_export/heads/4000 exported           # all three files

head directory -> head.pt, and head.safetensors beside head_config.json (version 11)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import tyro

from spd_jax.commandline import parse_flags, run, say
from spd_jax.weights import load_draft_file
from spd_jax.weights.heads import CARD_NAME
from spd_jax.weights.reference_save import save_reference_head


@dataclasses.dataclass(frozen=True)
class ExportFlags:
    """Write a draft head in version 11 of the reference implementation's format."""

    head: tyro.conf.Positional[str]
    """The head: a directory that the trainer wrote, or anything that --draft takes."""
    out: tyro.conf.Positional[str]
    """NAME.pt: that file. Any other name: a directory with head.pt, and the same tensors as
    head.safetensors beside head_config.json."""
    base_model_path: str | None = None
    """Where the reference is to look for the target, a hub id or a directory. None: the base_model
    that the head's card names."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the stored weights."""
    replace: bool = False
    """Replace what is at OUT, if it is nothing but such a head."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    flags = parse_flags(ExportFlags, "python -m train.export", argv)
    config, params, target = load_draft_file(flags.head)
    base = flags.base_model_path
    if base is None:
        base = named_base_model(Path(flags.head) / CARD_NAME)
    written = save_reference_head(
        flags.out,
        config,
        target,
        params,
        base_model_path=base or "",
        dtype=flags.dtype,
        replace=flags.replace,
    )
    for path in written:
        say(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    if base is None:
        say("note: the head's card names no base_model: base_model_path stays empty; give it with "
            "--base-model-path")  # fmt: skip
    return 0


def named_base_model(card: Path) -> str | None:
    """Returns the base_model in a card's front matter; None where it names none."""
    from huggingface_hub import metadata_load

    try:
        found = (metadata_load(card) or {}).get("base_model")
    except Exception:  # no card, or one that someone wrote by hand: it may hold anything
        return None
    return found if isinstance(found, str) else None


if __name__ == "__main__":
    run(main)
