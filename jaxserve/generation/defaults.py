"""Sampling parameters that a checkpoint recommends, for requests that do not give their own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.sampling_params import SAMPLING_PARAMS

FILE = "generation_config.json"
_SAME = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
_OURS = {name: name for name in _SAME} | {"max_new_tokens": "max_tokens"}  # their names -> ours


def read(directory: str | Path, config: EngineConfig) -> dict[str, Any]:
    """The parameters of a checkpoint's generation_config.json that differ from those of SamplingParams.

    An explicit `do_sample: false` makes requests greedy. Empty without the file, or if `config` leaves it aside.

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
        raise ValueError(f"{file} holds no JSON object")
    found: dict[str, Any] = {}
    for theirs, ours in _OURS.items():
        value, param = entries.get(theirs), SAMPLING_PARAMS[ours]
        if value is None:
            continue
        if (problem := param.problem(value)) is not None:
            raise ValueError(f"{file}: {theirs} {problem} (--generation-config off leaves the file aside)")
        found[ours] = param.kind(value)
    if entries.get("do_sample") is False:
        found["temperature"] = 0.0
    return {name: value for name, value in found.items() if value != SAMPLING_PARAMS[name].default}


def of_beams(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the parameters that hold for a beam search, which draws nothing."""
    return {name: value for name, value in defaults.items() if name == "max_tokens"}


def describe(defaults: Mapping[str, Any]) -> str | None:
    """One line for the user; None without defaults."""
    if not defaults:
        return None
    listed = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
    return f"{FILE}: {listed} {'is the default' if len(defaults) == 1 else 'are the defaults'} of requests"
