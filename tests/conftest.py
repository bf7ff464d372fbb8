"""Set before jax starts: nine virtual CPU devices, and compiled programs kept between runs.

The environment is set rather than jax.config, so that the processes that tests start get both.
"""

import hashlib
import os
import platform
from pathlib import Path

N_DEVICES = 9  # eight stages and a device for the draft module


def program_cache() -> Path:
    """A folder of this kind of CPU: a program compiled for another one may crash."""
    kind = platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        kind += next((line for line in lines if line.lower().startswith(("flags", "feat"))), "")
    cache = Path(os.environ.get("SPD_CACHE") or Path.home() / ".cache" / "spd_jax")
    return cache / "test_programs" / hashlib.sha256(kind.encode()).hexdigest()[:12]


os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={N_DEVICES}".strip()
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(program_cache()))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")

import jax  # noqa: E402
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


@pytest.fixture
def fresh_compile():
    """Compiles anew: for tests that read a compiled program, which a cached one may shorten."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", before)
