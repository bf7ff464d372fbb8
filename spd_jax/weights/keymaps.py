"""Checkpoint key names as data: HF, GGUF, reference heads and our own head directories.

A `Leaf` is one array of a parameter tree: the checkpoint tensors whose rows are stacked to make it.
`read_leaves` and `write_leaves` are the two directions between a tree and named tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from spd_jax.config import DraftConfig, TargetConfig, V10DraftConfig


class Leaf(NamedTuple):
    """One array of a tree; names lack the trailing ".weight", sizes are keys of `Sizes`."""

    path: tuple[str, ...]  # place in the tree; its last key "weight" is implied
    hf: tuple[str, ...]  # HF names, stacked along rows in this order
    gguf: tuple[str, ...]  # GGUF names, in the same order
    rows: tuple[str, ...]  # rows of each source tensor
    cols: str | None = None  # columns; None for a vector


EMBED = Leaf(("embed",), ("model.embed_tokens",), ("token_embd",), ("V",), "D")
FINAL_NORM = Leaf(("final_norm",), ("model.norm",), ("output_norm",), ("D",))
LM_HEAD = Leaf(("lm_head",), ("lm_head",), ("output",), ("V",), "D")
LAYER = (
    Leaf(("attn_norm",), ("input_layernorm",), ("attn_norm",), ("D",)),
    Leaf(
        ("attn", "qkv"),
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("attn_q", "attn_k", "attn_v"),
        ("HE", "GE", "GE"),
        "D",
    ),
    Leaf(("attn", "o"), ("self_attn.o_proj",), ("attn_output",), ("D",), "HE"),
    Leaf(("mlp_norm",), ("post_attention_layernorm",), ("ffn_norm",), ("D",)),
    Leaf(
        ("mlp", "gate_up"),
        ("mlp.gate_proj", "mlp.up_proj"),
        ("ffn_gate", "ffn_up"),
        ("F", "F"),
        "D",
    ),
    Leaf(("mlp", "down"), ("mlp.down_proj",), ("ffn_down",), ("D",), "F"),
)
QK_NORM = (
    Leaf(("attn", "q_norm"), ("self_attn.q_norm",), ("attn_q_norm",), ("E",)),
    Leaf(("attn", "k_norm"), ("self_attn.k_norm",), ("attn_k_norm",), ("E",)),
)
HF_LAYER_PREFIX = "model.layers.{i}."
GGUF_LAYER_PREFIX = "blk.{i}."
ROPE_FREQS = "rope_freqs.weight"  # GGUF: per-frequency divisors of llama3 scaling

# Draft heads: (projection of row type i, layer i, head)
REFERENCE_PROJ, REFERENCE_LAYER_PREFIX = "aggr_projs.{i}", "spec_layers.{i}."
V10_PROJ, V10_NEWEST_PROJ = "stage_projs.{i}", "g0_proj"  # by depth: N, ..., 1; 0
V10_MEMORY = "fixed_stage_per_layer_projs.{layer}.{i}"  # i as in V10_PROJ
REFERENCE_PREFIXES = ("_orig_mod.speculation_head.", "speculation_head.", "_orig_mod.")
PDM_PROJ, PDM_LAYER_PREFIX = "projs.{i}", "layers.{i}."
DRAFT_IDS = "draft_ids"  # int32 [W] in our head directories
DRAFT_HEAD = Leaf(("lm_head",), ("lm_head",), (), ("W",), "D")

Sizes = Mapping[str, int]  # of the letters used in rows and cols
Take = Callable[[str, tuple[int, ...]], np.ndarray]  # (name, expected shape) -> array


def target_sizes(config: TargetConfig) -> dict[str, int]:
    """Returns the sizes that the leaves of a target are made of."""
    c = config
    return {
        "V": c.vocab_size,
        "D": c.d_model,
        "E": c.head_dim,
        "HE": c.n_heads * c.head_dim,
        "GE": c.n_kv_heads * c.head_dim,
        "F": c.d_ff,
    }


def layer_leaves(qk_norm: bool) -> tuple[Leaf, ...]:
    """Returns the leaves of one dense layer."""
    return LAYER + (QK_NORM if qk_norm else ())


def proj_leaf(name: str, i: int) -> Leaf:
    """Returns the leaf of the projection of row type i, [D, (i+1)*D]."""
    return wide_leaf(name.format(i=i), i + 1)


def wide_leaf(name: str, n_anchors: int) -> Leaf:
    """Returns the leaf of a projection of so many hidden states, [D, n_anchors*D]."""
    return Leaf((), (name,), (), ("D",), f"{n_anchors}*D")


def _size(letter: str, sizes: Sizes) -> int:
    times, _, letter = letter.rpartition("*")
    return int(times or 1) * sizes[letter]


def sources(leaf: Leaf, names: str, prefix: str, sizes: Sizes) -> Iterator[tuple[str, tuple]]:
    """Yields (tensor name, shape) of the tensors that a leaf is stacked from."""
    cols = () if leaf.cols is None else (_size(leaf.cols, sizes),)
    for name, rows in zip(getattr(leaf, names), leaf.rows, strict=True):
        yield f"{prefix}{name}.weight", (_size(rows, sizes), *cols)


def read_leaves(
    leaves: Iterable[Leaf], names: str, prefix: str, sizes: Sizes, take: Take
) -> dict[str, Any]:
    """Builds a nested dict from named tensors; `names` is "hf" or "gguf"."""
    tree: dict[str, Any] = {}
    for leaf in leaves:
        parts = [take(name, shape) for name, shape in sources(leaf, names, prefix, sizes)]
        node = tree
        for key in leaf.path:
            node = node.setdefault(key, {})
        node["weight"] = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return tree


def write_leaves(
    tree: Mapping[str, Any], leaves: Iterable[Leaf], prefix: str, sizes: Sizes
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the (HF name, array) pairs that `read_leaves` would build `tree` from."""
    for leaf in leaves:
        node: Any = tree
        for key in leaf.path:
            node = node[key]
        start, array = 0, np.asarray(node["weight"])
        for name, shape in sources(leaf, "hf", prefix, sizes):
            yield name, np.ascontiguousarray(array[start : start + shape[0]])
            start += shape[0]


def read_target(config: TargetConfig, names: str, prefix: str, take: Take) -> dict[str, Any]:
    """Builds a target's parameter tree; `prefix` of layer i holds "{i}"."""
    sizes = target_sizes(config)
    ends = [EMBED, FINAL_NORM] + ([] if config.tied_embeddings else [LM_HEAD])
    leaves = layer_leaves(config.qk_norm)
    tree = read_leaves(ends, names, "", sizes, take)
    tree["layers"] = [
        read_leaves(leaves, names, prefix.format(i=i), sizes, take) for i in range(config.n_layers)
    ]
    return tree


def read_draft(
    config: DraftConfig, proj: str, prefix: str, sizes: Sizes, take: Take
) -> dict[str, Any]:
    """Builds a draft's parameter tree; `proj` and `prefix` hold "{i}"."""
    tree: dict[str, Any] = {
        "projs": [
            read_leaves([proj_leaf(proj, i)], "hf", "", sizes, take)
            for i in range(len(config.anchors))
        ],
        "layers": [
            read_leaves(layer_leaves(config.qk_norm), "hf", prefix.format(i=i), sizes, take)
            for i in range(config.n_layers)
        ],
    }
    if config.head == "own":
        tree |= read_leaves([DRAFT_HEAD], "hf", "", sizes, take)
    return tree


def read_draft_v10(config: V10DraftConfig, sizes: Sizes, take: Take) -> dict[str, Any]:
    """Builds the parameter tree of a version 10 head of the reference: see `models.draft_v10`."""
    n, layers, leaves = config.n_stages, range(config.n_layers), layer_leaves(config.qk_norm)
    names = [*(V10_PROJ.format(i=i) for i in range(n)), V10_NEWEST_PROJ]

    def read(leaves: Iterable[Leaf], prefix: str = "") -> dict[str, Any]:
        return read_leaves(leaves, "hf", prefix, sizes, take)

    return {
        "projs": [
            read([wide_leaf(name, len(used))])
            for name, used in zip(names, config.row_anchors, strict=True)
        ],
        "memory": [
            [read([wide_leaf(V10_MEMORY.format(layer=layer, i=i), 1)]) for i in range(n)]
            for layer in layers
        ],
        "layers": [read(leaves, REFERENCE_LAYER_PREFIX.format(i=layer)) for layer in layers],
        **read([DRAFT_HEAD]),
    }


def write_draft(
    config: DraftConfig, params: Mapping[str, Any], proj: str, prefix: str, sizes: Sizes
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the (name, array) pairs that `read_draft` would build `params` from."""
    for i, node in enumerate(params["projs"]):
        yield from write_leaves(node, [proj_leaf(proj, i)], "", sizes)
    for i, layer in enumerate(params["layers"]):
        yield from write_leaves(layer, layer_leaves(config.qk_norm), prefix.format(i=i), sizes)
    if config.head == "own":
        yield from write_leaves(params, [DRAFT_HEAD], "", sizes)
