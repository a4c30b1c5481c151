"""A Griffe extension: fields made by `param(default, help, ...)` are documented by their metadata."""

import ast
import re
from typing import Any

import griffe


class ParamDocs(griffe.Extension):
    """Gives each such field its default as its value, and its help, default and limits as its docstring."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        value = attr.value
        if not isinstance(value, griffe.ExprCall) or str(value.function) != "param":
            return
        default, help_text, *_rest = value.arguments
        settings = {each.name: each.value for each in value.arguments if isinstance(each, griffe.ExprKeyword)}
        text = _capitalized(_text(help_text)) + "."
        if "default_help" in settings:
            text += f" Default: {_text(settings['default_help'])}."
        if choices := _choices(attr):
            text += f" One of {choices}."
        limits = [f"{name} {settings[name]}" for name in ("minimum", "maximum") if name in settings]
        if limits:
            text += f" Limits: {', '.join(limits)}{' (excluded)' if 'exclusive' in settings else ''}."
        attr.value = default
        attr.docstring = griffe.Docstring(text, parent=attr)


def _choices(attr: griffe.Attribute) -> str:
    """The values that an alias of Literal in the annotation allows."""
    for name in re.findall(r"[A-Z]\w+Name", str(attr.annotation)):
        alias = attr.module.members.get(name)
        if isinstance(alias, griffe.Attribute) and str(alias.value).startswith("Literal["):
            values = ast.literal_eval(f"[{str(alias.value)[len('Literal[') : -1]}]")
            return ", ".join(f"`{value}`" for value in values)
    return ""


def _text(expression: Any) -> str:
    return str(ast.literal_eval(str(expression)))


def _capitalized(text: str) -> str:
    first = text.split(" ")[0].rstrip(":")
    return text if first in ("auto", "request", "reserve") or not text else text[0].upper() + text[1:]
