"""Command-line flags of a request: its prompt, its sampling parameters, and several answers."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

from jaxserve.sampling_params import SAMPLING_PARAMS
from server.commands import flags

_PROMPT = ("prompt", "messages", "add_generation_prompt")
_METAVARS = {int: "N", float: "X", tuple[str, ...]: "TEXT", tuple[int, ...]: "1,2,..."}


def add_flags(parser: argparse.ArgumentParser, source: Any) -> None:
    """Adds all flags except the prompt's text. `prompt`, `sampling` and `answers` read them.

    Args:
      source: the mutually exclusive group of prompt sources.
    """
    source.add_argument(
        "--messages",
        type=_messages,
        metavar="TEXT|@FILE",
        help="answer this chat, a JSON list of {role, content}, using the checkpoint's chat template; @FILE reads it "
        "from a file",
    )
    parser.add_argument(
        "--no-generation-prompt",
        dest="add_generation_prompt",
        action="store_false",
        default=None,
        help="continue the chat's last message instead of starting an answer",
    )
    _add_sampling_flags(parser)
    _add_answers_flags(parser)


def prompt(args: argparse.Namespace) -> dict[str, Any]:
    """The prompt's fields that were given, in the form of an input line."""
    return _given(args, _PROMPT)


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given, in the form of an input line."""
    return _given(args, SAMPLING_PARAMS)


def answers(args: argparse.Namespace) -> dict[str, Any]:
    """The given flags of several answers, by the field names of calls."""
    from jaxserve.generation import beam_search

    return _given(args, beam_search.FIELDS)


def _given(args: argparse.Namespace, names: Any) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def _add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling", "Defaults for input lines without these fields.")
    for name, param in SAMPLING_PARAMS.items():
        if name == "grammar":
            _add_grammar_flags(group)
        elif param.kind is bool:
            group.add_argument(param.flag, action="store_true", default=None, help=param.help)
        elif param.kind == tuple[str, ...]:
            group.add_argument(param.flag, action="append", metavar=_METAVARS[param.kind], help=param.help)
        else:
            read, metavar = flags.reader(param), _METAVARS.get(param.kind)
            if name == "logit_bias":
                read, metavar = _bias, '{"ID": X}'
            shown = param.default_help or (None if param.default in ((), None) else f"{param.default:g}")
            text = param.help if shown is None else f"{param.help} (default: {shown})"
            group.add_argument(param.flag, type=read, metavar=metavar, help=text)


def _add_grammar_flags(group: Any) -> None:
    grammar = group.add_mutually_exclusive_group()
    for kind, text in (
        ("json_schema", "the text is JSON that this schema describes; @FILE reads it from a file"),
        ("regex", "the whole text matches this regular expression"),
        ("lark", "the text matches this grammar (Lark or GBNF); @FILE reads it from a file"),
    ):
        metavar = "TEXT" if kind == "regex" else "TEXT|@FILE"
        flag, read = "--" + kind.replace("_", "-"), partial(_grammar, kind)
        grammar.add_argument(flag, dest="grammar", type=read, metavar=metavar, help=text)
    grammar.add_argument(
        "--json-object",
        dest="grammar",
        action="store_const",
        const={"type": "json_object"},
        help="the text is a JSON object",
    )
    read = partial(_grammar, "choice")
    grammar.add_argument("--choice", dest="grammar", type=read, metavar="A,B,...", help="the text is one of these")


def _add_answers_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several answers", "Answers are printed when all are complete.")
    group.add_argument("--n", type=int, metavar="N", help="number of answers (default: 1)")
    group.add_argument(
        "--best-of",
        type=int,
        metavar="N",
        help="number of samples, of which the --n with the highest mean logprob are printed; with --use-beam-search "
        "the number of beams (default: --n)",
    )
    group.add_argument(
        "--use-beam-search",
        action="store_true",
        default=None,
        help="search for the likeliest answers instead of sampling; best first",
    )
    group.add_argument(
        "--length-penalty",
        type=float,
        metavar="X",
        help="beam search divides an answer's logprob by its length to this power (default: 1)",
    )
    group.add_argument(
        "--early-stopping",
        action="store_true",
        default=None,
        help="end the search once as many answers as beams are complete",
    )


def _messages(text: str) -> list[dict[str, str]]:
    from jaxserve.generation import chat

    try:
        return chat.read(json.loads(_text_or_file(text)))
    except (ValueError, RecursionError) as problem:
        raise argparse.ArgumentTypeError(f"is not a chat: {problem}") from None


def _grammar(kind: str, text: str) -> dict[str, Any]:
    if kind == "choice":
        return {"type": kind, "value": text.split(",")}
    return {"type": kind, "value": text if kind == "regex" else _text_or_file(text)}


def _text_or_file(text: str) -> str:
    """A flag's text; for @FILE, the text of that file."""
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except (OSError, ValueError) as problem:
        raise argparse.ArgumentTypeError(f"{text[1:]} cannot be read: {problem}") from None


def _bias(text: str) -> dict[str, float]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not an object such as {{"50": -100}}')
    return value
