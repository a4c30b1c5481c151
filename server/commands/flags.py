"""Command-line flags of settings, from their field metadata (`jaxserve.fields.Param`)."""

from __future__ import annotations

import argparse
import math
import re
import typing
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jaxserve.config import ENGINE_PARAMS, EngineConfig
from jaxserve.fields import Param
from jaxserve.runner import cache_folder

_KINDS = {int: "a whole number", tuple[int, ...]: "a list such as 16,32,64"}
# Defaults of engine flags that differ from those of the settings.
_ENGINE_DEFAULTS = {"slot_policy": None, "compilation_cache": str(cache_folder.default())}


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for every engine setting; `engine_config` reads them."""
    for title in ("model", "engine", "devices"):
        for name, param in ENGINE_PARAMS.items():
            if (param.group or "engine") == title:
                changes = {"default": _ENGINE_DEFAULTS[name]} if name in _ENGINE_DEFAULTS else {}
                add(group(parser, title), param, **changes)


def group(parser: argparse.ArgumentParser, title: str) -> Any:
    """The group of flags with this heading, which is added if it is new."""
    found = [each for each in parser._action_groups if each.title == title]
    return found[0] if found else parser.add_argument_group(title)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The configuration in the engine flags. Raises ValueError, naming a wrong setting."""
    return EngineConfig(**engine_settings(args))


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of the configuration, by name, as the engine flags have them."""
    values = read(args, ENGINE_PARAMS)
    values["slot_policy"] = values["slot_policy"] or ("reserve" if args.deterministic else EngineConfig().slot_policy)
    return values


def add(group: Any, param: Param, **changes: Any) -> None:
    """Adds the flag of one setting to a parser or a group of its flags.

    Args:
      changes: a default that differs from the setting's.
    """
    default = changes.get("default", param.default)
    shown = param.default_help or (None if default is None else "%(default)g" if param.kind is float else "%(default)s")
    text = param.help if shown is None else f"{param.help} (default: {shown})"
    settings: dict[str, Any] = {"help": text, "default": default}
    if is_switch(param):
        settings = {"help": param.help, "action": "store_true"}
    elif param.kind is bool:
        settings |= {"choices": ("on", "off"), "default": "on"}
    elif typing.get_origin(param.kind) is typing.Literal:
        settings["choices"] = typing.get_args(param.kind)
    else:
        settings |= {"type": reader(param), "metavar": param.metavar}
    group.add_argument(param.flag, **settings)


def read(args: argparse.Namespace, params: Mapping[str, Param]) -> dict[str, Any]:
    """The values of settings, by name, from their flags."""
    values = {}
    for name, param in params.items():
        value = getattr(args, param.flag.removeprefix("--").replace("-", "_"))
        if param.none is not None and value == param.none:
            value = None
        elif is_switch(param):
            value = value != param.default
        elif param.kind is bool:
            value = value == "on"
        values[name] = value
    return values


def is_switch(param: Param) -> bool:
    """Whether a flag without a value changes the setting."""
    return param.kind is bool and (param.flag.startswith("--no-") or not param.default)


def reader(param: Param) -> Callable[[str], Any]:
    """A function that converts the text of a flag to the type of the setting."""
    if param.is_duration:
        return duration
    if param.is_size:
        return size
    return param.kind if param.none is None and param.kind != tuple[int, ...] else partial(_value, param)


def _value(param: Param, text: str) -> Any:
    if text == param.none:
        return text
    try:
        return tuple(int(part) for part in text.split(",")) if param.kind == tuple[int, ...] else param.kind(text)
    except ValueError:
        kind = _KINDS[param.kind]
        expected = f"not {kind}" if param.none is None else f"neither {param.none} nor {kind}"
        raise argparse.ArgumentTypeError(f"{text!r} is {expected}") from None


def size(text: str) -> int:
    """Bytes in a text such as `64GiB`, `1.5TB` or `4096`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(?:([KMGT])(i?))?B?", text.strip())
    scale = found and (1024 if found[3] else 1000) ** " KMGT".index(found[2] or " ")
    if not found or not scale or int(float(found[1]) * scale) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size above 0 such as 64GiB or 500MB")
    return int(float(found[1]) * scale)


def duration(text: str) -> float:
    """Seconds in a text such as `1.5s`, `100ms` or `2h`."""
    for unit, scale in (("ms", 1e-3), ("s", 1.0), ("m", 60.0), ("h", 3600.0)):
        if text.endswith(unit):
            try:
                seconds = float(text.removesuffix(unit)) * scale
            except ValueError:
                break
            if 0 < seconds < math.inf:
                return seconds
            break
    raise argparse.ArgumentTypeError(f"{text!r} is not a time above 0 such as 100ms or 1.5s")
