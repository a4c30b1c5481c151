"""What an install takes on the disk: whose files are counted, and with what."""

import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks.sizes import FIXED, closure, sizes


def install(site: Path, name: str, files: dict[str, int], *requires: str) -> None:
    """Writes files of so many bytes, and what pip would have written of them."""
    about = site / f"{name}-1.0.dist-info"
    about.mkdir()
    lines = "".join(f"Requires-Dist: {each}\n" for each in requires)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{lines}")
    for file, size in files.items():
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_bytes(b"x" * size)
    (about / "RECORD").write_text(
        "".join(f"{file},,\n" for file in [*files, *(f"{about.name}/{each}" for each in ("METADATA", "RECORD"))])
    )


@pytest.fixture
def packages(tmp_path: Path) -> dict[str, metadata.Distribution]:
    install(tmp_path, "a", {"a/__init__.py": 5000, "shared/a.py": 1}, "b[more]", "d ; extra == 'unasked'")
    install(tmp_path, "b", {"b/deep/b.so": 100_000, "shared/b.py": 1}, "c ; extra == 'more'", "e ; sys_platform == 'x'")
    install(tmp_path, "c", {"c.py": 1}, "a")
    install(tmp_path, "d", {"d.py": 1})
    (tmp_path / "a" / "__pycache__").mkdir()
    (tmp_path / "a" / "__pycache__" / "__init__.cpython-311.pyc").write_bytes(b"x" * 9000)
    return {each.name: each for each in metadata.distributions(path=[str(tmp_path)])}


def test_extras_and_markers_are_followed(packages: dict[str, metadata.Distribution]) -> None:
    assert closure(["a"], packages) == {"a", "b", "c"}
    assert closure(["b"], packages) == {"b"}
    assert closure(["d"], packages) == {"d"}
    with pytest.raises(ValueError, match="e is needed and not installed"):
        closure(["e"], packages)


def test_files_are_counted_as_du_does(packages: dict[str, metadata.Distribution], tmp_path: Path) -> None:
    plain, compiled = sizes(tmp_path, packages)

    def du(*paths: str) -> int:
        done = subprocess.run(["du", "-s", "-B1", *paths], cwd=tmp_path, check=True, capture_output=True, text=True)
        return sum(int(line.split()[0]) for line in done.stdout.splitlines())

    assert compiled == {"a": du("a/__pycache__")}
    assert sum(plain.values()) + sum(compiled.values()) == du(*(path.name for path in tmp_path.iterdir()))
    assert plain["b"] >= du("b")
    assert plain["d"] == du("d.py", "d-1.0.dist-info")


@pytest.mark.bench
def test_the_table_tells_the_least(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmarks.main(["sizes"]) == 0
    said = capsys.readouterr().out
    assert f"the least: {', '.join(FIXED)} and what they need" in said
    assert "jaxlib" in said
