"""`python -m benchmarks sizes`: what jaxserve and what it needs take on the disk, package by package."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from rich.table import Table

from server.commands.console import tables

HELP = """\
Adds up, as `du` does, the files of the packages that jaxserve's base install has, whatever else the environment has:
what is there without bytecode, and how much bytecode Python and pip have written beside it (uv and `pip --no-compile`
write none). FIXED are the packages that jaxserve is made with; what they need comes with them."""

FIXED = ("jax", "flax", "orbax-checkpoint", "grpcio")
_MB = 2**20
_LEAST = 5 * _MB  # of a package with a line of its own
_PROJECT = Path(__file__).parents[1] / "pyproject.toml"
_SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--python", type=Path, metavar="FILE", help="the Python of the environment (default: this one)")


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    python = args.python or sys.executable
    site = Path(subprocess.run([python, "-c", _SITE], check=True, capture_output=True, text=True).stdout.strip())
    needs = tomllib.loads(_PROJECT.read_text())["project"]["dependencies"]
    packages = {str(canonicalize_name(each.name)): each for each in metadata.distributions(path=[str(site)])}
    base, fixed = closure(needs, packages), closure(FIXED, packages)
    plain, compiled = sizes(site, packages)

    table = Table(title="Base install on the disk, MB (2^20 bytes)")
    table.add_column("package")
    for column in ("files", "bytecode"):
        table.add_column(column, justify="right")
    table.add_column("needed by")

    def line(label: str, names: Iterable[str], why: str = "") -> None:
        chosen = list(names)
        table.add_row(label, *(f"{sum(each[name] for name in chosen) / _MB:,.0f}" for each in (plain, compiled)), why)

    reasons = ("jax, flax, orbax or grpcio", "jaxserve alone")
    whose = {name: reasons[name not in fixed] for name in base}
    large = sorted((name for name in base if plain[name] >= _LEAST), key=lambda name: -plain[name])
    for name in large:
        line(f"{name} {packages[name].version}", [name], whose[name])
    for why in reasons:
        small = [name for name in base if whose[name] == why and name not in large]
        line(f"{len(small)} smaller ones", small, why)
    table.add_section()
    line(f"the least: {', '.join(FIXED)} and what they need", fixed)
    line("jaxserve's other requirements", base - fixed)
    line("in all", base)
    line("beside them, from `python -m venv`", {"pip", "setuptools"} & packages.keys())
    tables().print(table)
    return 0


def closure(needs: Iterable[str], packages: Mapping[str, metadata.Distribution]) -> set[str]:
    """The names of packages that requirements bring into an environment like this one, in all.

    Raises:
      ValueError: one of them is not installed.
    """
    found = set[tuple[str, frozenset[str]]]()
    wanted = [(Requirement(each), frozenset[str]()) for each in needs]
    while wanted:
        requirement, asked = wanted.pop()
        if requirement.marker is not None and not any(
            requirement.marker.evaluate({"extra": extra}) for extra in ("", *asked)
        ):
            continue
        name, extras = str(canonicalize_name(requirement.name)), frozenset(requirement.extras)
        if name not in packages:
            raise ValueError(f"{name} is needed and not installed in this environment")
        if (name, extras) not in found:
            found.add((name, extras))
            wanted += [(Requirement(each), extras) for each in packages[name].requires or []]
    return {name for name, _ in found}


def sizes(site: Path, packages: Mapping[str, metadata.Distribution]) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes on the disk of each package, with its folders: without bytecode, and of the bytecode."""
    plain, compiled = defaultdict[str, int](int), defaultdict[str, int](int)
    counted = set[Path]()
    for name, package in packages.items():
        for file in package.files or []:
            path = site / file
            if path.suffix == ".pyc":
                continue
            cached = path.parent / "__pycache__"
            bytecode = cached.glob(f"{path.stem}.*.pyc") if path.suffix == ".py" else ()
            inside = [each for each in (path.parent, *path.parent.parents) if site in each.parents]
            for paths, into in (((path, *inside), plain), ((*bytecode, cached), compiled)):
                for each in {*paths} - counted:
                    if each.exists():
                        into[name] += each.lstat().st_blocks * 512
                        counted.add(each)
    return plain, compiled
