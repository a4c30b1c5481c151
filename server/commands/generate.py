"""`jaxserve generate`: completions of one prompt, or of a file of them, without a server."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import stat
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, BinaryIO

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from server.commands import request_flags
from server.commands.console import UserError, check_folder, console, say, say_defaults, say_outcome
from server.commands.engine_start import add_model_flags, add_profile_flag, load_engine, model_directory, profiling

if TYPE_CHECKING:
    from jaxserve.engine import Engine
    from jaxserve.generation.completion import Completion

_ROWS_AHEAD = 16  # input lines read for each row of the batch, so that rows have work during a long answer

HELP = """\
Completes one prompt, or every line of a file, without a server.

  jaxserve generate --prompt "It was a" --max-tokens 50 --temperature 0.8
  jaxserve generate --prompt "It was a" --n 3 --use-beam-search
  jaxserve generate --model DIR --messages '[{"role": "user", "content": "It was a"}]'
  jaxserve generate --model DIR --input in.jsonl --output out.jsonl
  zcat in.jsonl.gz | jaxserve generate --model DIR --input - | gzip > out.jsonl.gz

An input line is a JSON object with prompt (text), prompt_token_ids or messages (a chat), optionally an id (default: the
number of the line) and any sampling field:

  {"id": "a", "prompt": "It was a", "max_tokens": 20, "temperature": 0, "stop": ["."], "logprobs": 0}

Output lines come in the order of the input, each as soon as those before it are written:

  {"id": "a", "text": " truth", "token_ids": [51, 7], "finish_reason": "stop", "seed": 8, "logprobs": [-1.5, -0.2]}

For a line that cannot be served, the output is {"id": ..., "error": ...} and standard error has its number. The other
lines are served, and the exit code is 1."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="complete this text, printing it as it comes")
    source.add_argument("--input", metavar="FILE", help="complete every line of this file; - is standard input")
    parser.add_argument("--output", metavar="FILE", help="where output lines go (default: standard output)")
    add_profile_flag(parser)
    add_model_flags(parser)
    request_flags.add_flags(parser, source)


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 1 if a line failed."""
    model_directory(args)  # a missing one is reported before any file is opened
    check_folder("--profile", args.profile)
    wanted, sampling = request_flags.answers(args), request_flags.sampling(args)
    if wanted and (args.input is not None or args.output is not None):
        raise UserError(f"--{next(iter(wanted)).replace('_', '-')} is for one prompt, without --input and --output")
    prompt = request_flags.prompt(args)
    if args.input is not None and prompt:
        raise UserError("--no-generation-prompt is for --messages; an input line has the field add_generation_prompt")
    with contextlib.ExitStack() as files:
        source, size = _open_input(args, prompt, files)
        target = sys.stdout.buffer if args.output is None else _opened(files, args.output, "ab")
        if args.input is not None:
            _check_differ(source, target)
        engine = load_engine(args)
        if args.output is not None and stat.S_ISREG(os.fstat(target.fileno()).st_mode):
            target.truncate(0)  # not earlier, so that a failed start keeps the results of an earlier run
        say_defaults(engine.request_defaults)
        with profiling(args.profile), engine:
            if wanted:
                return _print_several(engine, prompt | sampling, wanted)
            if args.input is None and args.output is None:
                return _print_text(engine, prompt | sampling)
            return _serve_lines(engine, source, size, target.fileno(), sampling)


def _open_input(
    args: argparse.Namespace, prompt: dict[str, Any], files: contextlib.ExitStack
) -> tuple[Iterable[bytes], int | None]:
    """The lines of the input, and its size in bytes if known."""
    if args.input is None:
        return [json.dumps(prompt).encode()], None
    # Descriptor 0, not sys.stdin: the interpreter locks sys.stdin at exit, while the reading thread may wait in it.
    file = _opened(files, 0 if args.input == "-" else args.input, "rb")
    status = os.fstat(file.fileno())
    return file, status.st_size if stat.S_ISREG(status.st_mode) else None


def _opened(files: contextlib.ExitStack, file: str | int, mode: str) -> Any:
    try:
        return files.enter_context(open(file, mode, closefd=isinstance(file, str)))
    except OSError as problem:
        raise UserError(f"cannot open {file}: {problem.strerror}") from None


def _check_differ(source: Any, target: BinaryIO) -> None:
    status = os.fstat(target.fileno())
    if stat.S_ISREG(status.st_mode) and os.path.samestat(os.fstat(source.fileno()), status):
        raise UserError("--output is the file that --input reads")


def _serve_lines(
    engine: Engine, source: Iterable[bytes], size: int | None, descriptor: int, defaults: dict[str, Any]
) -> int:
    from server.commands.jsonl import EngineFailed, LineServer

    out = console()
    hidden = os.isatty(descriptor) or not out.is_terminal
    columns = (  # in bytes of the input, as its number of lines is not known
        TextColumn("{task.fields[lines]:,} lines"),
        BarColumn(),
        TextColumn("{task.fields[tokens]:,} tokens, {task.fields[rate]:.0f} tokens/s"),
        TimeElapsedColumn(),
    )
    lines = failed = tokens = 0
    started = time.monotonic()
    server = LineServer(engine, defaults, window=max(256, _ROWS_AHEAD * engine.config.max_rows))
    try:
        with (
            Progress(*columns, console=out, disable=hidden) as bar,
            contextlib.closing(server.answers(source)) as answers,
        ):
            task = bar.add_task("", total=size, lines=0, tokens=0, rate=0.0)
            for answer in answers:
                _write_line(descriptor, answer.encoded)
                lines, failed, tokens = lines + 1, failed + (answer.error is not None), tokens + answer.tokens
                if answer.error is not None:
                    out.print(f"jaxserve: line {answer.number}: {answer.error}", markup=False)
                rate = tokens / max(time.monotonic() - started, 1e-3)
                bar.update(task, completed=answer.size, lines=lines, tokens=tokens, rate=rate)
    except EngineFailed as problem:
        say(f"error: {problem}; {lines} lines were answered")
        return 1
    except BrokenPipeError:
        raise
    except OSError as problem:
        raise UserError(f"after {lines} lines: {problem.strerror}") from None
    seconds = time.monotonic() - started
    say(f"{lines} lines ({failed} with errors), {tokens} tokens in {seconds:.1f} s, {tokens / seconds:.0f} tokens/s")
    return 1 if failed else 0


def _write_line(descriptor: int, line: bytes) -> None:
    """Writes a whole line. A Ctrl-C during the write is raised after it."""
    interrupts: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    try:
        left = memoryview(line + b"\n")
        while left:
            left = left[os.write(descriptor, left) :]
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupts:
        raise KeyboardInterrupt


def _print_text(engine: Engine, fields: dict[str, Any]) -> int:
    """Streams the completion of one prompt to standard output."""
    from jaxserve.errors import InvalidRequest
    from jaxserve.generation.completion import Assembler
    from jaxserve.generation.parsing import parse_request
    from jaxserve.request import TokenEvent

    inbox: queue.SimpleQueue[list[TokenEvent]] = queue.SimpleQueue()
    try:
        request = parse_request(
            fields,
            request_id="prompt",
            tokenizer=engine.tokenizer,
            defaults=engine.request_defaults,
            longest=engine.limits.longest,
        )
        engine.submit(request, inbox.put)
    except InvalidRequest as problem:
        raise UserError(str(problem)) from None
    assembler = Assembler(request, engine.tokenizer, engine.model_config.eos_token_ids)
    while not assembler.finished:
        for event in inbox.get():
            print(assembler.push(event).text, end="", flush=True)
    print()
    return _say_ending(assembler.completion())


def _print_several(engine: Engine, fields: dict[str, Any], wanted: dict[str, Any]) -> int:
    """Prints several answers to one prompt, or the best of a beam search."""
    from jaxserve.errors import InvalidRequest
    from jaxserve.generation import beam_search as beams
    from jaxserve.generation import streaming

    try:
        params = beams.parse_beam_params(wanted)
        if params is not None:
            answers = streaming.search(engine, fields, params, {}, streaming.CallOptions())
        else:
            answers = streaming.generate(engine, [fields], {}, streaming.CallOptions(**wanted, fill_defaults=True))
    except InvalidRequest as problem:
        raise UserError(str(problem)) from None
    except RuntimeError as problem:  # the engine has failed, or a step of the search
        say(f"error: {problem}")
        return 1
    code = 0
    for answer in answers:
        print(answer.text, flush=True)
        code |= _say_ending(answer)
    return code


def _say_ending(completion: Completion) -> int:
    """Prints how a completion ended. Returns 1 if it failed."""
    if completion.error is not None:
        say(f"error: {completion.error}")
    else:
        reason = completion.finish_reason.value if completion.finish_reason else ""
        say_outcome(reason, completion.prompt_tokens, len(completion.token_ids), completion.seed)
    return int(completion.finish_reason is None or not completion.finish_reason.is_answer)
