"""What is to be answered, on the command line: a text, or a chat."""

from __future__ import annotations

import argparse
import json
from typing import Any

from server.commands.flags import text_or_file


def add_flags(parser: argparse.ArgumentParser, source: Any) -> None:
    """The flags of a chat, for `jaxserve generate` and `jaxserve client`; `fields` reads them and the prompt.

    Args:
      source: the group of what a prompt may come from, of which one is given.
    """
    source.add_argument(
        "--messages",
        type=_messages,
        metavar="TEXT|@FILE",
        help="answer this chat, a JSON list of {role, content}, by the checkpoint's chat template; @FILE reads it "
        "from a file",
    )
    parser.add_argument(
        "--no-generation-prompt",
        dest="add_generation_prompt",
        action="store_false",
        default=None,
        help="leave out what begins an answer in the template: the chat's last message is gone on with",
    )


def fields(args: argparse.Namespace) -> dict[str, Any]:
    """What was given of them, as an input line would carry it."""
    names = ("prompt", "messages", "add_generation_prompt")
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def _messages(text: str) -> list[dict[str, str]]:
    from jaxserve.generation import chat

    try:
        return chat.read(json.loads(text_or_file(text)))
    except (ValueError, RecursionError) as problem:
        raise argparse.ArgumentTypeError(f"is no chat: {problem}") from None
