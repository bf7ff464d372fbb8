"""The frozen, validated settings of targets, draft modules, pipelines and sampling.

Every other module receives these as static values; they are hashable and hold no arrays.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal, NamedTuple, get_args

from spd_jax.checks import (
    as_int,
    as_ints,
    check_counts,
    is_number,
    require,
)


def _check_draft_ids(ids: tuple[int, ...] | None) -> None:
    if ids is None:
        return
    require(len(ids) >= 1, "draft_ids must name at least one id")
    require(
        ids[0] >= 0 and all(x < y for x, y in zip(ids, ids[1:], strict=False)),
        "draft_ids must be sorted, unique and not negative",
    )


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """RoPE frequency scaling of Llama 3 (`rope_type: llama3` in an HF config)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


class LayerKind(NamedTuple):
    """What one decoder layer is made of."""

    mixer: str = "attention"  # "attention", or "delta" for a gated delta-net
    mlp: str = "dense"  # "dense", or "experts"


MIXERS, MLPS = ("attention", "delta"), ("dense", "experts")


@dataclasses.dataclass(frozen=True)
class DeltaNetConfig:
    """Geometry of gated delta-net layers."""

    n_key_heads: int
    n_value_heads: int  # a multiple: each key head serves several
    key_dim: int  # of a key head
    value_dim: int  # of a value head
    conv_width: int  # inputs that the causal convolution sees

    def __post_init__(self) -> None:
        check_counts(self, *(field.name for field in dataclasses.fields(self)))
        require(
            self.n_value_heads % self.n_key_heads == 0,
            f"n_value_heads ({self.n_value_heads}) must be a multiple of n_key_heads "
            f"({self.n_key_heads})",
        )

    @property
    def n_keys(self) -> int:
        """Width of all key heads."""
        return self.n_key_heads * self.key_dim

    @property
    def n_values(self) -> int:
        """Width of all value heads."""
        return self.n_value_heads * self.value_dim

    @property
    def n_channels(self) -> int:
        """Width of what the convolution mixes: queries, keys and values."""
        return 2 * self.n_keys + self.n_values


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """Geometry of mixture-of-experts MLPs."""

    n_experts: int
    n_active: int  # experts that each token goes to
    d_ff: int  # F of one expert
    normalise: bool  # the weights of the chosen experts sum to one
    shared_d_ff: int | None = None  # F of an expert that every token goes to; None: there is none

    def __post_init__(self) -> None:
        check_counts(self, "n_experts", "n_active", "d_ff")
        if self.shared_d_ff is not None:
            check_counts(self, "shared_d_ff")
        require(
            self.n_active <= self.n_experts,
            f"n_active must not exceed the {self.n_experts} experts, got {self.n_active}",
        )


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """Geometry of a target model, whose layers may be of several kinds."""

    vocab_size: int  # V
    d_model: int  # D
    n_layers: int  # L
    n_heads: int  # H
    n_kv_heads: int  # G
    head_dim: int  # E
    d_ff: int | None  # F of dense MLPs; None: no layer has one
    norm_eps: float
    rope_theta: float
    max_context: int  # positions the model was made for
    rope_scaling: Llama3Scaling | None = None
    tied_embeddings: bool = True
    qk_norm: bool = False  # RMSNorm over E on queries and keys before RoPE
    model_type: str = "llama"
    kinds: tuple[LayerKind, ...] | None = None  # of each layer; None: dense full attention
    rotary_dim: int | None = None  # leading part of E that RoPE turns; None: all of it
    norm_offset: bool = False  # norms multiply by 1 + w
    attn_gate: bool = False  # a sigmoid gate per head and element on what attention gives
    delta: DeltaNetConfig | None = None  # of the "delta" layers
    experts: ExpertsConfig | None = None  # of the "experts" layers

    def __post_init__(self) -> None:
        check_counts(self, "vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads")
        check_counts(self, "head_dim", "max_context")
        eps, theta = self.norm_eps, self.rope_theta
        require(is_number(eps) and eps >= 0, f"norm_eps must be a number >= 0, got {eps!r}")
        require(
            is_number(theta) and theta > 0, f"rope_theta must be a positive number, got {theta!r}"
        )
        require(
            self.n_heads % self.n_kv_heads == 0,
            f"n_heads ({self.n_heads}) must be a multiple of n_kv_heads ({self.n_kv_heads})",
        )
        if self.rotary_dim is None:
            require(self.head_dim % 2 == 0, f"head_dim must be even for RoPE, got {self.head_dim}")
        else:
            check_counts(self, "rotary_dim", least=2)
            turned = self.rotary_dim
            require(
                turned % 2 == 0 and turned <= self.head_dim,
                f"rotary_dim must be even and at most head_dim {self.head_dim}, got {turned}",
            )
        self._check_kinds()

    def _check_kinds(self) -> None:
        if self.kinds is not None:
            pairs = self.kinds
            are_pairs = isinstance(pairs, (tuple, list)) and all(
                isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs
            )
            require(are_pairs, f"kinds must be pairs of a mixer and an MLP, got {pairs!r}")
            object.__setattr__(self, "kinds", tuple(LayerKind(*pair) for pair in pairs))
        kinds = self.layer_kinds
        require(
            len(kinds) == self.n_layers
            and all(mixer in MIXERS and mlp in MLPS for mixer, mlp in kinds),
            f"kinds must be {self.n_layers} pairs of {MIXERS} and {MLPS}, got {kinds}",
        )
        for field, part, kind in (
            ("d_ff", "mlp", "dense"),
            ("experts", "mlp", "experts"),
            ("delta", "mixer", "delta"),
        ):
            used = any(getattr(k, part) == kind for k in kinds)
            value = getattr(self, field)
            require(not used or value is not None, f"{field} must be given for {kind} layers")
        if self.d_ff is not None:
            check_counts(self, "d_ff")

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        return (LayerKind(),) * self.n_layers if self.kinds is None else self.kinds

    @property
    def n_rotary(self) -> int:
        """How many leading elements of a head RoPE turns."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim


@dataclasses.dataclass(frozen=True)
class DraftConfig:
    """A Pipeline Draft Module (PDM): what it reads, how deep it is, what it can propose."""

    anchors: tuple[int, ...]  # hidden-state indices read, b_0 = 0, strictly increasing, <= L
    n_stages: int  # N it was trained for; it decodes at any N
    n_layers: int = 2  # L_s, dense full-attention layers
    d_ff: int | None = None  # F of its layers; None: the target's
    feature_norm: str = "rms"  # "rms": each anchor normalised per token; "none": reference heads
    qk_norm: bool = False  # per-head q/k RMSNorm in its layers
    head: str = "own"  # "own": trained [W, D]; "target": the target's frozen rows, not stored
    draft_ids: tuple[int, ...] | None = None  # sorted full-vocabulary ids, W of them; None: all V
    stage_layers: tuple[int, ...] | None = None  # split it was trained for; None: even
    target_sha256: str | None = None  # of the weights it was trained on; None: not recorded

    def __post_init__(self) -> None:
        for name in ("anchors", "draft_ids", "stage_layers"):
            value = getattr(self, name)
            if value is not None or name == "anchors":
                object.__setattr__(self, name, as_ints(name, value))
        a = self.anchors
        require(
            len(a) >= 1 and a[0] == 0 and all(x < y for x, y in zip(a, a[1:], strict=False)),
            f"anchors must start at 0 and strictly increase, got {a}",
        )
        check_counts(self, "n_stages", least=2)
        check_counts(self, "n_layers")
        if self.d_ff is not None:
            check_counts(self, "d_ff")
        require(isinstance(self.qk_norm, bool), f"qk_norm must be a bool, got {self.qk_norm!r}")
        sha256 = self.target_sha256
        require(
            sha256 is None or isinstance(sha256, str), f"target_sha256 must be text, got {sha256!r}"
        )
        split = self.stage_layers
        require(
            split is None or (len(split) == self.n_stages and min(split) >= 1),
            f"stage_layers must be {self.n_stages} positive counts, got {split}",
        )
        require(
            self.feature_norm in ("rms", "none"),
            f"feature_norm must be 'rms' or 'none', got {self.feature_norm!r}",
        )
        require(
            self.head in ("own", "target"), f"head must be 'own' or 'target', got {self.head!r}"
        )
        _check_draft_ids(self.draft_ids)


@dataclasses.dataclass(frozen=True)
class V10DraftConfig:
    """A draft module of the reference implementation's version 10: loaded and scored only.

    The class attributes are settings of `DraftConfig` that have one value here.
    """

    qk_norm: ClassVar[bool] = True
    head: ClassVar[str] = "own"
    target_sha256: ClassVar[None] = None

    row_anchors: tuple[tuple[int, ...], ...]  # hidden-state indices of rows of depth N, ..., 1, 0
    n_layers: int  # L_s
    d_ff: int  # F
    draft_ids: tuple[int, ...] | None = None  # sorted full-vocabulary ids; None: all V

    def __post_init__(self) -> None:
        rows = tuple(as_ints("each of row_anchors", row) for row in self.row_anchors)
        object.__setattr__(self, "row_anchors", rows)
        require(len(rows) >= 3, f"n_stages must be at least 2, got {len(rows) - 1}")
        require(all(rows), "row_anchors must name at least one hidden state for every row")
        least = min(min(row) for row in rows)
        require(least >= 0, f"row_anchors must be hidden-state indices from 0 on, got {least}")
        check_counts(self, "n_layers", "d_ff")
        _check_draft_ids(self.draft_ids)

    @property
    def n_stages(self) -> int:
        """N."""
        return len(self.row_anchors) - 1

    @property
    def anchors(self) -> tuple[int, ...]:
        """Every hidden-state index that is read, sorted."""
        return tuple(sorted({b for row in self.row_anchors for b in row}))


AnyDraftConfig = DraftConfig | V10DraftConfig


def refuse_v10(config: AnyDraftConfig, name: str, deed: str) -> None:
    """Raises ConfigError for a version 10 head, which cannot be what `deed` says."""
    require(
        not isinstance(config, V10DraftConfig),
        f"{name}: a v10 head of the reference implementation can be loaded and scored (pdm_loss) "
        f"but not {deed}; use a v11 head, or train one (train.pdm)",
    )


COLDEST, HOTTEST = 1e-4, 1e4  # beyond these float32 logits over the temperature lose their meaning


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How tokens are chosen; temperature 0 is greedy, top_k 0 and top_p 1 are off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    verifier: str = "rejection"

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            require(is_number(value), f"{name} must be a finite number, got {value!r}")
        require(
            self.temperature == 0 or COLDEST <= self.temperature <= HOTTEST,
            f"temperature must be 0 (greedy) or from {COLDEST:g} to {HOTTEST:g}, got "
            f"{self.temperature}",
        )
        check_counts(self, "top_k", least=0)
        require(0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p}")
        require(
            self.verifier in ("rejection", "coupled"),
            f"verifier must be 'rejection' or 'coupled', got {self.verifier!r}",
        )


LossName = Literal["kl", "reverse_kl", "js", "tv", "ce", "hybrid"]
Outside = Literal["renormalise", "miss"]


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """What a draft's distribution q is trained for, against the target's p."""

    name: LossName = "kl"
    """kl: KL(p || q), as published; reverse_kl: KL(q || p); js: Jensen-Shannon; tv: total
    variation, 1 minus the chance of acceptance; ce: cross-entropy on the target's choice; hybrid:
    kl and tv."""
    outside: Outside = "renormalise"
    """renormalise: p is what the target gives among the draft ids alone, as published; miss: the
    target's mass on other ids is there too, and lost to the draft."""
    tv_weight: float = 0.5
    """Share of tv in hybrid."""

    def __post_init__(self) -> None:
        for name, value, known in (
            ("loss", self.name, get_args(LossName)),
            ("outside", self.outside, get_args(Outside)),
        ):
            require(value in known, f"{name} must be one of {', '.join(known)}, got {value!r}")
        require(
            is_number(self.tv_weight) and 0 <= self.tv_weight <= 1,
            f"tv_weight must be from 0 to 1, got {self.tv_weight!r}",
        )


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    """A target of L layers cut into N contiguous stages.

    `stage_layers=None` is as even as possible, the first L mod N stages one layer more.
    """

    n_layers: int  # L
    n_stages: int  # N
    stage_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_counts(self, "n_layers")
        n, total = as_int("n_stages", self.n_stages), self.n_layers
        object.__setattr__(self, "n_stages", n)
        if self.stage_layers is not None:
            layers = as_ints("stage_layers", self.stage_layers)
            object.__setattr__(self, "stage_layers", layers)
        require(
            2 <= n <= total,
            f"n_stages must be from 2 to the target's {total} layers, got {n}; change n_stages",
        )
        if self.stage_layers is None:
            even, more = divmod(total, n)
            object.__setattr__(self, "stage_layers", tuple(even + (s < more) for s in range(n)))
        layers = self.stage_layers
        require(
            len(layers) == n and min(layers) >= 1 and sum(layers) == total,
            f"stage_layers must be {n} positive counts that sum to {total}, got {layers}",
        )

    @property
    def starts(self) -> tuple[int, ...]:
        """First layer of each stage, and L: N+1 cumulative counts (layers done at depth d)."""
        return tuple(sum(self.stage_layers[:s]) for s in range(self.n_stages + 1))

    def row_types(self, anchors: tuple[int, ...]) -> tuple[int, ...]:
        """f(d) for d = 0..N: the largest i whose anchor b_i is complete at depth d."""
        return tuple(max(i for i, b in enumerate(anchors) if b <= done) for done in self.starts)

    def min_depths(self, anchors: tuple[int, ...]) -> tuple[int, ...]:
        """Smallest depth of each row type; N+1 for a type that no depth reaches."""
        types = self.row_types(anchors)
        n = self.n_stages
        return tuple(types.index(i) if i in types else n + 1 for i in range(len(anchors)))

    def default_anchors(self) -> tuple[int, ...]:
        """One row type per depth: the stage boundaries 0, ..., L, legal for every N >= 2.

        With M = N+1 types, training sees exactly the rows that decoding computes.
        """
        return self.starts
