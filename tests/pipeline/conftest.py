"""What the tests of the engine share: the two modes, and one count of near ties for all."""

import functools

import pytest

import spd_jax
from spd_jax.models.bundle import Draft, Target
from tests.expected import Comparison

MESHES = {"virtual": "virtual", "sharded": None}  # mode -> the mesh argument that gives it


@pytest.fixture(scope="session")
def comparison() -> Comparison:
    """Counts over the whole run."""
    return Comparison()


@pytest.fixture(params=MESHES)
def mode(request) -> str:
    """Each mode in turn."""
    return request.param


@pytest.fixture(scope="session")
def golden_pair(golden):
    """Golden head, like "llama/n4" -> its target and draft; one object each: engines are kept."""
    load_target = functools.cache(lambda folder: spd_jax.load_target(folder / "target"))

    @functools.cache
    def load(head: str) -> tuple[Target, Draft]:
        target = load_target((golden / head).parent)
        return target, spd_jax.load_draft(golden / head / "head.safetensors", target)

    return load
