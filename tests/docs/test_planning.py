"""The cells of docs/planning.md print what the page says."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

from tests.docs.test_features import blocks
from tests.fixtures import notebook

PAGE = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")


def test_planning_notebook_runs() -> None:
    pairs = [
        (code, shown)
        for (language, code), (after, shown) in itertools.pairwise(blocks(PAGE))
        if (language, after) == ("python", "")
    ]
    assert len(pairs) == PAGE.count("```python") == 7
    shown = asyncio.run(notebook.run([code for code, _ in pairs], {}))
    assert shown == [expected for _, expected in pairs]
