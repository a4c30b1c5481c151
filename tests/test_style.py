"""Names and docstrings: what a reader sees first is short, and a name means one thing."""

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("jaxserve", "sharding", "pallas_kernels", "server")
TEST_NAME, FIRST_LINE = 60, 90  # characters
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@functools.cache
def nodes(*folders: str) -> list[tuple[Path, ast.AST]]:
    """Modules, classes and functions of folders, but for generated files."""
    return [
        (path, node)
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "_pb2" not in path.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, DOCUMENTED)
    ]


def first_lines() -> Iterator[tuple[str, str]]:
    for path, node in nodes(*PACKAGES):
        if docstring := ast.get_docstring(node):  # pyright: ignore[reportArgumentType]
            yield f"{path.relative_to(ROOT)}: {getattr(node, 'name', 'module')}", docstring.partition("\n")[0]


def test_names_of_tests_are_short() -> None:
    names = [node.name for _, node in nodes("tests") if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    tests = [name for name in names if name.startswith("test_")]
    assert len(tests) > 1000
    assert [name for name in tests if len(name) >= TEST_NAME] == []


def test_docstrings_begin_with_a_short_line() -> None:
    lines = list(first_lines())
    assert len(lines) > 1000
    assert [(where, line) for where, line in lines if len(line) > FIRST_LINE] == []


def test_no_two_classes_share_a_name() -> None:
    files = defaultdict(list)
    for path, node in nodes(*PACKAGES):
        if isinstance(node, ast.ClassDef):
            files[node.name].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in files.items() if len(paths) > 1} == {}
