"""Checkpoint key names as data: HF, GGUF, reference heads and our own head directories.

Tables of the leaves (`leaves.py`) of targets and drafts, and their trees read and written by them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from spd_jax.config import DraftConfig, LayerKind, TargetConfig, V10DraftConfig
from spd_jax.weights.leaves import Leaf, Sizes, Take, read_leaves, write_leaves


def _rows_of_key_heads(sizes: Sizes) -> np.ndarray:
    """Where the rows q | k | v | z | b | a lie in projections whose rows go by key head."""
    heads, share = sizes["K"], sizes["VN"] // sizes["K"]
    values = share * sizes["VE"]
    wide = np.arange(heads * (2 * sizes["KE"] + 2 * values)).reshape(heads, -1)
    narrow = wide.size + np.arange(heads * 2 * share).reshape(heads, -1)
    parts = np.split(wide, np.cumsum([sizes["KE"], sizes["KE"], values]), axis=1)
    parts += np.split(narrow, 2, axis=1)
    return np.concatenate([part.ravel() for part in parts])


EMBED = Leaf(("embed", "weight"), ("model.embed_tokens",), ("token_embd",), (("V", "D"),))
FINAL_NORM = Leaf(("final_norm", "weight"), ("model.norm",), ("output_norm",), (("D",),))
LM_HEAD = Leaf(("lm_head", "weight"), ("lm_head",), ("output",), (("V", "D"),))
MIXER_NORM = Leaf(("mixer_norm", "weight"), ("input_layernorm",), ("attn_norm",), (("D",),))
MLP_NORM = Leaf(("mlp_norm", "weight"), ("post_attention_layernorm",), ("ffn_norm",), (("D",),))
ATTENTION = (
    Leaf(
        ("attn", "qkv", "weight"),
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("attn_q", "attn_k", "attn_v"),
        (("QE", "D"), ("GE", "D"), ("GE", "D")),
    ),
    Leaf(("attn", "o", "weight"), ("self_attn.o_proj",), ("attn_output",), (("D", "HE"),)),
)
QK_NORM = (
    Leaf(("attn", "q_norm", "weight"), ("self_attn.q_norm",), ("attn_q_norm",), (("E",),)),
    Leaf(("attn", "k_norm", "weight"), ("self_attn.k_norm",), ("attn_k_norm",), (("E",),)),
)
DELTA_IN = Leaf(
    ("delta", "in_proj", "weight"),
    tuple(f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a")),
    (),
    (("C", "D"), ("VV", "D"), ("VN", "D"), ("VN", "D")),
)
DELTA_IN_BY_HEAD = DELTA_IN._replace(
    hf=("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"),
    shapes=(("C+VV", "D"), ("VN+VN", "D")),
    order=_rows_of_key_heads,
)
DELTA = (
    Leaf(("delta", "conv", "weight"), ("linear_attn.conv1d",), (), (("C", "1", "KW"),)),
    Leaf(("delta", "A_log"), ("linear_attn.A_log",), (), (("VN",),), suffix=""),
    Leaf(("delta", "dt_bias"), ("linear_attn.dt_bias",), (), (("VN",),), suffix=""),
    Leaf(("delta", "norm", "weight"), ("linear_attn.norm",), (), (("VE",),)),
    Leaf(("delta", "out", "weight"), ("linear_attn.out_proj",), (), (("D", "VV"),)),
)
MLP = (
    Leaf(
        ("mlp", "gate_up", "weight"),
        ("mlp.gate_proj", "mlp.up_proj"),
        ("ffn_gate", "ffn_up"),
        (("F", "D"), ("F", "D")),
    ),
    Leaf(("mlp", "down", "weight"), ("mlp.down_proj",), ("ffn_down",), (("D", "F"),)),
)
ROUTER = Leaf(("experts", "router", "weight"), ("mlp.gate",), (), (("X", "D"),))
EXPERTS = (
    Leaf(
        ("experts", "gate_up", "weight"),
        ("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj"),
        (),
        (("XF", "D"), ("XF", "D")),
        per_expert=True,
    ),
    Leaf(
        ("experts", "down", "weight"),
        ("mlp.experts.{e}.down_proj",),
        (),
        (("D", "XF"),),
        per_expert=True,
    ),
)
FUSED_EXPERTS = (
    Leaf(
        ("experts", "gate_up", "weight"),
        ("mlp.experts.gate_up_proj",),
        (),
        (("X", "2*XF", "D"),),
        suffix="",
    ),
    Leaf(
        ("experts", "down", "weight"),
        ("mlp.experts.down_proj",),
        (),
        (("X", "D", "XF"),),
        suffix="",
    ),
)
SHARED_EXPERT = (
    Leaf(
        ("experts", "shared", "gate_up", "weight"),
        ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        (),
        (("SF", "D"), ("SF", "D")),
    ),
    Leaf(
        ("experts", "shared", "down", "weight"),
        ("mlp.shared_expert.down_proj",),
        (),
        (("D", "SF"),),
    ),
    Leaf(("experts", "shared_gate", "weight"), ("mlp.shared_expert_gate",), (), (("1", "D"),)),
)
BY_HEAD = ("qwen3_next",)  # model types whose delta-net projections go by key head
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
DRAFT_HEAD = Leaf(("lm_head", "weight"), ("lm_head",), (), (("W", "D"),))


def target_sizes(config: TargetConfig) -> dict[str, int]:
    """Returns the sizes that the leaves of a target are made of."""
    c = config
    sizes = {"V": c.vocab_size, "D": c.d_model, "F": c.d_ff or 0}
    sizes |= attention_sizes(c.n_heads, c.n_kv_heads, c.head_dim, c.attn_gate)
    if c.delta is not None:
        d = c.delta
        sizes |= {"C": d.n_channels, "KW": d.conv_width, "K": d.n_key_heads, "KE": d.key_dim}
        sizes |= {"VN": d.n_value_heads, "VE": d.value_dim, "VV": d.n_values}
    if c.experts is not None:
        x = c.experts
        sizes |= {"X": x.n_experts, "XF": x.d_ff, "SF": x.shared_d_ff or 0}
    return sizes


def attention_sizes(n_heads: int, n_kv_heads: int, head_dim: int, gate: bool) -> dict[str, int]:
    """Returns the sizes of full attention; with a gate, queries have twice the rows."""
    return {
        "E": head_dim,
        "HE": n_heads * head_dim,
        "QE": n_heads * head_dim * (2 if gate else 1),
        "GE": n_kv_heads * head_dim,
    }


def layer_leaves(config: TargetConfig, kind: LayerKind, fused: bool = False) -> tuple[Leaf, ...]:
    """Returns the leaves of one layer; `fused`: all experts of a layer are one tensor."""
    if kind.mixer == "attention":
        mixer = _attention(config.qk_norm)
    else:
        mixer = (DELTA_IN_BY_HEAD if config.model_type in BY_HEAD else DELTA_IN, *DELTA)
    mlp = MLP
    if kind.mlp == "experts":
        shared = config.experts.shared_d_ff is not None
        mlp = (ROUTER, *(FUSED_EXPERTS if fused else EXPERTS), *(SHARED_EXPERT if shared else ()))
    return (MIXER_NORM, *mixer, MLP_NORM, *mlp)


def dense_leaves(qk_norm: bool) -> tuple[Leaf, ...]:
    """Returns the leaves of one dense layer of full attention, as draft modules have them."""
    return (MIXER_NORM, *_attention(qk_norm), MLP_NORM, *MLP)


def _attention(qk_norm: bool) -> tuple[Leaf, ...]:
    return (*ATTENTION, *(QK_NORM if qk_norm else ()))


def proj_leaf(name: str, i: int) -> Leaf:
    """Returns the leaf of the projection of row type i, [D, (i+1)*D]."""
    return wide_leaf(name.format(i=i), i + 1)


def wide_leaf(name: str, n_anchors: int) -> Leaf:
    """Returns the leaf of a projection of so many hidden states, [D, n_anchors*D]."""
    return Leaf(("weight",), (name,), (), (("D", f"{n_anchors}*D"),))


def read_target(
    config: TargetConfig, names: str, prefix: str, take: Take, fused: bool = False
) -> dict[str, Any]:
    """Builds a target's parameter tree; `prefix` of layer i holds "{i}"."""
    sizes = target_sizes(config)
    ends = [EMBED, FINAL_NORM] + ([] if config.tied_embeddings else [LM_HEAD])
    tree = read_leaves(ends, names, "", sizes, take)
    tree["layers"] = [
        read_leaves(layer_leaves(config, kind, fused), names, prefix.format(i=i), sizes, take)
        for i, kind in enumerate(config.layer_kinds)
    ]
    return tree


def write_target(
    config: TargetConfig, params: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the (HF name, array) pairs that `read_target` would build `params` from."""
    sizes = target_sizes(config)
    ends = [EMBED, FINAL_NORM] + ([] if config.tied_embeddings else [LM_HEAD])
    yield from write_leaves(params, ends, "", sizes)
    for i, (kind, layer) in enumerate(zip(config.layer_kinds, params["layers"], strict=True)):
        yield from write_leaves(layer, layer_leaves(config, kind), prefix.format(i=i), sizes)


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
            read_leaves(dense_leaves(config.qk_norm), "hf", prefix.format(i=i), sizes, take)
            for i in range(config.n_layers)
        ],
    }
    if config.head == "own":
        tree |= read_leaves([DRAFT_HEAD], "hf", "", sizes, take)
    return tree


def read_draft_v10(config: V10DraftConfig, sizes: Sizes, take: Take) -> dict[str, Any]:
    """Builds the parameter tree of a version 10 head of the reference: see `models.draft_v10`."""
    n, layers, leaves = config.n_stages, range(config.n_layers), dense_leaves(config.qk_norm)
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
        yield from write_leaves(layer, dense_leaves(config.qk_norm), prefix.format(i=i), sizes)
    if config.head == "own":
        yield from write_leaves(params, [DRAFT_HEAD], "", sizes)
