"""Field metadata of settings, stated once for flags, parsers, schemas and docs."""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
import typing
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """One field of a dataclass of settings.

    Attributes:
      help: what the field does, in one phrase.
      default_help: what None or an unspecific default comes to, in words.
      minimum / maximum: limits of the value, or of each number in a tuple.
      exclusive: whether `minimum` itself is refused.
      max_items: most entries of a tuple.
      metavar: placeholder in the help of the flag.
      group: the heading in the help under which the flag is; "" leaves it to the command.
      flag: spelling of the flag, by default the name with dashes; `--no-...` sets a bool to false.
      none: word that stands for None on the command line.
      is_duration: whether the value is in seconds and written with a unit.
      is_size: whether the value is in bytes and may be written with a unit.
      truncates: whether the sampling parameter drops unlikely tokens before one is drawn.
      beam_search: whether the sampling parameter can be combined with beam search.
      in_tgi: whether TGI has the sampling parameter under the same name.
      name / kind / is_optional / default: of the dataclass's field; `kind` leaves out None.
    """

    help: str
    default_help: str | None = None
    minimum: float | None = None
    maximum: float | None = None
    exclusive: bool = False
    max_items: int | None = None
    metavar: str | None = None
    group: str = ""
    flag: str = ""
    none: str | None = None
    is_duration: bool = False
    is_size: bool = False
    truncates: bool = False
    beam_search: bool = False
    in_tgi: bool = False
    name: str = ""
    kind: Any = None
    is_optional: bool = False
    default: Any = None

    def problem(self, value: object) -> str | None:
        """Why a value is refused ("is 0; it must be a whole number of at least 1"); None if valid."""
        if value is self.default or (value is None and self.is_optional):
            return None
        if typing.get_origin(self.kind) is Literal:
            choices = typing.get_args(self.kind)
            expected = f"{', '.join(choices)} or None" if self.is_optional else f"one of {', '.join(choices)}"
            return None if value in choices else f"is {value!r}; it must be {expected}"
        if typing.get_origin(self.kind) is tuple:
            return self._tuple_problem(value)
        if self.kind is bool:
            return None if isinstance(value, bool) else f"is {value!r}; it must be true or false"
        if self.kind in (int, float):
            return self._number_problem(self.kind, value)
        if isinstance(value, self.kind):
            return None
        return f"is a {type(value).__name__}; it must be a {self.kind.__name__}"

    def _tuple_problem(self, values: Any) -> str | None:
        if isinstance(values, str) or not isinstance(values, Collection):
            return f"is {values!r}; it must be a list"
        if self.max_items is not None and len(values) > self.max_items:
            return f"has {len(values)} entries; at most {self.max_items} are allowed"
        kind = typing.get_args(self.kind)[0]
        if kind is str:
            if any(not isinstance(value, str) or not value for value in values):
                return f"is {list(values)!r}; every entry must be a non-empty str"
            return None
        if kind is int:
            found = (self._number_problem(int, value) for value in values)
        else:  # (token id, number)
            token = dataclasses.replace(self, minimum=0, maximum=None)
            found = (token._number_problem(int, id) or self._number_problem(float, number) for id, number in values)
        return next(filter(None, found), None)

    def _number_problem(self, kind: type, value: Any) -> str | None:
        low, high = self.minimum, self.maximum
        if kind is int:
            fits = isinstance(value, int) and (low is None or value >= low) and (high is None or value <= high)
            if fits and not isinstance(value, bool):
                return None
            limit = "" if low is None else f" of at least {low}" if high is None else f" from {low} to {high}"
            return f"is {value!r}; it must be a whole number{limit}"
        largest = sys.float_info.max  # math.isfinite raises on whole numbers beyond a float's range
        if isinstance(value, bool) or not isinstance(value, int | float) or not -largest <= value <= largest:
            return f"is {value!r}; it must be a finite number"
        is_low = low is not None and (value < low or (self.exclusive and value == low))
        if not is_low and (high is None or value <= high):
            return None
        above = f"above {low:g}" if self.exclusive else f"at least {low:g}"
        return f"is {value!r}; it must be {above}" + ("" if high is None else f" and at most {high:g}")


def param(default: Any, help: str, **settings: Any) -> Any:
    """A dataclass field with a `Param`; `settings` are the Param's attributes."""
    return dataclasses.field(default=default, metadata={"param": Param(help=help, **settings)})


@functools.cache
def params(cls: type) -> dict[str, Param]:
    """The fields of a dataclass that have a `Param`, by name."""
    hints = typing.get_type_hints(cls)
    found = {}
    for field in dataclasses.fields(cls):
        if "param" not in field.metadata:
            continue
        kind, is_optional = hints[field.name], False
        if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
            (kind,) = (each for each in typing.get_args(kind) if each is not types.NoneType)
            is_optional = True
        given: Param = field.metadata["param"]
        flag = given.flag or "--" + field.name.replace("_", "-")
        found[field.name] = dataclasses.replace(
            given, name=field.name, flag=flag, kind=kind, is_optional=is_optional, default=field.default
        )
    return found
