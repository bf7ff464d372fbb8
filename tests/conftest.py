"""Set before jax starts: nine virtual CPU devices.

The environment is set rather than jax.config, so that the processes that tests start get them too.
"""

import os
from pathlib import Path

N_DEVICES = 9  # eight stages and a device for the draft module

os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={N_DEVICES}".strip()
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Writing compiled programs to disk once crashed jaxlib 0.10.2 in the middle of a test run.
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)

import pytest  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden",
        metavar="DIR",
        type=Path,
        default=Path(__file__).parent / "golden",
        help="folder of the golden vectors, laid out as tests/golden/README.md says",
    )


@pytest.fixture(scope="session")
def golden(request: pytest.FixtureRequest) -> Path:
    """The folder of the vectors that tests compare with."""
    return request.config.getoption("golden")
