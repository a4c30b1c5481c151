"""The README, CONTRIBUTING and docs/: paths, links, commands and flags that they name exist; lines are short."""

import re
from pathlib import Path

import pytest

import benchmarks.__main__
from server.commands.bench import cli as bench
from tests.docs.test_features import flags_of

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "deploy/README.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md")) + sorted((ROOT / "benchmarks" / "results").glob("*.md"))
FOLDERS = "benchmarks|deploy|docs|examples|jaxserve|pallas_kernels|server|sharding|tests"
PATH = re.compile(rf"(?:(?:{FOLDERS})(?:/[\w.-]+)+|\.ci/run)/?")
COLUMNS, README_LINES = 100, 150


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return prose_of(page.read_text(encoding="utf-8"))


def prose_of(text: str) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What links to a page's headings end in, on GitHub and on the site."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
class TestPage:
    def test_paths_exist(self, page: Path) -> None:
        for name in spans(prose(page)):
            if PATH.fullmatch(name):  # the tables of features.md count from tests/
                assert (ROOT / name).exists() or (ROOT / "tests" / name).exists(), name

    def test_links_lead_somewhere(self, page: Path) -> None:
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
            if target.startswith("http"):
                continue
            name, _, anchor = target.partition("#")
            file = page.parent / name if name else page
            assert file.exists(), target
            assert not anchor or anchor in anchors(file), target

    def test_make_targets_exist(self, page: Path) -> None:
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        for name in re.findall(r"\bmake ([a-z][a-z-]+)`", prose(page)):
            assert re.search(rf"^{name}:", makefile, re.MULTILINE), name

    def test_lines_are_short(self, page: Path) -> None:
        for line in prose(page).splitlines():
            # A table's row or a picture cannot be broken, nor can a single word.
            if not line.startswith(("|", "![")) and " " in line[:COLUMNS].strip(" *"):
                assert len(line) <= COLUMNS, line


def test_page_on_models_shows_the_files() -> None:
    page = (ROOT / "docs" / "add-a-model.md").read_text(encoding="utf-8")
    before, *blocks = re.split(r"^```python\n", page, flags=re.MULTILINE)
    assert len(blocks) > 8
    for block in blocks:
        code, _, after = block.partition("\n```\n")
        file = [name for name in spans(prose_of(before)) if name.endswith(".py") and PATH.fullmatch(name)][-1]
        assert code in (ROOT / file).read_text(encoding="utf-8"), (file, code)
        before = after


def test_pictures_are_shown() -> None:
    shown = {
        (page.parent / target).resolve()
        for page in PAGES
        for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", prose(page))
    }
    assert {path for kind in ("png", "svg") for path in (ROOT / "docs").rglob(f"*.{kind}")} <= shown


def test_readme_fits() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= README_LINES


def test_readme_flags_exist() -> None:
    section = (
        (ROOT / "README.md").read_text(encoding="utf-8").split("\n## Coming from vLLM or TGI\n")[1].split("\n## ")[0]
    )
    ours = {flag for line in section.splitlines() for flag in re.findall(r"--[a-z][a-z-]+", line.split("|")[-2:][0])}
    assert len(ours) > 15
    assert ours <= flags_of("serve")


def test_benchmarks_exist() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for name in re.findall(r"python -m benchmarks ([a-z]+)", text):
            assert name in benchmarks.__main__.BENCHMARKS, f"{page.name}: {name}"
        for name in re.findall(r"jaxserve bench ([a-z]+)", text):
            assert name in bench.BENCHMARKS or page.parent.name == "results", f"{page.name}: {name}"
