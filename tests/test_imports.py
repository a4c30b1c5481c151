"""Imports run one way: server -> jaxserve -> {sharding, pallas_kernels}, and down the layers of jaxserve. The packages
that decide rather than compute import no jax."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("jaxserve", "sharding", "pallas_kernels", "server")
# Files and folders of jaxserve, a layer a line: each imports from the layers above its own line only.
LAYERS = """
  demo errors fields models progress_bars text
  config sampling_params
  request
  iteration weights
  sampling scheduler structured_output
  inbox stats
  generation runner startup_report profiler
  loop planning timeline
  simulate startup
  multihost engine
"""
LAYER = {name: number for number, line in enumerate(LAYERS.strip().splitlines()) for name in line.split()}
HOST_ONLY = (
    "config",
    "sampling_params",
    "request",
    "iteration",
    "stats",
    "scheduler",
    "structured_output",
    "simulate.workload",
)
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


def test_packages_import_one_way() -> None:
    for path in FILES:
        package = path.relative_to(ROOT).parts[0]
        ours = {name.split(".")[0] for name in imported(path)} & {*PACKAGES, "benchmarks", "examples", "tests"}
        assert ours <= ALLOWED[package], path


def test_nothing_unpickles() -> None:
    """Unpickling runs code, and servers read what strangers write.

    Compiled programs are code in any case; they are read only from a folder that nobody else writes to.
    """
    unsafe = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    for path in FILES:
        found = {name.split(".")[0] for name in imported(path)} & unsafe
        assert found == ({"pickle"} if path.name == "program_cache.py" else set()), path
        assert not re.search(r"allow_pickle\s*=\s*(?!False)", path.read_text()), path


def files(module: str) -> list[Path]:
    """Of a module or of a package and all that is in it; none of a name that is neither."""
    path = ROOT.joinpath(*module.split("."))
    if path.is_dir():
        return sorted(path.rglob("*.py"))
    return [file for file in [path.with_suffix(".py")] if file.exists()]


def module_file(module: str) -> list[Path]:
    """The file of a module of jaxserve, or of a package's __init__."""
    path = ROOT.joinpath(*module.split("."))
    found = [path.with_suffix(".py"), path / "__init__.py"] if module.startswith("jaxserve.") else []
    return [file for file in found if file.exists()]


def name_of(path: Path) -> str:
    """The file or folder of jaxserve that holds a file."""
    return path.relative_to(ROOT / "jaxserve").with_suffix("").parts[0]


def names_used(path: Path) -> set[str]:
    """The files and folders of jaxserve that a file imports from."""
    return {name.split(".")[1] for name in imported(path) if name.startswith("jaxserve.")} & LAYER.keys()


def test_every_package_has_its_layer() -> None:
    assert {name_of(path) for path in files("jaxserve")} - {"__init__"} == LAYER.keys()


def test_layers_import_from_below() -> None:
    for path in files("jaxserve"):
        name = name_of(path)
        layer = LAYER.get(name, len(LAYER))  # jaxserve/__init__.py names what is in every layer
        assert {used for used in names_used(path) - {name} if LAYER[used] >= layer} == set(), path


def test_host_only_packages_need_no_jax() -> None:
    """Schedulers run in simulations, and servers run in front of engine processes, without jax."""
    seen: set[Path] = set()
    queue = [path for name in HOST_ONLY for path in files(f"jaxserve.{name}")]
    while queue:
        if (path := queue.pop()) in seen:
            continue
        seen.add(path)
        names = imported(path)
        assert not {name for name in names if name.split(".")[0] in ("jax", "flax", "jaxlib")}, path
        queue += [file for name in names for module in (name, name.rpartition(".")[0]) for file in module_file(module)]
    assert len(seen) > len(HOST_ONLY)


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


def test_only_resolve_makes_partition_specs() -> None:
    for path in FILES:
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
def test_partition_spec_is_found_under_any_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "file.py"
    file.write_text(text)
    assert partition_specs(file) == [2]
