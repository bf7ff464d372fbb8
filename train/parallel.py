"""Data parallelism: rows of a batch over all devices, and what a run holds on each of them.

The draft and its optimizer state are whole on every device. The target is whole too, or cut over
the devices where it does not fit one; a layer is then put together just before it is used. Only
this file knows the axis.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from spd_jax.checks import ConfigError
from spd_jax.weights import LoadedTarget

AXIS = "data"
WHOLE, BY_ROW = PartitionSpec(), PartitionSpec(AXIS)
BY_ROW_IN_EACH = PartitionSpec(None, AXIS)  # of a stack [n, B, ...]
FITS = 0.5  # of a device's memory: a larger target leaves too little for the rest


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices of a run, and whether each holds all of the target or a part."""

    mesh: Mesh
    cuts_target: bool = False

    @property
    def n(self) -> int:
        """How many there are."""
        return self.mesh.size

    def describe(self) -> str:
        """Returns one line: how many devices, of which kind, and what they hold of the target."""
        kind = self.mesh.devices.flat[0].device_kind
        if self.n == 1:
            return f"trains on one device ({kind})"
        share = "a part of the target" if self.cuts_target else "all of the target"
        return f"trains on {self.n} devices ({kind}), each with {share}"

    def put_rows(self, arrays: Any) -> Any:
        """Places arrays [B, ...] by rows over the devices; rows of zeros make B even."""

        def put(x: np.ndarray) -> jax.Array:
            x = np.pad(x, ((0, -len(x) % self.n), *[(0, 0)] * (x.ndim - 1)))
            return _put(x, NamedSharding(self.mesh, BY_ROW))

        return jax.tree.map(put, arrays)

    def put_whole(self, tree: Any) -> Any:
        """Returns a tree that is whole on every device."""
        return jax.device_put(tree, NamedSharding(self.mesh, WHOLE))

    def place_target(self, target: LoadedTarget) -> Any:
        """Returns the target's parameters on the devices; each is on the host only on its way."""

        def put(leaf: Any) -> jax.Array:
            array = np.asarray(leaf)
            placed = _put(array, NamedSharding(self.mesh, self.target_spec(array)))
            return jax.block_until_ready(placed)

        return jax.tree.map(put, target.params)

    def target_spec(self, leaf: Any) -> PartitionSpec:
        """How a parameter of the target lies: cut along its longest axis that n divides, or not."""
        axes = [axis for axis, size in enumerate(leaf.shape) if size % self.n == 0]
        if not self.cuts_target or not axes:
            return WHOLE
        return PartitionSpec(*[None] * max(axes, key=lambda axis: leaf.shape[axis]), AXIS)

    def target_specs(self, params: Any) -> Any:
        """`target_spec` of each parameter."""
        return jax.tree.map(self.target_spec, params)

    def by_rows(self, work: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """Returns work as it runs on every device, with its part of the arguments.

        What is to be equal everywhere must be made so (`sum_over_devices`): that is not checked,
        since the check refuses loops that run as often as a device has scored rows.
        """
        return jax.shard_map(
            work, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )


def find_devices(n_devices: int | None, cut_target: bool | None, params: Any) -> Devices:
    """Returns the devices to train on.

    Args:
      n_devices: None: all of them; of CPU devices, which share their cores, one.
      cut_target: None: where its `params` take more than half of a device's memory.
    Raises:
      ConfigError: there are not as many.
    """
    there = jax.devices()
    wanted = n_devices or (1 if there[0].platform == "cpu" else len(there))
    if wanted > len(there):
        raise ConfigError(f"devices must be at most {len(there)}, as there are, got {wanted}")
    if jax.process_count() > 1:
        raise ConfigError(
            f"one process trains on all its devices; {jax.process_count()} are not supported yet"
        )
    memory = (there[0].memory_stats() or {}).get("bytes_limit")
    mesh = jax.make_mesh((wanted,), (AXIS,), (AxisType.Auto,), devices=there[:wanted])
    return Devices(mesh, is_cut(cut_target, wanted, params, memory))


def is_cut(cut_target: bool | None, n_devices: int, params: Any, memory: float | None) -> bool:
    """Returns whether the target is cut over the devices.

    Args:
      cut_target: as the settings say; None: where it would fill more than half of a device.
      params: the target's, or their shapes; memory: bytes of a device, None where unknown.
    """
    if n_devices == 1:
        return False
    if cut_target is not None:
        return cut_target
    needed = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(params))
    return memory is not None and needed > FITS * memory


def one_device() -> Devices:
    """Returns the first device alone."""
    return find_devices(1, False, {})


def first_copy(tree: Any) -> Any:
    """Returns arrays that are whole on every device as they lie on the first one here."""
    return jax.tree.map(lambda x: x.addressable_data(0), tree)


def sum_over_devices(tree: Any) -> Any:
    """Adds up what the devices found, inside `Devices.by_rows`."""
    return lax.psum(tree, AXIS)


def target_ends(params: dict) -> dict:
    """The target's embedding, final norm and head: its parameters without the layers."""
    return {name: part for name, part in params.items() if name != "layers"}


def assemble(params: dict, specs: dict) -> dict:
    """Returns the target's parameters inside `Devices.by_rows`: each layer when it is asked for.

    Args:
      params: blocks of this device; specs: how they were cut, leaf for leaf.
    """
    ends = gather(target_ends(params), target_ends(specs))
    return ends | {"layers": _Layers(params["layers"], specs["layers"])}


def gather(part: Any, specs: Any) -> Any:
    """Puts cut arrays together on every device."""

    def whole(leaf: jax.Array, spec: PartitionSpec) -> jax.Array:
        return lax.all_gather(leaf, AXIS, axis=len(spec) - 1, tiled=True) if len(spec) else leaf

    return jax.tree.map(whole, part, specs)


class _Layers(Sequence):
    """Layers that are gathered one by one, as the program comes to them."""

    def __init__(self, layers: Sequence[Any], specs: Sequence[Any]) -> None:
        self._layers, self._specs = layers, specs

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, index: int) -> Any:
        return gather(self._layers[index], self._specs[index])


def _put(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    with jax.transfer_guard_host_to_device("allow"):  # meant, whatever a run forbids
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
