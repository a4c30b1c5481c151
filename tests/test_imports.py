"""Imports run one way: server -> jaxserve -> {sharding, pallas_kernels}; the scheduler's rooms need no jax."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("jaxserve", "sharding", "pallas_kernels", "server")
HOST_ONLY = ("request", "iteration", "slots", "buckets", "scheduler", "config")
ALLOWED = {
    "server": {"server", "jaxserve", "sharding", "pallas_kernels"},
    "jaxserve": {"jaxserve", "sharding", "pallas_kernels"},
    "sharding": {"sharding"},
    "pallas_kernels": {"pallas_kernels"},
}
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Full names of the modules that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively; name the package"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_packages_import_one_way(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    ours = {name.split(".")[0] for name in imported(path)} & set(PACKAGES)
    assert ours <= ALLOWED[package]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_unpickles(path: Path) -> None:
    """What is pickled runs code when it is read, and servers read what strangers write. Compiled programs are code in
    any case, and read only from a folder that nobody else writes to."""
    unsafe = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    found = {name.split(".")[0] for name in imported(path)} & unsafe
    assert found == ({"pickle"} if path.name == "program_cache.py" else set())
    assert not re.search(r"allow_pickle\s*=\s*(?!False)", path.read_text())


def test_scheduling_needs_no_jax() -> None:
    seen: set[str] = set()
    queue = [f"jaxserve.{name}" for name in HOST_ONLY]
    while queue:
        module = queue.pop()
        path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
        if module in seen or not path.exists():
            continue
        seen.add(module)
        names = imported(path)
        assert not {name for name in names if name.split(".")[0] in ("jax", "flax", "jaxlib")}, module
        queue += [name for name in names if name.startswith("jaxserve.")]
    assert seen >= {f"jaxserve.{name}" for name in HOST_ONLY}


@pytest.mark.parametrize("path", sorted((ROOT / "jaxserve" / "models").glob("*.py")), ids=lambda path: path.stem)
def test_models_know_nothing_of_scheduling(path: Path) -> None:
    assert not imported(path) & {f"jaxserve.{name}" for name in ("scheduler", "engine", "slots", "stage", "batch")}


def partition_specs(path: Path) -> list[int]:
    """Lines of a file that make a PartitionSpec, under whatever name it goes there."""
    tree = ast.parse(path.read_text())
    names = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name in ("PartitionSpec", "P")
    }
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [
        call.lineno
        for call in calls
        if (isinstance(call.func, ast.Name) and call.func.id in names)
        or (isinstance(call.func, ast.Attribute) and call.func.attr in ("PartitionSpec", "P"))
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_resolve_makes_partition_specs(path: Path) -> None:
    made = partition_specs(path)
    assert len(made) == (path == ROOT / "sharding" / "spec.py"), f"{path} makes a PartitionSpec in lines {made}"


@pytest.mark.parametrize(
    "text",
    [
        "from jax.sharding import PartitionSpec\nPartitionSpec()",
        "from jax.sharding import PartitionSpec as Spec\nSpec('x')",
        "from jax import P\nP()",
        "import jax\njax.P()",
        "import jax.sharding as s\ns.PartitionSpec()",
    ],
)
def test_a_partition_spec_is_found_under_any_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "file.py"
    file.write_text(text)
    assert partition_specs(file) == [2]
