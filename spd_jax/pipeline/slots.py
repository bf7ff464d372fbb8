"""Packed layer slots: one leaf [R, ...] per kind of array, shared by all ranks of a mesh."""

from __future__ import annotations

from typing import Any

import jax


def leaf_key(path: tuple, shape: tuple[int, ...]) -> str:
    """Names one array of a layer by its place in the layer's tree and its shape.

    Arrays of like name and shape of different layer kinds share a packed leaf.
    """
    names = "/".join(entry.key for entry in path)
    return f"{names}:{'x'.join(map(str, shape))}"


def unpack_layer(slot: dict[str, jax.Array], shapes: Any) -> dict:
    """Picks the arrays of one kind of layer, with the tree of `shapes`, out of a packed slot."""
    return jax.tree_util.tree_map_with_path(lambda path, x: slot[leaf_key(path, x.shape)], shapes)
