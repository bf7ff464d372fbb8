"""Set before jax starts: nine virtual CPU devices, and compiling that is quick and done once.

The environment is set rather than jax.config, so that the processes that tests start get them too.
"""

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

N_DEVICES = 9  # eight stages and a device for the draft module
MANY_MAPS = 30_000  # of 65,530

FLAGS = (
    f"--xla_force_host_platform_device_count={N_DEVICES}",
    "--xla_backend_optimization_level=0",  # machine code only: the programs remain what they are
)

os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS]).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Programs that several files or processes compile are compiled once and shared over a folder.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="spd-compiled-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")

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


@pytest.fixture(scope="module", autouse=True)
def free_memory_maps() -> Iterator[None]:
    """Frees what jax keeps compiled when it is much, for the reason that spd_jax.program gives."""
    yield
    if Path("/proc/self/maps").read_text().count("\n") > MANY_MAPS:
        jax.clear_caches()
