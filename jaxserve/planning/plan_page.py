"""Makes one self-contained HTML page of a plan, with diagrams."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

from jaxserve.planning.plan import Plan
from jaxserve.planning.plan_report import bottleneck, headline, spec_lines
from jaxserve.planning.tables import Section, as_json


def page(plan: Plan, values: dict[str, Any], tables: Sequence[Section]) -> str:
    """The page of a plan.

    Args:
      values: the result of `plan_report.plan_json`, for the diagrams.
      tables: the tables below the diagrams.
    """
    text = resources.files("jaxserve.planning").joinpath("page.html").read_text(encoding="utf-8")
    data = json.dumps(values | {"lines": spec_lines(plan), "tables": as_json(tuple(tables))})
    data = data.replace("</", "<\\/")  # a script element ends at the first </script>
    marks = {"HEADLINE": html.escape(headline(plan)), "SUMMARY": html.escape(bottleneck(plan)), "PLAN": data}
    for mark, value in marks.items():
        text = text.replace(f"%%{mark}%%", value)
    return text
