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
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from spd_jax.checks import ConfigError
from spd_jax.processes import Processes
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

    @property
    def whole(self) -> NamedSharding:
        """How an array lies that is whole on each of them."""
        return NamedSharding(self.mesh, WHOLE)

    @property
    def is_first(self) -> bool:
        """Whether the first of them is one of this process."""
        return self.mesh.devices.flat[0].process_index == jax.process_index()

    def describe(self) -> str:
        """Returns one line: how many devices, of which kind, and what they hold of the target."""
        kind = self.mesh.devices.flat[0].device_kind
        if self.n == 1:
            return f"trains on one device ({kind})"
        share = "a part of the target" if self.cuts_target else "all of the target"
        n_processes = len({device.process_index for device in self.mesh.devices.flat})
        where = f" of {n_processes} processes" if n_processes > 1 else ""
        return f"trains on {self.n} devices ({kind}){where}, each with {share}"

    def put_rows(self, arrays: Any) -> Any:
        """Places arrays [B, ...] by rows over the devices; rows of zeros make B even."""

        def put(x: np.ndarray) -> jax.Array:
            x = np.pad(x, ((0, -len(x) % self.n), *[(0, 0)] * (x.ndim - 1)))
            return _put(x, NamedSharding(self.mesh, BY_ROW))

        return jax.tree.map(put, arrays)

    def put_whole(self, tree: Any) -> Any:
        """Returns a tree that is whole on every device."""
        if self.whole.is_fully_addressable:
            return jax.device_put(tree, self.whole)

        def put(leaf: Any) -> jax.Array:  # equal in all processes, which device_put would check
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                data = put(jax.random.key_data(leaf))
                return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
            return _put(np.asarray(leaf), self.whole)

        return jax.tree.map(put, tree)

    def in_turn(self, tree: Any) -> Any:
        """Returns what a program of all devices gives; of several processes' CPUs, when it is done.

        Gloo tells messages apart by their order alone, so no two such programs may overlap there.
        """
        is_cpu = self.mesh.devices.flat[0].platform == "cpu"
        if is_cpu and not self.whole.is_fully_addressable:
            jax.block_until_ready(tree)
        return tree

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


def find_devices(
    n_devices: int | None, cut_target: bool | None, params: Any, processes: Processes | None = None
) -> Devices:
    """Returns the devices to train on.

    Args:
      n_devices: None: all of them; of CPU devices, which share their cores, one of each process.
      cut_target: None: where its `params` take more than half of a device's memory.
      processes: which are to have an equal share of the devices; None: this one is alone.
    Raises:
      ConfigError: there are not as many.
    """
    processes = processes or Processes()
    there, n = jax.devices(), processes.n
    wanted = n_devices or (n if there[0].platform == "cpu" else len(there))
    if wanted > len(there):
        raise ConfigError(f"devices must be at most {len(there)}, as there are, got {wanted}")
    by_process = [[d for d in there if d.process_index == i][: wanted // n] for i in range(n)]
    if any(len(share) * n != wanted for share in by_process):
        counts = ", ".join(str(len(share)) for share in by_process)
        raise ConfigError(
            f"devices must be as many in each of {n} processes, got {wanted} of which they would "
            f"have {counts}; set devices to a multiple of {n} that all have"
        )
    memory = (by_process[processes.index][0].memory_stats() or {}).get("bytes_limit")
    cuts_target = any(processes.gather(is_cut(cut_target, wanted, params, memory)))
    chosen = [device for share in by_process for device in share]
    mesh = jax.make_mesh((wanted,), (AXIS,), (AxisType.Auto,), devices=chosen)
    return Devices(mesh, cuts_target)


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
    """Returns the first device of this process alone."""
    mesh = jax.make_mesh((1,), (AXIS,), (AxisType.Auto,), devices=jax.local_devices()[:1])
    return Devices(mesh)


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
