"""Entries that a config.json leaves out mean what they mean in the transformers library."""

import json
from pathlib import Path

import pytest

from jaxserve import models

DEFAULTS = json.loads((Path(__file__).parents[2] / "fixtures" / "defaults.json").read_text())


@pytest.mark.parametrize("case", DEFAULTS.values(), ids=list(DEFAULTS))
def test_defaults_are_those_of_the_library(case):
    assert models.parse_config(case["minimal"]) == models.parse_config(case["library"])


@pytest.mark.parametrize("family", models.families())
def test_what_has_no_default_must_be_said(family):
    minimal = DEFAULTS[family]["minimal"]
    for name in minimal:
        with pytest.raises(ValueError, match="is missing"):
            models.parse_config({entry: value for entry, value in minimal.items() if entry != name})
