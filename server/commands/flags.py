"""Command-line flags of engine settings and sampling parameters, from field metadata."""

from __future__ import annotations

import argparse
import json
import math
import typing
from functools import partial
from pathlib import Path
from typing import Any

from jaxserve.config import ENGINE_PARAMS, EngineConfig
from jaxserve.fields import Param
from jaxserve.runner import cache_folder
from jaxserve.sampling_params import SAMPLING_PARAMS

_CACHE = str(cache_folder.default())
# Defaults of flags that differ from those of the settings.
_FLAG_DEFAULTS = {"slot_policy": None, "compilation_cache": _CACHE}
_METAVARS = {int: "N", float: "X", tuple[str, ...]: "TEXT", tuple[int, ...]: "1,2,..."}


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for every engine setting; `engine_config` reads them."""
    group = parser.add_argument_group("engine")
    for name, param in ENGINE_PARAMS.items():
        default = _FLAG_DEFAULTS.get(name, param.default)
        if param.kind is bool and (_is_negated(param) or not param.default):
            group.add_argument(_flag(param), action="store_true", help=param.help)
        elif param.kind is bool:
            choices = ("on", "off")
            group.add_argument(_flag(param), choices=choices, default=choices[0], help=_help(param, "%(default)s"))
        elif typing.get_origin(param.kind) is typing.Literal:
            choices = typing.get_args(param.kind)
            group.add_argument(_flag(param), choices=choices, default=default, help=_help(param, "%(default)s"))
        else:
            shown = None if default is None else "%(default)s"
            group.add_argument(
                _flag(param), type=_reader(param), metavar=param.metavar, default=default, help=_help(param, shown)
            )


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The configuration in the engine flags. Raises ValueError, naming a wrong setting."""
    values = {name: _setting(args, param) for name, param in ENGINE_PARAMS.items()}
    values["slot_policy"] = values["slot_policy"] or ("reserve" if args.deterministic else EngineConfig().slot_policy)
    return EngineConfig(**values)


def engine_arguments(config: EngineConfig) -> list[str]:
    """The engine flags that describe a configuration, where it differs from the default."""
    arguments = []
    for name, param in ENGINE_PARAMS.items():
        value, flag = getattr(config, name), _flag(param)
        if value == param.default:
            continue
        if param.kind is bool and (_is_negated(param) or not param.default):
            arguments.append(flag)
        elif param.kind is bool:
            arguments += [flag, "on" if value else "off"]
        elif isinstance(value, tuple):
            arguments += [flag, ",".join(map(str, value))]
        else:
            arguments += [flag, str(param.none if value is None else value) + "s" * param.is_duration]
    return arguments


def _setting(args: argparse.Namespace, param: Param) -> Any:
    value = getattr(args, _flag(param).removeprefix("--").replace("-", "_"))
    if param.none is not None and value == param.none:
        return None
    if param.kind is bool and isinstance(value, str):
        return value == "on"
    return not value if _is_negated(param) else value


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for every sampling parameter; `sampling_fields` reads them."""
    group = parser.add_argument_group("sampling", "Defaults for input lines that do not say otherwise.")
    for name, param in SAMPLING_PARAMS.items():
        if name == "grammar":
            _add_grammar_flags(group)
        elif param.kind is bool:
            group.add_argument(_flag(param), action="store_true", default=None, help=param.help)
        elif param.kind == tuple[str, ...]:
            group.add_argument(_flag(param), action="append", metavar=_METAVARS[param.kind], help=param.help)
        else:
            read, metavar = (_bias, '{"ID": X}') if name == "logit_bias" else (_reader(param), _METAVARS[param.kind])
            shown = None if param.default in ((), None) else f"{param.default:g}"
            group.add_argument(_flag(param), type=read, metavar=metavar, help=_help(param, shown))


def _add_grammar_flags(group: Any) -> None:
    grammar = group.add_mutually_exclusive_group()
    for flag, kind, text in (
        ("--json-schema", "json_schema", "the text is JSON that this schema describes; @FILE reads it from a file"),
        ("--regex", "regex", "the whole text matches this regular expression"),
        ("--lark", "lark", "the text matches this grammar (Lark or GBNF); @FILE reads it from a file"),
    ):
        grammar.add_argument(
            flag,
            dest="grammar",
            type=partial(_grammar, kind),
            metavar="TEXT" if kind == "regex" else "TEXT|@FILE",
            help=text,
        )
    grammar.add_argument(
        "--json-object",
        dest="grammar",
        action="store_const",
        const={"type": "json_object"},
        help="the text is a JSON object",
    )
    grammar.add_argument("--choice", dest="grammar", type=_choice, metavar="A,B,...", help="the text is one of these")


def sampling_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given, in the form of an input line."""
    return {name: getattr(args, name) for name in SAMPLING_PARAMS if getattr(args, name) is not None}


def _flag(param: Param) -> str:
    return param.flag or "--" + param.name.replace("_", "-")


def _is_negated(param: Param) -> bool:
    return _flag(param).startswith("--no-")


def _help(param: Param, default: str | None) -> str:
    default = param.default_help or default
    return param.help if default is None else f"{param.help} (default: {default})"


def _reader(param: Param) -> Any:
    """A function that converts the text of a flag to the type of the parameter."""
    if param.is_duration:
        return duration
    if param.kind == tuple[int, ...]:
        return partial(_integers, none=param.none)
    return param.kind


def _integers(text: str, none: str | None = None) -> tuple[int, ...] | str:
    if text == none:
        return text
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        expected = "not a list such as 16,32,64" if none is None else f"neither {none} nor a list such as 16,32,64"
        raise argparse.ArgumentTypeError(f"{text!r} is {expected}") from None


def duration(text: str) -> float:
    """Seconds in a text such as `1.5s` or `100ms`."""
    for unit, scale in (("ms", 1e-3), ("s", 1.0)):
        if text.endswith(unit):
            try:
                seconds = float(text.removesuffix(unit)) * scale
            except ValueError:
                break
            if 0 < seconds < math.inf:
                return seconds
            break
    raise argparse.ArgumentTypeError(f"{text!r} is not a time above 0 such as 100ms or 1.5s")


def _grammar(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "value": text if kind == "regex" else text_or_file(text)}


def text_or_file(text: str) -> str:
    """A flag's text; for @FILE, the text of that file."""
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except (OSError, ValueError) as problem:
        raise argparse.ArgumentTypeError(f"{text[1:]} cannot be read: {problem}") from None


def _choice(text: str) -> dict[str, Any]:
    return {"type": "choice", "value": text.split(",")}


def _bias(text: str) -> dict[str, float]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not an object such as {{"50": -100}}')
    return value
