"""The `jaxserve` command: its parser, and its exit codes. Heavy imports are made late."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from server.commands import (
    client,
    compile,
    convert,
    generate,
    plan,
    replay,
    serve,
    settings,
    simulate,
    size,
    top,
)
from server.commands.bench import cli as bench_cli
from server.commands.console import UserError, say

_DESCRIPTION = """\
Serves BLOOM and GPT-family language models, scheduling the work one iteration at a time.

  jaxserve serve                                        serve the built-in demo model (ports 50051, 8000)
  jaxserve client "It was a"                            stream a completion from that server
  jaxserve generate --model DIR --prompt "It was a"     the same without a server
  jaxserve generate --model DIR --input in.jsonl --output out.jsonl
  jaxserve bench offline --model DIR                    measure throughput
  jaxserve plan --model bloom-176b --topology h200:8 --tensor 8
                                                        what it would take, without a device
  jaxserve simulate --trace FILE --model bloom-176b --topology h200:8 --tensor 8
                                                        recorded traffic on them, on a virtual clock
  jaxserve compile --model DIR                          so that a server starts in seconds later
  jaxserve convert DIR OUT                              rewrite a checkpoint for faster loading

DIR is a Hugging Face directory (config.json, model.safetensors or its shards, tokenizer.json)."""

_BENCH = """\
Measures throughput, latencies and steps; tables go to the terminal, JSON and plots to bench-results/.

  jaxserve bench offline --compare-schedulers          request-level against iteration-level batching
  jaxserve bench serve --address HOST:PORT --rate 2    load on a running server
  jaxserve bench step --model DIR                      the compiled step alone
  jaxserve bench accuracy                              what eight bits cost in answers"""

_COMMANDS: dict[str, tuple[Any, str]] = {
    "serve": (serve, "serve a model over gRPC and HTTP"),
    "generate": (generate, "complete one prompt, or a file of them"),
    "client": (client, "stream a completion from a running server"),
    "top": (top, "what a running server does, in the terminal"),
    "plan": (plan, "what a model would take and do on devices"),
    "simulate": (simulate, "serve traffic on a virtual clock"),
    "size": (size, "what serves given traffic in time, at what cost"),
    "replay": (replay, "run a flight record's iterations again"),
    "compile": (compile, "fill the compilation cache ahead"),
    "convert": (convert, "rewrite a checkpoint as Orbax"),
}


def parser(*, benchmark: str | None = None) -> argparse.ArgumentParser:
    """The whole command line, with the flags of at most one benchmark."""
    form: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    whole = argparse.ArgumentParser(prog="jaxserve", description=_DESCRIPTION, **form)
    whole.add_argument("--version", action="version", version=f"jaxserve {metadata.version('jaxserve')}")
    commands = whole.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=settings.SettingsParser
    )
    for name, (module, summary) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=module.HELP, layered=name == "serve", **form)
        module.add_flags(command)
        command.set_defaults(run=module.run)
    bench = commands.add_parser("bench", help="measure throughput and latency", description=_BENCH, **form)
    bench_cli.add_benchmarks(bench, bench_cli.BENCHMARKS, benchmark)
    bench.set_defaults(run=bench_cli.run)
    return whole


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
      The exit code: 0, 1 if a part of the work failed, 2 for a mistake of the user, 130 after Ctrl-C.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    args = parser(benchmark=argv[1] if argv[:1] == ["bench"] and len(argv) > 1 else None).parse_args(argv)
    try:
        return args.run(args)
    except UserError as problem:
        return _fail(str(problem))
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except BrokenPipeError:
        # The reader of our output is gone. Standard output is flushed again at exit, so it goes to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13  # as if SIGPIPE had ended us
    except OSError as problem:
        if problem.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return _fail(f"cannot write{f' {problem.filename}' if problem.filename else ''}: {problem.strerror}")


def _fail(message: str) -> int:
    say(f"error: {message}")
    return 2


if __name__ == "__main__":
    sys.exit(main())
