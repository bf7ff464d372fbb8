"""How one array of a parameter tree is made of the tensors of a checkpoint, and taken apart again.

A `Leaf` is one array: the tensors whose rows are stacked to make it. `read_leaves` and
`write_leaves` are the two directions between a tree and named tensors; what is read is lazy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from spd_jax.weights.lazy import LazyArray

Sizes = Mapping[str, int]  # of the letters used in shapes
# (name, expected shape) -> array; what is wrong with a tensor it raises at once
Take = Callable[[str, tuple[int, ...]], np.ndarray | LazyArray]


class Leaf(NamedTuple):
    """One array of a tree; names lack the suffix, the letters of shapes are keys of `Sizes`."""

    path: tuple[str, ...]  # place in the tree
    hf: tuple[str, ...]  # HF names, stacked along rows in this order
    gguf: tuple[str, ...]  # GGUF names, in the same order
    shapes: tuple[tuple[str, ...], ...]  # of each source tensor
    suffix: str = ".weight"  # of every name
    order: Callable[[Sizes], np.ndarray] | None = None  # rows of the stack, by row of the array
    per_expert: bool = False  # names hold "{e}", and the array has a leading axis of experts


def _size(letters: str, sizes: Sizes) -> int:
    if letters.isdecimal():
        return int(letters)
    if "+" in letters:
        return sum(_size(part, sizes) for part in letters.split("+"))
    times, _, letter = letters.rpartition("*")
    return int(times or 1) * sizes[letter]


def sources(leaf: Leaf, names: str, prefix: str, sizes: Sizes) -> Iterator[tuple[str, tuple]]:
    """Yields (tensor name, shape) of the tensors that a leaf is stacked from, expert by expert."""
    for e in range(sizes["X"] if leaf.per_expert else 1):
        for name, shape in zip(getattr(leaf, names), leaf.shapes, strict=True):
            full_name = f"{prefix}{name.format(e=e)}{leaf.suffix}"
            yield full_name, tuple(_size(letters, sizes) for letters in shape)


def read_leaves(
    leaves: Iterable[Leaf], names: str, prefix: str, sizes: Sizes, take: Take
) -> dict[str, Any]:
    """Builds a nested dict of lazy arrays from named tensors; `names` is "hf" or "gguf"."""
    tree: dict[str, Any] = {}
    for leaf in leaves:
        parts = [take(name, shape) for name, shape in sources(leaf, names, prefix, sizes)]
        *path, last = leaf.path
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        node[last] = _joined(leaf, sizes, parts)
    return tree


def _joined(leaf: Leaf, sizes: Sizes, parts: list[np.ndarray | LazyArray]) -> Any:
    """The array of a leaf; reading it holds one of its parts at a time besides itself."""
    if len(parts) == 1 and leaf.order is None and not leaf.per_expert:
        return parts[0]
    shape, dtype = (sum(part.shape[0] for part in parts), *parts[0].shape[1:]), parts[0].dtype
    final = (sizes["X"], shape[0] // sizes["X"], *shape[1:]) if leaf.per_expert else shape

    def read() -> np.ndarray:
        if len(parts) == 1:
            array = np.asarray(parts[0])
        else:
            array, start = np.empty(shape, dtype), 0
            for part in parts:
                end = start + part.shape[0]
                array[start:end] = np.asarray(part)
                start = end
        return (array if leaf.order is None else array[leaf.order(sizes)]).reshape(final)

    return LazyArray(final, dtype, read)


def write_leaves(
    tree: Mapping[str, Any], leaves: Iterable[Leaf], prefix: str, sizes: Sizes
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the (HF name, array) pairs that `read_leaves` would build `tree` from."""
    for leaf in leaves:
        node: Any = tree
        for key in leaf.path:
            node = node[key]
        start, array = 0, np.asarray(node)
        if leaf.order is not None:
            array = array[np.argsort(leaf.order(sizes))]
        if leaf.per_expert:
            array = array.reshape(-1, array.shape[-1])
        for name, shape in sources(leaf, "hf", prefix, sizes):
            yield name, np.ascontiguousarray(array[start : start + shape[0]])
            start += shape[0]
