"""The `jaxserve` command: parser and exit codes. Commands import heavy modules late."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from typing import Any

import jaxserve
from server.commands import (
    client,
    compile,
    convert,
    generate,
    other_names,
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
                                                        predict memory and speed, without a device
  jaxserve simulate --trace FILE --model bloom-176b --topology h200:8 --tensor 8
                                                        serve recorded traffic on a virtual clock
  jaxserve compile --model DIR                          compile ahead, so that a server starts in seconds
  jaxserve convert DIR OUT                              rewrite a checkpoint for faster loading

DIR is a Hugging Face directory (config.json, model.safetensors or its shards, tokenizer.json)."""

_BENCH = """\
Measures throughput, latencies and steps; tables go to the terminal, JSON and plots to bench-results/.

  jaxserve bench offline --compare-schedulers          request-level against iteration-level batching
  jaxserve bench serve --address HOST:PORT --rate 2    load on a running server
  jaxserve bench step --model DIR                      the compiled step alone
  jaxserve bench accuracy                              the effect of eight bits on answers"""

_COMMANDS: dict[str, tuple[Any, str]] = {
    "serve": (serve, "serve a model over gRPC and HTTP"),
    "generate": (generate, "complete one prompt, or a file of them"),
    "client": (client, "stream a completion from a running server"),
    "top": (top, "show what a running server does"),
    "plan": (plan, "predict memory and speed of a model on devices"),
    "simulate": (simulate, "serve traffic on a virtual clock"),
    "size": (size, "find devices that serve recorded traffic in time, and the cost"),
    "replay": (replay, "run a flight record's iterations again"),
    "compile": (compile, "fill the compilation cache"),
    "convert": (convert, "rewrite a checkpoint as Orbax"),
}


def parser(*, benchmark: str | None = None) -> argparse.ArgumentParser:
    """The whole command line, with the flags of at most one benchmark."""
    form: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    whole = argparse.ArgumentParser(prog="jaxserve", description=_DESCRIPTION, **form)
    whole.add_argument("--version", action="version", version=f"jaxserve {jaxserve.__version__}")
    commands = whole.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=settings.SettingsParser
    )
    for name, (module, summary) in _COMMANDS.items():
        layered = name == "serve"
        # The usage of a hundred flags helps nobody; `add_flags` puts --help behind the others.
        whole_form = form | (
            {"usage": f"jaxserve {name} [--model MODEL] [FLAGS]", "add_help": False} if layered else {}
        )
        command = commands.add_parser(name, help=summary, description=module.HELP, layered=layered, **whole_form)
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
    whole = parser(benchmark=argv[1] if argv[:1] == ["bench"] and len(argv) > 1 else None)
    if not argv:
        whole.print_help()
        return 0
    if not argv[0].startswith("-") and argv[0] not in (names := (*_COMMANDS, "bench")):
        near = other_names.hint(argv[0], names, other_names.COMMANDS)
        whole.error(f"unknown command {argv[0]}{near}; there are {', '.join(names)}")
    args = whole.parse_args(argv)
    try:
        return args.run(args)
    except UserError as problem:
        return _fail(str(problem))
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except BrokenPipeError:
        # Nothing reads our output any more. Standard output is flushed again at exit, so it goes to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13  # the exit code of a process that SIGPIPE ended
    except OSError as problem:
        if problem.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return _fail(f"cannot write{f' {problem.filename}' if problem.filename else ''}: {problem.strerror}")


def _fail(message: str) -> int:
    say(f"error: {message}")
    return 2


if __name__ == "__main__":
    sys.exit(main())
