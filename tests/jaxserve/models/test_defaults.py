"""Entries that a config.json leaves out mean what they mean in the transformers library."""

import dataclasses
import json
from pathlib import Path

import pytest

from jaxserve import models
from jaxserve.planning import model_catalog

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


def test_the_text_model_of_gemma_3_with_images():
    """The config.json of gemma-3-27b-it, which leaves out the vocabulary and the positions."""
    text = {
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "model_type": "gemma3_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    found = models.parse_config({"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]})
    assert found == dataclasses.replace(model_catalog.find("gemma-3-27b")[1], eos_token_ids=(1, 106))
    with pytest.raises(ValueError, match="text_config is 3; it must be an object"):
        models.parse_config({"model_type": "gemma3", "text_config": 3})
