"""Tests the tests of `jaxserve serve`'s flags: drops each flag on its way, and sees that a test fails.

    python -m tests.server.mutate_flags [NAME ...]      all flags, or those whose names contain one of NAME

A mutant is a copy of the code in which one function reads the default of one flag or setting rather than its value.
The script prints a table of mutants and of the tests that caught them, and returns 1 if one was not caught.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxserve.config import ENGINE_PARAMS
from jaxserve.multihost.config import CLUSTER_PARAMS
from server.commands import cli
from server.serve_settings import SERVE_PARAMS, ServeSettings

ROOT = Path(__file__).parents[2]
COPIED = ("server", "tests", "jaxserve", "sharding", "pallas_kernels", "pyproject.toml")
SECONDS = 240  # for the tests of a mutant; one that hangs is caught
FLAG_TESTS = ("tests/server/commands/test_serve_flags.py", "tests/server/commands/test_serve_process.py")
# Functions through which a value passes, and the names that it has there.
FUNCTIONS = {
    ("server/commands/serve.py", "from_flags"): ("args",),
    ("server/commands/engine_start.py", "model_directory"): ("args",),
    ("server/commands/hosts.py", "from_flags"): ("args",),
    ("server/commands/hosts.py", "_secrets"): ("args",),
    ("server/tls.py", "from_flags"): ("args",),
    ("server/commands/serve.py", "run"): ("args", "chosen"),
    ("server/lifecycle.py", None): ("settings", "chosen", "self.settings", "lifecycle.settings"),
}
# What only several hosts show has tests of its own.
HOSTS_TESTS = {
    ("serve_engine_process", "cluster"): "tests/server/test_hosts_served.py -k ends_when or asked_to",
    ("_lifecycle", "cluster"): "tests/server/test_host_failures.py -k master and False",
}
DEFAULTS = """
def defaults():
    from server.commands import cli  # late: the modules that import this one are imported by it

    return cli.parser().parse_args(["serve"])

class Flag:
    def __getattr__(self, name):
        return getattr(defaults(), name)

class Setting:
    def __getattr__(self, name):
        from server.commands import serve

        return getattr(serve.from_flags(defaults()), name)

flag, setting = Flag(), Setting()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A change of one file.

    Attributes:
      tests: arguments of pytest that select the tests which should fail.
    """

    flag: str
    file: str
    function: str
    source: str
    tests: Sequence[str]


def main(names: Sequence[str]) -> int:
    mutants = [each for each in all_mutants() if not names or any(name in each.flag for name in names)]
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        _copy(root)
        print(f"{'flag or setting':22}{'function':52}caught by")
        for mutant in mutants:
            started = time.monotonic()
            caught = _run(root, mutant)
            survivors += caught is None
            seconds = time.monotonic() - started
            where = f"{mutant.file.removeprefix('server/')}:{mutant.function}"
            print(f"{mutant.flag:22}{where:52}{caught or 'NOTHING'} ({seconds:.0f} s)", flush=True)
    print(f"{len(mutants)} mutants, {survivors} not caught")
    return int(survivors > 0)


def all_mutants() -> Iterator[Mutant]:
    flags = set(vars(cli.parser().parse_args(["serve"]))) - {"run", "settings"} - set(ENGINE_PARAMS)
    fields = {field.name for field in dataclasses.fields(ServeSettings)} | {"in_process", "restarts"}
    for (file, wanted), names in FUNCTIONS.items():
        source = (ROOT / file).read_text()
        for function in _functions(ast.parse(source)):
            if wanted in (None, function.name):
                reads = _reads(function, names, flags, fields)
                for name in sorted({node.attr for node in reads}):
                    its = [node for node in reads if node.attr == name]
                    yield Mutant(
                        flag=name,
                        file=file,
                        function=function.name,
                        source=_replaced(source, its),
                        tests=_tests(function.name, name),
                    )
    yield from _param_mutants()


def _param_mutants() -> Iterator[Mutant]:
    """Those of the settings that are read by their metadata."""
    file, line = "server/commands/flags.py", "        values[name] = value\n    return values\n"
    source = (ROOT / file).read_text()
    assert source.count(line) == 1
    before, line = line.splitlines(keepends=True)
    for name in (*ENGINE_PARAMS, *SERVE_PARAMS, *CLUSTER_PARAMS):
        dropped = f'    if "{name}" in values:\n        values["{name}"] = params["{name}"].default\n'
        tests = "engine_flag" if name in ENGINE_PARAMS else "not engine_flag"
        yield Mutant(
            flag=name,
            file=file,
            function="read",
            source=source.replace(before + line, before + dropped + line),
            tests=(*FLAG_TESTS, "-k", tests),
        )


def _functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions of a module, and the methods of its classes."""
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
    return [node for body in bodies for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def _reads(function: ast.AST, names: Sequence[str], flags: set[str], fields: set[str]) -> list[ast.Attribute]:
    """Where a function reads a flag or a setting."""
    return [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and (owner := ast.unparse(node.value)) in names
        and node.attr in (flags if owner == "args" else fields)
    ]


def _replaced(source: str, nodes: Sequence[ast.Attribute]) -> str:
    lines = source.splitlines(keepends=True)
    for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset), reverse=True):
        line = lines[node.lineno - 1]
        kind = "flag" if ast.unparse(node.value) == "args" else "setting"
        assert node.end_col_offset is not None
        default = f"mutant_defaults.{kind}.{node.attr}"
        lines[node.lineno - 1] = line[: node.col_offset] + default + line[node.end_col_offset :]
    lines.insert(lines.index("from __future__ import annotations\n") + 1, "import mutant_defaults\n")
    return "".join(lines)


def _tests(function: str, name: str) -> Sequence[str]:
    if (function, name) in HOSTS_TESTS:
        file, _, expression = HOSTS_TESTS[function, name].partition(" -k ")
        return file, "-k", expression
    return (*FLAG_TESTS, "-k", "not engine_flag")


def _copy(root: Path) -> None:
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, root / name)
    (root / "mutant_defaults.py").write_text(DEFAULTS)


def _run(root: Path, mutant: Mutant) -> str | None:
    """The test that fails with a mutant, if one does."""
    path = root / mutant.file
    original = path.read_text()
    path.write_text(mutant.source)
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-m", "", "-p", "no:cacheprovider", *mutant.tests]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"no end within {SECONDS} s"
    finally:
        path.write_text(original)
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) \S+::(\S+)", done.stdout, re.MULTILINE)
    assert failed is not None, done.stdout
    return failed[1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
