"""Imports run one way: server -> jaxserve -> {sharding, pallas_kernels}, and between the rooms of jaxserve; those that
decide, rather than compute, need no jax."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("jaxserve", "sharding", "pallas_kernels", "server")
# The rooms of jaxserve, files and folders, a storey a line: each imports from the storeys below it only.
ROOMS = """
  chat_template config models request traffic
  iteration tokenizer weights
  grammars observe sampling scheduling
  demo execution generation startup_report
  plan replica timeline
  simulate startup
  cluster engine
  bench
"""
STOREY = {room: storey for storey, line in enumerate(ROOMS.strip().splitlines()) for room in line.split()}
HOST_ONLY = ("config", "request", "iteration", "observe", "scheduling", "grammars", "traffic")
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


def files(module: str) -> list[Path]:
    """Of a module or of a package and all that is in it; none of a name that is neither."""
    path = ROOT.joinpath(*module.split("."))
    if path.is_dir():
        return sorted(path.rglob("*.py"))
    return [file for file in [path.with_suffix(".py")] if file.exists()]


def room_of(path: Path) -> str:
    return path.relative_to(ROOT / "jaxserve").with_suffix("").parts[0]


def rooms_used(path: Path) -> set[str]:
    """The rooms of jaxserve that a file imports from."""
    return {name.split(".")[1] for name in imported(path) if name.startswith("jaxserve.")} & STOREY.keys()


def test_every_room_has_its_storey() -> None:
    assert {room_of(path) for path in files("jaxserve")} - {"__init__"} == STOREY.keys()


@pytest.mark.parametrize("path", files("jaxserve"), ids=lambda path: str(path.relative_to(ROOT)))
def test_rooms_import_from_below(path: Path) -> None:
    room = room_of(path)
    storey = STOREY.get(room, len(STOREY))  # the package itself names what is above all
    assert {used for used in rooms_used(path) - {room} if STOREY[used] >= storey} == set()


def test_what_decides_needs_no_jax() -> None:
    """In a process that imports no more than these: schedulers run in simulations and front doors without devices."""
    seen: set[Path] = set()
    queue = [path for room in HOST_ONLY for path in files(f"jaxserve.{room}")]
    while queue:
        if (path := queue.pop()) in seen:
            continue
        seen.add(path)
        names = imported(path)
        assert not {name for name in names if name.split(".")[0] in ("jax", "flax", "jaxlib")}, path
        queue += [path for used in rooms_used(path) for path in files(f"jaxserve.{used}")]
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
