"""Runs tests on every supported Python that is here: `python -m tests.pythons [--whole] [VERSION ...]`.

The versions are those of pyproject.toml. Each has an environment of its own, `.venv-VERSION`, which is made on first
use: on Python 3.11 with the pins of requirements-dev.txt, on later ones with the newest versions that are supported
(requirements-newest.txt). A version that is not here is told. Without arguments, the version of this Python is left to
`make test`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Parts that say much in two minutes on two cores: what is imported, an engine, its weights and kernels, and a server.
QUICK = (
    "tests/test_imports.py",
    "tests/jaxserve/test_package.py",
    "tests/jaxserve/generation",
    "tests/jaxserve/sampling",
    "tests/jaxserve/text",
    "tests/jaxserve/weights",
    "tests/pallas_kernels/test_cpu.py",
    "tests/server/http",
    "tests/server/test_features_served.py",
)


def versions() -> list[str]:
    """The Python versions that pyproject.toml claims."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    said = [each.rpartition(" :: ")[2] for each in project["classifiers"] if "Python :: 3." in each]
    assert said
    return said


def interpreter(version: str) -> str | None:
    """A Python of this version: on the PATH, or one of pyenv's, whose shims may stand for one that is not active."""
    kept = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
    for python in filter(None, [shutil.which(f"python{version}"), *map(str, kept)]):
        asked = [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        if subprocess.run(asked, capture_output=True, text=True).stdout.strip() == version:
            return python
    return None


def environment(version: str, python: str) -> Path:
    """The Python of a version's environment. Raises CalledProcessError if it cannot be made."""
    folder = ROOT / f".venv-{version}"
    requirements = ROOT / ("requirements-dev.txt" if version == "3.11" else "requirements-newest.txt")
    installed, stamp = folder / "bin" / "python", folder / "installed"
    wanted = hashlib.sha256(requirements.read_bytes()).hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
        subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
        pip = [installed, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", requirements]
        subprocess.run(pip, check=True)
        subprocess.run([installed, "-m", "pip", "check"], check=True)
        subprocess.run([*pip[:-2], "--no-deps", "--editable", ROOT], check=True)
        stamp.write_text(wanted)
    return installed


def run(version: str, arguments: Sequence[str]) -> str:
    """What came of the tests on a version: "passed", "FAILED", or why nothing ran."""
    python = interpreter(version)
    if python is None:
        return "NOT TESTED: it is not here"
    try:
        installed = environment(version, python)
    except subprocess.CalledProcessError as error:
        return f"FAILED: no environment ({error})"
    print(f"== Python {version} ({python})", flush=True)
    code = subprocess.run(
        [installed, "-m", "pytest", "-n", "2", *arguments], cwd=ROOT, env={**os.environ, "CHECK_SHAPES": "1"}
    ).returncode
    return "passed" if code == 0 else f"FAILED (exit code {code})"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.pythons", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--whole", action="store_true", help="what `make test` runs, in place of a part")
    parser.add_argument(
        "version", nargs="*", choices=[*versions(), []], help="default: all that are supported but this"
    )
    asked, this = parser.parse_args(), "{}.{}".format(*sys.version_info)
    others = [version for version in versions() if version != this]
    results = {version: run(version, () if asked.whole else QUICK) for version in asked.version or others}
    for version, result in results.items():
        print(f"Python {version}: {result}")
    return int(any(result.startswith("FAILED") for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
