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

from server.commands import multi_sample as several
from server.commands import prompts
from server.commands.console import UserError, check_folder, console, say, say_outcome
from server.commands.engine_start import add_model_flags, add_profile_flag, load_engine, model_directory, profiling
from server.commands.flags import add_sampling_flags, sampling_fields

if TYPE_CHECKING:
    from jaxserve.engine import Engine
    from server.commands.jsonl import LineResult

_ROWS_AHEAD = 16  # input lines read for every row of the batch, so that one long answer leaves work for the others

HELP = """\
Completes one prompt, or every line of a file, without a server.

  jaxserve generate --prompt "It was a" --max-tokens 50 --temperature 0.8
  jaxserve generate --prompt "It was a" --n 3 --use-beam-search
  jaxserve generate --model DIR --messages '[{"role": "user", "content": "It was a"}]'
  jaxserve generate --model DIR --input in.jsonl --output out.jsonl
  zcat in.jsonl.gz | jaxserve generate --model DIR --input - | gzip > out.jsonl.gz

An input line is a JSON object with prompt (text), prompt_token_ids or messages (a chat), an id if you like (the line's
number if not) and any sampling field:

  {"id": "a", "prompt": "It was a", "max_tokens": 20, "temperature": 0, "stop": ["."], "logprobs": 0}

Output lines come in the order of the input, each as soon as it is its turn:

  {"id": "a", "text": " truth", "token_ids": [51, 7], "finish_reason": "stop", "seed": 8, "logprobs": [-1.5, -0.2]}

A line that cannot be served gets {"id": ..., "error": ...}, and its number on standard error; the others are served,
and the exit code is 1."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `jaxserve generate`."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="complete this text, printing it as it comes")
    prompts.add_flags(parser, source)
    source.add_argument("--input", metavar="FILE", help="complete every line of this file; - is standard input")
    parser.add_argument("--output", metavar="FILE", help="where output lines go (default: standard output)")
    add_profile_flag(parser)
    add_model_flags(parser)
    add_sampling_flags(parser)
    several.add_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 1 if a line failed."""
    model_directory(args)  # a missing one is reported before any file is opened
    check_folder("--profile", args.profile)
    wanted = several.fields(args)
    if wanted and (args.input is not None or args.output is not None):
        raise UserError(f"--{next(iter(wanted)).replace('_', '-')} is for one prompt, without --input and --output")
    prompt = prompts.fields(args)
    if args.input is not None and prompt:
        raise UserError("--no-generation-prompt is for --messages; an input line says add_generation_prompt")
    with contextlib.ExitStack() as files:
        source, size = _open_input(args, files)
        target = _open_output(args, files)
        if args.input is not None:
            _check_differ(source, target)
        engine = load_engine(args)
        if args.output is not None and stat.S_ISREG(os.fstat(target.fileno()).st_mode):
            target.truncate(0)  # not earlier: a failed start keeps the results of an earlier run
        with profiling(args.profile), engine:
            if wanted:
                return _print_several(engine, prompt, wanted, sampling_fields(args))
            if args.input is None and args.output is None:
                return _print_text(engine, prompt, sampling_fields(args))
            return _serve_lines(engine, source, size, target.fileno(), sampling_fields(args))


def _open_input(args: argparse.Namespace, files: contextlib.ExitStack) -> tuple[Iterable[bytes], int | None]:
    """The lines of the input, and its size in bytes if known."""
    if args.input is None:
        return [json.dumps(prompts.fields(args)).encode()], None
    # Descriptor 0 directly: the interpreter locks sys.stdin at exit, and the reading thread may be waiting in it.
    file = _opened(files, 0 if args.input == "-" else args.input, "rb")
    status = os.fstat(file.fileno())
    return file, status.st_size if stat.S_ISREG(status.st_mode) else None


def _open_output(args: argparse.Namespace, files: contextlib.ExitStack) -> BinaryIO:
    return sys.stdout.buffer if args.output is None else _opened(files, args.output, "ab")


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

    lines = failed = tokens = 0
    started = time.monotonic()
    server = LineServer(engine, defaults, window=max(256, _ROWS_AHEAD * engine.config.max_rows))
    try:
        with _Bar(size, hidden=os.isatty(descriptor)) as bar, contextlib.closing(server.answers(source)) as answers:
            for answer in answers:
                _write_line(descriptor, answer.encoded)
                lines, failed, tokens = lines + 1, failed + (answer.error is not None), tokens + answer.tokens
                bar.show(answer, lines, tokens)
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


class _Bar:
    """A progress bar in bytes of the input, as its number of lines is not known."""

    def __init__(self, size: int | None, *, hidden: bool) -> None:
        out = console()
        self._out = out
        self._bar = Progress(
            TextColumn("{task.fields[lines]:,} lines"),
            BarColumn(),
            TextColumn("{task.fields[tokens]:,} tokens, {task.fields[rate]:.0f} tokens/s"),
            TimeElapsedColumn(),
            console=out,
            disable=hidden or not out.is_terminal,
        )
        self._task = self._bar.add_task("", total=size, lines=0, tokens=0, rate=0.0)
        self._started = time.monotonic()

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, answer: LineResult, lines: int, tokens: int) -> None:
        if answer.error is not None:
            self._out.print(f"jaxserve: line {answer.number}: {answer.error}", markup=False)
        rate = tokens / max(time.monotonic() - self._started, 1e-3)
        self._bar.update(self._task, completed=answer.size, lines=lines, tokens=tokens, rate=rate)


def _print_text(engine: Engine, prompt: dict[str, Any], sampling: dict[str, Any]) -> int:
    """Streams the completion of one prompt to standard output."""
    from jaxserve.errors import InvalidRequest
    from jaxserve.generation.completion import Assembler, parse_request
    from jaxserve.request import FinishReason, TokenEvent

    inbox: queue.SimpleQueue[list[TokenEvent]] = queue.SimpleQueue()
    try:
        request = parse_request(prompt | sampling, request_id="prompt", tokenizer=engine.tokenizer)
        engine.submit(request, inbox.put)
    except InvalidRequest as problem:
        raise UserError(str(problem)) from None
    assembler = Assembler(request, engine.tokenizer, engine.model_config.eos_token_ids)
    while not assembler.finished:
        for event in inbox.get():
            print(assembler.push(event).text, end="", flush=True)
    print()
    completion = assembler.completion()
    if completion.error is not None:
        say(f"error: {completion.error}")
    else:
        reason = completion.finish_reason.value if completion.finish_reason else ""
        say_outcome(reason, completion.prompt_tokens, len(completion.token_ids), completion.seed)
    return 1 if completion.finish_reason in (FinishReason.ERROR, FinishReason.ABORTED) else 0


def _print_several(engine: Engine, prompt: dict[str, Any], wanted: dict[str, Any], sampling: dict[str, Any]) -> int:
    """Prints several answers to one prompt, or the best of a beam search."""
    from jaxserve.errors import InvalidRequest
    from jaxserve.generation import beam_search as beams
    from jaxserve.generation import streaming
    from jaxserve.request import FinishReason

    try:
        params = beams.params_of(wanted)
        if params is not None:
            answers = streaming.search(engine, prompt, params, sampling, streaming.Terms())
        else:
            terms = {name: wanted[name] for name in ("n", "best_of") if name in wanted}
            answers = streaming.generate(engine, [prompt], sampling, streaming.Terms(**terms))
    except InvalidRequest as problem:
        raise UserError(str(problem)) from None
    except RuntimeError as problem:  # the engine has failed, or a step of the search
        say(f"error: {problem}")
        return 1
    for answer in answers:
        print(answer.text, flush=True)
        reason = answer.finish_reason.value if answer.finish_reason else ""
        say_outcome(reason, answer.prompt_tokens, len(answer.token_ids), answer.seed)
    return int(any(each.finish_reason in (FinishReason.ERROR, FinishReason.ABORTED) for each in answers))
