"""Which devices an engine runs on: one device for all ranks, or a mesh of N + 1.

An abstract mesh has ranks but no devices: programs can be traced for it, not run.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from spd_jax.checks import ConfigError
from spd_jax.pipeline.comm import AXIS

PLACEMENTS = ("auto", "dedicated", "virtual")


def resolve_mesh(mesh: Mesh | str | None, placement: str, n_stages: int) -> Mesh | None:
    """Returns the mesh to run on, or None for virtual mode (all ranks on one device).

    Args:
      mesh: None (choose by `placement`), "virtual", or a 1-D Mesh of N + 1 devices.
      placement: "auto" (dedicated where there are N + 1 devices, else virtual), "dedicated" (N + 1
        ranks, the draft module on its own), or "virtual".

    Raises:
      ConfigError: a mesh of another size, or too few devices for "dedicated".
    """
    n_ranks = n_stages + 1
    if placement not in PLACEMENTS:
        raise ConfigError(f"placement must be one of {', '.join(PLACEMENTS)}, got {placement!r}")
    if isinstance(mesh, Mesh):
        if placement == "virtual":
            raise ConfigError("placement 'virtual' uses no mesh; drop one of the two")
        if mesh.devices.ndim != 1 or mesh.devices.size != n_ranks:
            raise ConfigError(
                f"mesh: {n_stages} stages need a 1-D mesh of {n_ranks} devices (one per stage "
                f"and one for the draft module), got shape {mesh.devices.shape}; change the mesh "
                "or n_stages"
            )
        return _stage_mesh(list(mesh.devices))
    if mesh not in (None, "virtual"):
        raise ConfigError(f"mesh must be None, 'virtual' or a jax Mesh, got {mesh!r}")
    if mesh == "virtual" or placement == "virtual":
        if placement == "dedicated":
            raise ConfigError("placement 'dedicated' needs devices; drop mesh='virtual'")
        return None
    devices = jax.devices()
    if len(devices) >= n_ranks:
        return _stage_mesh(devices[:n_ranks])
    if placement == "dedicated":
        raise ConfigError(
            f"placement 'dedicated' with {n_stages} stages needs {n_ranks} devices, got "
            f"{len(devices)}; lower n_stages, or use placement 'virtual' (or --cpu-devices)"
        )
    return None


def abstract_mesh(n_stages: int) -> AbstractMesh:
    """Returns a mesh of N + 1 ranks without devices."""
    return AbstractMesh((n_stages + 1,), (AXIS,), axis_types=(AxisType.Auto,))


def _stage_mesh(devices: list[jax.Device]) -> Mesh:
    # Not jax.make_mesh: it may reorder the devices.
    return Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))
