"""What the tests of the engine share: the two modes, and one count of near ties for all."""

import pytest

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
