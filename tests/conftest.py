"""Set before jax starts: nine virtual CPU devices, and compiled programs kept between runs.

The environment is set rather than jax.config, so that the processes that tests start get both.
"""

import os
from pathlib import Path

N_DEVICES = 9  # eight stages and a device for the draft module

os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={N_DEVICES}".strip()
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_cache = Path(os.environ.get("SPD_CACHE") or Path.home() / ".cache" / "spd_jax")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_cache / "test_programs"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")

import jax  # noqa: E402
import pytest  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden",
        metavar="DIR",
        type=Path,
        default=Path(__file__).parent / "golden",
        help="folder of the golden vectors, laid out as in tests/golden/README.md",
    )


@pytest.fixture(scope="session")
def golden(request: pytest.FixtureRequest) -> Path:
    """The folder of the vectors that tests compare with."""
    return request.config.getoption("golden")


@pytest.fixture
def fresh_compile():
    """Compiles anew: for tests that read a compiled program, which a cached one may shorten."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", before)
