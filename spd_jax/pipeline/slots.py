"""Layer slots: where the layers of a rank lie, when ranks of unlike layers share one program.

A layer's tree has parts (its mixer, its MLP, their norms). The j-th layer of a rank that has a part
finds it in slot j of that part; on a mesh a slot holds one leaf [R, ...] per kind of array, shared
by all ranks. Caches lie likewise, by mixer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from spd_jax.config import LayerKind
from spd_jax.models.cache import Rows, first_positions

Slots = dict[str, list[Rows]]  # mixer -> slot -> a cache, or its new rows
Packed = dict[str, list[dict[str, Any]]]  # part -> slot -> leaf key -> array


def cache_slots(kinds: Sequence[LayerKind]) -> Iterator[tuple[str, int]]:
    """Yields, for each layer of a rank, the mixer and the slot of its cache."""
    seen: Counter[str] = Counter()
    for kind in kinds:
        yield kind.mixer, seen[kind.mixer]
        seen[kind.mixer] += 1


def read_slots(caches: Slots, n_read: int) -> Slots:
    """Returns the caches as far as attention is to read them: the first n_read positions."""
    return {
        mixer: [first_positions(cache, n_read) for cache in slots]
        for mixer, slots in caches.items()
    }


def map_slots(fn: Callable[[Rows, Rows], Rows], caches: Slots, rows: Slots) -> Slots:
    """Returns fn(cache, its new rows) of every slot."""
    return {
        mixer: [fn(*pair) for pair in zip(slots, rows[mixer], strict=True)]
        for mixer, slots in caches.items()
    }


def place_layers(layers: Sequence[dict]) -> Iterator[tuple[str, int, str, Any]]:
    """Yields (part, slot, leaf key, array) of every array of a rank's layers."""
    seen: Counter[str] = Counter()
    for layer in layers:
        for part, tree in layer.items():
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
                yield part, seen[part], leaf_key(path, leaf.shape), leaf
            seen[part] += 1


def leaf_key(path: tuple, shape: tuple[int, ...]) -> str:
    """Names one array of a part by its place in the part's tree and its shape.

    Arrays of like name and shape of different layers share a packed leaf.
    """
    names = "/".join(entry.key for entry in path)
    return f"{names}:{'x'.join(map(str, shape))}"


def unpack_layers(packed: Packed, shapes: Sequence[dict]) -> list[dict]:
    """Picks the layers with the trees of `shapes` out of packed slots."""
    seen: Counter[str] = Counter()
    layers = []
    for layer_shapes in shapes:
        layer = {}
        for part, tree in layer_shapes.items():
            slot = packed[part][seen[part]]
            layer[part] = jax.tree_util.tree_map_with_path(
                lambda path, x, slot=slot: slot[leaf_key(path, x.shape)], tree
            )
            seen[part] += 1
        layers.append(layer)
    return layers
