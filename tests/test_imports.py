"""The layout rules that no tool checks, read from the source with ast.

Imports run one way: config <- ops <- models <- {weights, pipeline} <- api <- {infer, train}.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("spd_jax", "infer", "train")
# Lower may not import higher, nor one room another of the same level.
LEVELS = {
    "spd_jax.checks": -1,
    "spd_jax.cachedir": 0,
    "spd_jax.config": 0,
    "spd_jax.program": 0,
    "spd_jax.commandline": 1,
    "spd_jax.wire": 1,
    "spd_jax.processes": 2,
    "spd_jax.ops": 1,
    "spd_jax.results": 1,
    "spd_jax.models": 2,
    "spd_jax.weights": 3,
    "spd_jax.pipeline": 3,
    "spd_jax.heads": 3,
    "spd_jax.requests": 4,
    "spd_jax.prompts": 5,
    "spd_jax.engines": 5,
    "spd_jax.autoregressive": 6,
    "spd_jax.loading": 6,
    "spd_jax.api": 7,
    "spd_jax": 8,  # the package itself: it only exports the api
    "infer": 9,
    "train": 9,
}
MODULES = sorted(p for name in PACKAGES for p in (ROOT / name).rglob("*.py"))
IDS = [str(p.relative_to(ROOT)) for p in MODULES]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> str | None:
    """The longest entry of LEVELS that a module belongs to; None for one of another project."""
    names = [n for n in LEVELS if module == n or module.startswith(f"{n}.")]
    return max(names, key=len) if names else None


def imports(path: Path) -> Iterator[str]:
    """The full dotted names a file imports, inside functions too."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{source}.{alias.name}" for alias in node.names)


def imports_package(path: Path, package: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for name in imports(path))


def test_every_module_has_a_room():
    assert len(MODULES) > 10
    assert [i for i, p in zip(IDS, MODULES, strict=True) if room(module_name(p)) is None] == []


@pytest.mark.parametrize("path", MODULES, ids=IDS)
def test_imports_run_one_way(path):
    own = room(module_name(path))
    wrong = []
    for name in imports(path):
        other = room(name)
        if other is None or other == own:
            continue
        if LEVELS[other] >= LEVELS[own]:
            wrong.append(f"{own} imports {name}")
    assert wrong == []


@pytest.mark.parametrize("path", MODULES, ids=IDS)
def test_no_module_but_the_peer_imports_torch(path):
    if path != ROOT / "infer" / "hf_peer.py":  # what infer.bench --hf compares with
        assert not imports_package(path, "torch")


@pytest.mark.parametrize("path", MODULES, ids=IDS)
def test_only_the_checkpoint_module_imports_orbax(path):
    if path != ROOT / "train" / "checkpoint.py":
        assert not imports_package(path, "orbax")


@pytest.mark.parametrize("path", MODULES, ids=IDS)
def test_only_the_pipeline_names_the_stage_axis(path):
    if room(module_name(path)) == "spd_jax.pipeline":
        return
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    lines = [n.lineno for n in nodes if isinstance(n, ast.Constant) and n.value == "stage"]
    assert lines == []


@pytest.mark.parametrize("path", MODULES, ids=IDS)
def test_the_library_parses_no_flags(path):
    if room(module_name(path)) not in ("infer", "train", "spd_jax.commandline"):
        assert not any(imports_package(path, name) for name in ("tyro", "argparse", "absl"))


@pytest.mark.parametrize("path", MODULES, ids=IDS)
def test_files_are_named_for_a_concept_and_open_with_a_docstring(path):
    assert path.stem not in ("utils", "util", "common", "helpers", "misc")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not tree.body or ast.get_docstring(tree), "the file lacks its opening docstring"


def test_a_wrong_import_is_seen(tmp_path, monkeypatch):
    (tmp_path / "spd_jax" / "ops").mkdir(parents=True)
    bad = tmp_path / "spd_jax" / "ops" / "bad.py"
    bad.write_text("def f():\n    from ..models import layers\n    import torch.nn\n")
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    assert set(imports(bad)) == {"spd_jax.models.layers", "torch.nn"}
    with pytest.raises(AssertionError, match="spd_jax.ops imports spd_jax.models.layers"):
        test_imports_run_one_way(bad)
    with pytest.raises(AssertionError):
        test_no_module_but_the_peer_imports_torch(bad)
