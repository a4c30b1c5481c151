"""Stands in for packages that the engine's steps do not need, where they are not installed.

A machine with an accelerator often has JAX and little else. The engine's modules import packages for grammars, text and
servers at their top; the timed programs use none of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import ModuleType
from typing import Any

_PACKAGES = ("jaxtyping", "jinja2", "llguidance", "pydantic", "rich", "safetensors", "tokenizers")


class _Anything:
    """A class of an absent package: it can be named, subscripted and made, and does nothing."""

    def __init__(self, *args: Any, **settings: Any) -> None: ...

    def __class_getitem__(cls, item: Any) -> type:
        return cls


class _AbsentModule(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # it may have modules

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything


class _Finder:
    """Finds modules of absent packages."""

    def __init__(self, packages: set[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return spec_from_loader(name, self) if name.partition(".")[0] in self._packages else None  # pyright: ignore[reportArgumentType]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def stand_in(packages: Iterable[str] = _PACKAGES) -> list[str]:
    """Let absent packages be imported; returns which are absent."""
    absent = [name for name in packages if find_spec(name) is None]
    if absent:
        sys.meta_path.append(_Finder(set(absent)))  # pyright: ignore[reportArgumentType]
    return absent
