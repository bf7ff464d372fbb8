"""Files <-> parameter trees: the only room that knows checkpoint key names.

`load_target_files` reads a target from wherever it is, `load_target_config` its geometry alone,
`load_draft_file` a draft module; `heads` and `reference_save` write draft modules.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spd_jax.checks import ConfigError
from spd_jax.config import AnyDraftConfig, TargetConfig
from spd_jax.weights.loaded import LoadedTarget

__all__ = ["LoadedTarget", "load_draft_file", "load_target_config", "load_target_files"]


def load_target_files(source: str | Path, dtype: str = "float32") -> LoadedTarget:
    """Reads a target.

    Args:
      source: "smollm2-135m" (fetched once), "tiny" (no download), an HF directory, a .gguf file
        or a hub id "owner/name".
      dtype: run dtype of the arrays, "float32" or "bfloat16".
    Raises:
      ConfigError: nothing usable there.
    """
    if source == "smollm2-135m":
        from spd_jax.weights.fetch import fetch_smollm2
        from spd_jax.weights.gguf import load_gguf

        path = fetch_smollm2()
        return load_gguf(path, dtype, tokenizer_cache=path.with_name("tokenizer.json"))
    if source == "tiny":
        from spd_jax.weights.tiny import load_tiny

        return load_tiny(dtype)
    path = Path(source)
    if path.suffix.lower() == ".gguf":
        from spd_jax.weights.gguf import load_gguf

        return load_gguf(path, dtype)
    from spd_jax.weights.hf import load_hf, snapshot

    if path.is_dir():
        return load_hf(path, dtype)
    if _is_hub_id(source):
        return load_hf(snapshot(str(source)), dtype)
    raise _not_there(source)


def load_target_config(source: str | Path) -> tuple[TargetConfig, str | None]:
    """Reads a target's geometry: no weights and no network.

    Args:
      source: as for `load_target_files`; of a hub id the cached config.json, else the published
        geometry.
    Returns:
      The geometry, and a line to show where a part of it is inferred.
    Raises:
      ConfigError: nothing usable there.
    """
    from spd_jax.weights import hf, published

    if source == "tiny":
        from spd_jax.weights.tiny import TINY_CONFIG

        return TINY_CONFIG, None
    path, name = Path(source), str(source)
    if path.suffix.lower() == ".gguf":
        from spd_jax.weights.gguf import gguf_config

        return gguf_config(path), None
    if path.is_dir():
        return hf.hf_config(path), None
    cached = hf.cached_config(name) if _is_hub_id(source) else None
    if cached is not None:
        return cached, None
    known = published.published_config(name)
    if known is not None:
        return known
    if not _is_hub_id(source):
        raise _not_there(source)
    raise ConfigError(
        f"no config.json of {name!r} is at hand; give a directory that holds it, or one of "
        f"{', '.join(published.published_names())}"
    )


def _is_hub_id(source: str | Path) -> bool:
    parts = str(source).split("/")
    return len(parts) == 2 and all(parts) and not str(source).startswith((".", "~"))


def _not_there(source: str | Path) -> ConfigError:
    return ConfigError(
        f"target {str(source)!r} is not there; give smollm2-135m, tiny, an HF directory,"
        " a .gguf file or a hub id owner/name"
    )


def load_draft_file(
    source: str | Path, dtype: str = "float32"
) -> tuple[AnyDraftConfig, dict[str, Any], dict[str, Any]]:
    """Reads a draft module.

    Args:
      source: a head directory of ours, a reference head.pt, a head.safetensors beside its
        head_config.json, or a directory that holds these two.
      dtype: run dtype of the arrays; stored bfloat16 is widened.
    Returns:
      its DraftConfig or V10DraftConfig; its parameter tree; what is known of its target, by
      TargetConfig's names.
    Raises:
      ConfigError: nothing usable there.
    """
    from spd_jax.weights import heads, reference_head
    from spd_jax.weights.files import found_at

    path = Path(source)
    found_at(path)  # one line where the system cannot look there
    if path.is_dir():
        if (path / heads.CONFIG_NAME).is_file():
            return heads.load_head_dir(path, dtype)
        if (path / reference_head.CONFIG_NAME).is_file():
            path = path / reference_head.TENSORS_NAME
    if path.suffix in (".pt", ".safetensors"):
        return reference_head.load_reference_head(path, dtype)
    state = "is no draft head" if path.exists() else "is not there"
    raise ConfigError(
        f"draft {str(source)!r} {state}; give a directory with config.json and"
        " model.safetensors, a head.pt, or a head.safetensors beside head_config.json"
    )
