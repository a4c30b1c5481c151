"""Settings of a command from its flags, the environment and a TOML file.

The parser's flags define the names, types and defaults. `--max-rows 8` on the command line, `JAXSERVE_MAX_ROWS=8` in
the environment and `max-rows = 8` in the file named by `--config` set the same value; the first of them wins. No other
module reads settings from the environment. A secret is no setting: it is in a file, or in a variable of its own.
"""

from __future__ import annotations

import argparse
import difflib
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from server.commands import other_names

PREFIX = "JAXSERVE_"
HOSTS_SECRET = f"{PREFIX}HOSTS_SECRET_VALUE"  # the secret itself; `--hosts-secret` names a file

_UNSET: Any = object()
_ITSELF = ("help", "config", "print_config")  # flags that are not settings


class Setting(NamedTuple):
    """The effective value of one setting.

    Attributes:
      name: as in the file: the flag without its dashes.
      value: None where the program chooses.
      source: `flag`, the environment variable, the file, or `default`.
    """

    name: str
    value: Any
    source: str


class SettingsParser(argparse.ArgumentParser):
    """A parser that, if `layered`, reads missing flags from the environment and `--config FILE`.

    The namespace then has `settings`, a list of Setting in the order of the flags.
    """

    def __init__(self, *args: Any, layered: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._layered = layered

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not self._layered:
            return self._known(*super().parse_known_args(args, namespace))
        actions = list(self._settings())
        given = argparse.Namespace(**{action.dest: _UNSET for action in actions}, config=None)
        namespace, rest = self._known(*super().parse_known_args(args, given))
        path = namespace.config or os.environ.get(f"{PREFIX}CONFIG")
        try:
            variables = _from_environment(actions, os.environ)
            file = _from_file(actions, Path(path)) if path else {}
        except ValueError as problem:
            self.error(str(problem))
        namespace.settings = []
        for action in actions:
            value, source = getattr(namespace, action.dest), "flag"
            if value is _UNSET:
                default = (action.default, "default")
                value, source = variables.get(action.dest) or file.get(action.dest) or default
                setattr(namespace, action.dest, value)
            namespace.settings.append(Setting(_name(action), value, source))
        return namespace, rest

    def _known(self, namespace: Any, rest: list[str]) -> tuple[Any, list[str]]:
        """Ends the program with a hint if there are arguments that the command does not have."""
        if rest:
            flag = rest[0].partition("=")[0]
            names = [name for action in self._actions for name in action.option_strings]
            near = other_names.hint(flag, names, other_names.FLAGS)
            if not near and not flag.startswith("-") and "--model" in names:
                near = " (did you mean --model?)"
            self.error(f"unknown argument {rest[0]}{near}")
        return namespace, rest

    def _settings(self) -> Iterator[argparse.Action]:
        return (action for action in self._actions if action.option_strings and action.dest not in _ITSELF)


def add_flags(parser: Any) -> None:
    parser.add_argument(
        "--config", metavar="FILE.toml", help="read settings from here; flags and JAXSERVE_ variables override it"
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print every setting and its source as TOML, and exit"
    )


def as_toml(settings: Iterable[Setting]) -> str:
    """The settings as a file for `--config`. No setting is a secret: keys have their own files."""
    lines = []
    for name, value, source in settings:
        text = f"# {name} is not set" if value is None else f"{name} = {_toml(name, value)}"
        lines.append(f"{text}  # {source}\n")
    return "".join(lines)


def _name(action: argparse.Action) -> str:
    return action.option_strings[-1].removeprefix("--")


def _from_environment(actions: Iterable[argparse.Action], environment: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """Values by destination. Raises ValueError for an unknown variable or a wrong value."""
    known = {PREFIX + _name(action).replace("-", "_").upper(): action for action in actions}
    found = {}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or variable in (f"{PREFIX}CONFIG", HOSTS_SECRET):
            continue
        if variable not in known:
            raise ValueError(f"the environment variable {variable} is not a setting{_nearest(variable, known)}")
        action, value = known[variable], text
        if action.nargs == 0:
            if text.lower() not in ("true", "false", "1", "0"):
                raise ValueError(f"{variable} is {text!r}; it must be true or false")
            value = text.lower() in ("true", "1")
        found[action.dest] = (_convert(action, value, variable), variable)
    return found


def _from_file(actions: Iterable[argparse.Action], path: Path) -> dict[str, tuple[Any, str]]:
    """Values by destination. Raises ValueError for a file that is wrong or cannot be read."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise ValueError(f"{path}: the settings cannot be read: {problem.strerror}") from None
    except ValueError as problem:
        raise ValueError(f"{path}: not TOML: {problem}") from None
    known = {_name(action): action for action in actions}
    found = {}
    for name, value in content.items():
        if name not in known:
            raise ValueError(f"{path}: {name} is not a setting{_nearest(name, known)}")
        found[known[name].dest] = (_convert(known[name], value, f"{path}: {name}"), str(path))
    return found


def _convert(action: argparse.Action, value: Any, where: str) -> Any:
    """The value as the flag would convert it."""
    if action.nargs == 0 or isinstance(value, bool):
        if action.nargs != 0 or not isinstance(value, bool):
            raise ValueError(f"{where} is {value!r}; it must be {_kind(action)}")
        return value
    if action.nargs == "+":
        texts = value.split() if isinstance(value, str) else value
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{where} is {value!r}; it must be a list of strings")
        return texts
    if isinstance(value, list) and action.type not in (None, str):
        value = ",".join(map(str, value))
    if not isinstance(value, str | int | float):
        raise ValueError(f"{where} is {value!r}; it must be {_kind(action)}")
    try:
        converted = action.type(str(value)) if callable(action.type) else str(value)
    except argparse.ArgumentTypeError as problem:
        raise ValueError(f"{where}: {problem}") from None
    except ValueError:
        raise ValueError(f"{where} is {value!r}; it must be {_kind(action)}") from None
    if action.choices is not None and converted not in action.choices:
        raise ValueError(f"{where} is {value!r}; it must be {_kind(action)}")
    return converted


def _kind(action: argparse.Action) -> str:
    if action.nargs == 0:
        return "true or false"
    if action.choices is not None:
        return f"one of {', '.join(map(str, action.choices))}"
    kinds = {int: "a whole number", float: "a number"}
    return kinds.get(action.type, f"a value that --{_name(action)} takes")  # pyright: ignore[reportArgumentType]


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


def _toml(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return f"[{', '.join(_toml(name, each) for each in value)}]"
    if name == "target-tpot":  # the one setting with a unit
        return f'"{value!r}s"'
    if isinstance(value, int | float):
        return repr(value)
    escaped = "".join(f"\\u{ord(c):04x}" if c < " " or c in '"\\\x7f' else c for c in str(value))
    return f'"{escaped}"'
