"""Reads heads of the public SPD reference: head.pt, or head.safetensors + head_config.json.

`reference_config` reads their settings, `reference_save` writes such heads. A layer is a Qwen3
layer (per-head q/k norm), in version 11 heads for Qwen3.5 one of that model's full attention;
features are not normalised. Versions 11 and 10 differ in the rows and in what a layer does with
them (`models.draft_v10`); version 12 is version 11 with stages of its own sizes.
Row r of lm_head belongs to sorted(set(draft_token_ids))[r].
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np

from spd_jax.checks import ConfigError, from_fields
from spd_jax.config import AnyDraftConfig, DraftConfig, V10DraftConfig
from spd_jax.weights import keymaps, reference_config
from spd_jax.weights.files import one_line, read_json
from spd_jax.weights.lazy import LazyArray
from spd_jax.weights.loaded import run_dtype
from spd_jax.weights.tensors import TensorFile
from spd_jax.weights.torch_zip import load_torch_zip

CONFIG_NAME, TENSORS_NAME = "head_config.json", "head.safetensors"


class _PickledTensors:
    """The tensors of a head.pt, with the interface of TensorFile."""

    def __init__(self, path: Path, state: dict[str, np.ndarray]):
        self.path, self._state, self.names = path, state, frozenset(state)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.names:
            raise ConfigError(f"{self.path}: no tensor {name}; the file is not complete")
        return self._state[name].shape

    def take(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> LazyArray:
        if self.shape(name) != shape:
            found = self.shape(name)
            raise ConfigError(f"{self.path}: {name} should have shape {shape}, has {found}")
        array = self._state[name]
        return LazyArray(
            shape, dtype, lambda: np.ascontiguousarray(array).astype(dtype, copy=False)
        )


def load_reference_head(path: str | Path, dtype: str) -> tuple[AnyDraftConfig, dict, dict]:
    """Reads a reference head.

    Args:
      path: head.pt, or head.safetensors beside head_config.json.
      dtype: run dtype of the arrays.
    Returns:
      its DraftConfig or V10DraftConfig; its parameter tree; what is known of its target: d_model,
      vocab_size and, where the head tells, head_dim, n_heads, n_kv_heads, attn_gate, n_layers, and
      the reference's MLP width for targets that name none, by its own name.
    Raises:
      ConfigError: not such a head, not whole, hostile, or of another version than 10, 11 and 12.
    """
    path, to = Path(path), run_dtype(dtype)
    if path.suffix == ".safetensors":
        source = path.with_name(CONFIG_NAME)
        config, tensors = read_json(source), TensorFile(path)
    else:
        source = path
        config, tensors = open_pickle(path)
    version, names = reference_config.version_of(config, source), _strip_prefixes(tensors.names)
    return _assemble(version, config, source, names, tensors, to)


def open_pickle(path: Path) -> tuple[dict[str, Any], _PickledTensors]:
    """Returns the settings and the tensors of a head.pt; ConfigError where it is none."""
    whole = load_torch_zip(path)
    state = whole.get("state_dict") if isinstance(whole, dict) else None
    config = whole.get("config") if isinstance(whole, dict) else None
    if not isinstance(state, dict) or not isinstance(config, dict):
        raise ConfigError(f"{path}: must hold state_dict and config; is it a head of SPD?")
    if not all(isinstance(k, str) and isinstance(v, np.ndarray) for k, v in state.items()):
        raise ConfigError(f"{path}: its state_dict must map names to tensors")
    return config, _PickledTensors(path, state)


def _strip_prefixes(names: frozenset[str]) -> dict[str, str]:
    """Returns plain name -> stored name, rotary buffers left out."""
    plain = {}
    for name in names:
        if "rotary_emb" in name:
            continue
        prefix = next((p for p in keymaps.REFERENCE_PREFIXES if name.startswith(p)), "")
        plain[name.removeprefix(prefix)] = name
    return plain


def _sizes(
    names: dict[str, str], tensors: TensorFile | _PickledTensors, qk_norm: bool
) -> dict[str, int]:
    """Returns the sizes that the head and its first layer show; "E" only with q/k norms."""

    def shape(name: str, n_dims: int) -> tuple[int, ...]:
        found = tensors.shape(names.get(name, name))
        if len(found) != n_dims or 0 in found:
            raise ConfigError(f"{tensors.path}: {name} has shape {found}; is it a head of SPD?")
        return found

    first = keymaps.REFERENCE_LAYER_PREFIX.format(i=0)
    n_head_rows, d_model = shape("lm_head.weight", 2)
    sizes = {
        "D": d_model,
        "W": n_head_rows,
        "QE": shape(f"{first}self_attn.q_proj.weight", 2)[0],
        "HE": shape(f"{first}self_attn.o_proj.weight", 2)[1],
        "GE": shape(f"{first}self_attn.k_proj.weight", 2)[0],
        "F": shape(f"{first}mlp.gate_proj.weight", 2)[0],
    }
    if sizes["QE"] not in (sizes["HE"], 2 * sizes["HE"]):
        raise ConfigError(
            f"{tensors.path}: {first}self_attn.q_proj has {sizes['QE']} rows, which should be "
            f"the {sizes['HE']} columns of o_proj, or twice as many with a gate"
        )
    if qk_norm:
        sizes["E"] = shape(f"{first}self_attn.q_norm.weight", 1)[0]
    return sizes


def _assemble(
    version: int,
    config: dict[str, Any],
    source: Path,
    names: dict[str, str],
    tensors: TensorFile | _PickledTensors,
    to: np.dtype,
) -> tuple[AnyDraftConfig, dict, dict]:
    qk_norm = version == 10 or any(name.endswith("self_attn.q_norm.weight") for name in names)
    sizes = _sizes(names, tensors, qk_norm)
    meta = {
        "d_model": reference_config.count(config, "hidden_size", source, sizes["D"]),
        "vocab_size": reference_config.count(config, "vocab_size", source, sizes["W"]),
    }
    if meta["d_model"] != sizes["D"]:
        raise ConfigError(f"{source}: hidden_size {meta['d_model']}, but lm_head has {sizes['D']}")
    if qk_norm:
        head_dim = sizes["E"]
        meta |= {"head_dim": head_dim, "n_heads": sizes["HE"] // head_dim}
        meta["n_kv_heads"] = sizes["GE"] // head_dim
    fields = {
        "n_layers": reference_config.count(config, "num_spec_layers", source),
        "d_ff": sizes["F"],
        "draft_ids": reference_config.draft_ids(config, sizes["W"], meta["vocab_size"], source),
    }
    left = set(names)

    def take(name: str, shape: tuple[int, ...]) -> LazyArray:
        left.discard(name)
        return tensors.take(names.get(name, name), shape, to)

    if version == 10:  # without a gate, whatever the target has
        if sizes["QE"] != sizes["HE"]:
            raise ConfigError(
                f"{tensors.path}: a v10 head has no gated attention; is its version 11?"
            )
        fields["row_anchors"] = reference_config.row_anchors(config, source)
        draft = from_fields(V10DraftConfig, fields, str(source))
        params = keymaps.read_draft_v10(draft, sizes, take)
    else:
        meta["attn_gate"] = sizes["QE"] == 2 * sizes["HE"]
        anchors = reference_config.anchors(config, source)
        stages = reference_config.stage_layers(config, version, anchors, source)
        if stages is not None:
            meta["n_layers"] = sum(stages)
        fallback = config.get(reference_config.FALLBACK)
        if type(fallback) is int and fallback > 0:
            meta[reference_config.FALLBACK] = fallback
        fields |= {
            "anchors": anchors,
            "n_stages": reference_config.count(config, "num_stages", source),
            "feature_norm": "none",
            "qk_norm": qk_norm,
            "stage_layers": stages,
        }
        draft = from_fields(DraftConfig, fields, str(source))
        params = keymaps.read_draft(
            draft, keymaps.REFERENCE_PROJ, keymaps.REFERENCE_LAYER_PREFIX, sizes, take
        )
    if left:
        raise ConfigError(
            f"{tensors.path}: unsupported tensor {one_line(min(left))}; is it a v{version} head?"
        )
    return draft, jax.tree.map(np.asarray, params), meta
