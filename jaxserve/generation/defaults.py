"""Reads a checkpoint's recommended sampling parameters, the defaults of requests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.sampling_params import SAMPLING_PARAMS

FILE = "generation_config.json"
_SAME_NAMES = [
    "temperature",
    "repetition_penalty",
    *(name for name, param in SAMPLING_PARAMS.items() if param.truncates),
]
_OUR_NAMES = {name: name for name in _SAME_NAMES} | {"max_new_tokens": "max_tokens"}


def read(directory: str | Path, config: EngineConfig) -> dict[str, Any]:
    """The parameters of generation_config.json that differ from the defaults of SamplingParams.

    An explicit `do_sample: false` makes requests greedy. Empty if there is no file, or `config` ignores it.

    Raises:
      ValueError: the file cannot be read, or a parameter in it has a wrong value.
    """
    file = Path(directory) / FILE
    if config.generation_config == "off" or not file.is_file():
        return {}
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        raise ValueError(f"{file} cannot be read: {problem}") from None
    if not isinstance(entries, dict):
        raise ValueError(f"{file} does not hold a JSON object")
    found: dict[str, Any] = {}
    for theirs, ours in _OUR_NAMES.items():
        value, param = entries.get(theirs), SAMPLING_PARAMS[ours]
        if value is None:
            continue
        if (problem := param.problem(value)) is not None:
            raise ValueError(f"{file}: {theirs} {problem} (--generation-config off ignores the file)")
        found[ours] = param.kind(value)
    if entries.get("do_sample") is False:
        found["temperature"] = 0.0
    return {name: value for name, value in found.items() if value != SAMPLING_PARAMS[name].default}


def for_beam_search(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults that apply to a beam search, which does not sample."""
    return {name: value for name, value in defaults.items() if name == "max_tokens"}


def describe(defaults: Mapping[str, Any]) -> str | None:
    """Describes the defaults in one line for the log; None if there are none."""
    if not defaults:
        return None
    listed = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
    return f"{FILE}: {listed} {'is the default' if len(defaults) == 1 else 'are the defaults'} of requests"
