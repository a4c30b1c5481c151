"""Writes a plan as one self-contained HTML page with a diagram."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jaxserve.plan.tables import Section, as_json


def write(path: Path, headline: str, summary: str, plan: dict[str, Any], tables: Sequence[Section]) -> None:
    """Write the page of a plan.

    Args:
      headline: the deployment in one line.
      summary: the most important finding, in one sentence.
      plan: the result of `plan_report.plan_json`.
      tables: what it shows below the diagrams.
    """
    text = resources.files("jaxserve.plan").joinpath("page.html").read_text(encoding="utf-8")
    data = json.dumps(plan | {"tables": as_json(tuple(tables))}).replace(
        "</", "<\\/"
    )  # a script element ends at the first </script>
    for mark, value in (("HEADLINE", html.escape(headline)), ("SUMMARY", html.escape(summary)), ("PLAN", data)):
        text = text.replace(f"%%{mark}%%", value)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
