"""Command-line flags for the prompt: a text or a chat."""

from __future__ import annotations

import argparse
import json
from typing import Any

from server.commands.flags import text_or_file


def add_flags(parser: argparse.ArgumentParser, source: Any) -> None:
    """Adds the flags for a chat; `fields` reads them and the prompt.

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


def fields(args: argparse.Namespace) -> dict[str, Any]:
    """The prompt fields that were given, in the form of an input line."""
    names = ("prompt", "messages", "add_generation_prompt")
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def _messages(text: str) -> list[dict[str, str]]:
    from jaxserve.generation import chat

    try:
        return chat.read(json.loads(text_or_file(text)))
    except (ValueError, RecursionError) as problem:
        raise argparse.ArgumentTypeError(f"is not a chat: {problem}") from None
