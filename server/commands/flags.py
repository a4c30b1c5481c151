"""Command-line flags shared by the commands, and what they come to."""

from __future__ import annotations

import argparse
import json
import math
from functools import partial
from pathlib import Path
from typing import Any, get_args

from jaxserve.config import (
    CacheDtypeName,
    DtypeName,
    EngineConfig,
    QuantizeName,
    SchedulerName,
    SlotPolicyName,
)
from jaxserve.runner import cache_folder

_DEFAULT = EngineConfig()


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """The engine's settings; they mean the same in every command. `engine_config` reads them."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--dtype",
        choices=get_args(DtypeName),
        default=_DEFAULT.dtype,
        help="dtype of weights and arithmetic; auto: float32 on a CPU, bfloat16 elsewhere (default: %(default)s)",
    )
    group.add_argument(
        "--quantize",
        choices=get_args(QuantizeName),
        help="round weights as they are loaded; int8: half the memory of bfloat16 (default: weights as --dtype says)",
    )
    group.add_argument(
        "--kv-cache-dtype",
        choices=get_args(CacheDtypeName),
        default=_DEFAULT.kv_cache_dtype,
        help="what keys and values are held in; int8: half the memory of bfloat16, so twice the slots; auto: the "
        "attention backend's choice (default: %(default)s)",
    )
    group.add_argument(
        "--max-rows",
        type=int,
        metavar="N",
        default=_DEFAULT.max_rows,
        help="requests in one batch at most (default: %(default)s)",
    )
    group.add_argument(
        "--slots",
        type=int,
        metavar="N",
        help="tokens whose keys and values are held at once (default: what the device's memory allows)",
    )
    group.add_argument(
        "--block-size", type=int, metavar="N", help="slots in a block (default: the attention backend's choice)"
    )
    group.add_argument(
        "--slot-policy",
        choices=get_args(SlotPolicyName),
        help="reserve: set a request's worst case aside when it starts, never preempt; grow: take slots as tokens "
        "come, preempt the latest arrival when they run out (default: grow; reserve with --deterministic)",
    )
    group.add_argument(
        "--buckets",
        type=_buckets,
        metavar="16,32,...|auto",
        help="token counts that iterations are compiled for; auto measures a ladder at start, a finer one with "
        "--target-tpot (default: auto)",
    )
    group.add_argument(
        "--token-budget", type=int, metavar="N", help="most tokens of one iteration (default: the largest bucket)"
    )
    group.add_argument(
        "--target-tpot",
        type=duration,
        metavar="100ms",
        help="time between a request's tokens to aim at: iterations carry as many prompt tokens as the load asks for "
        "and this leaves room for (default: where others generate, as many as make an iteration no longer than a full "
        "batch of decodes, or twice its own decodes, takes; more if prompts queue)",
    )
    group.add_argument(
        "--prefix-cache",
        choices=("on", "off"),
        default="on",
        help="reuse the blocks of prompts that begin alike (default: %(default)s)",
    )
    group.add_argument(
        "--max-context",
        type=int,
        metavar="N",
        help="most tokens, prompt and generated, of one request (default: the model's limit, or 2048 if it has none)",
    )
    group.add_argument(
        "--max-queued-requests",
        type=int,
        metavar="N",
        default=_DEFAULT.max_queued_requests,
        help="requests that may wait before others are refused (default: %(default)s)",
    )
    group.add_argument(
        "--max-queued-tokens",
        type=int,
        metavar="N",
        default=_DEFAULT.max_queued_tokens,
        help="tokens that may wait before others are refused (default: %(default)s)",
    )
    group.add_argument(
        "--scheduler",
        choices=get_args(SchedulerName),
        default=_DEFAULT.scheduler,
        help="request batches whole requests, for comparison (default: %(default)s)",
    )
    group.add_argument(
        "--deterministic",
        action="store_true",
        help="answers that are the same to the bit whatever else is served; one bucket serves all iterations",
    )
    group.add_argument(
        "--speculate",
        metavar="ngram|DIR",
        help="draft tokens for an iteration to check several at once, where that pays; ngram: what followed the last "
        "few tokens before; DIR: by a smaller model of the same vocabulary. Answers stay the same (default: none)",
    )
    group.add_argument(
        "--speculate-tokens",
        type=int,
        metavar="K",
        default=_DEFAULT.speculate_tokens,
        help="tokens drafted for a request at most (default: %(default)s)",
    )
    group.add_argument("--no-scoring", action="store_true", help="leave prompt_logprobs out; less is compiled at start")
    group.add_argument(
        "--attention", metavar="NAME", default=_DEFAULT.attention, help="attention backend (default: %(default)s)"
    )
    group.add_argument(
        "--tensor",
        type=int,
        metavar="T",
        default=_DEFAULT.tensor,
        help="devices that share each layer; heads, feed-forward and vocabulary are split over them "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--stages",
        type=int,
        metavar="S",
        default=_DEFAULT.stages,
        help="parts the layers are cut into, each on T devices of its own (default: %(default)s)",
    )
    group.add_argument(
        "--replicas",
        type=int,
        metavar="R",
        default=_DEFAULT.replicas,
        help="copies of the model, each on T x S devices of its own; a request goes to the one with the least left to "
        "compute for it, cached prefixes considered (default: %(default)s)",
    )
    group.add_argument(
        "--in-flight",
        type=int,
        metavar="N",
        help="iterations launched before the oldest has answered (default: one more than stages; as many as stages "
        "shortens the time between tokens where devices take much longer than the host)",
    )
    group.add_argument(
        "--layers-per-stage",
        type=_layers,
        metavar="20,25,25",
        help="how many layers each stage owns (default: as even as can be)",
    )
    group.add_argument(
        "--sharding", metavar="FILE.toml", help="changes to how the model family is split over the T devices"
    )
    group.add_argument(
        "--compilation-cache",
        metavar="DIR|off",
        default=str(cache_folder.default()),
        help="where compiled programs are kept between runs (default: %(default)s)",
    )


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The configuration the engine flags describe. Raises ValueError naming a setting that cannot be."""
    return EngineConfig(
        dtype=args.dtype,
        quantize=args.quantize,
        kv_cache_dtype=args.kv_cache_dtype,
        max_rows=args.max_rows,
        slots=args.slots,
        block_size=args.block_size,
        slot_policy=args.slot_policy or ("reserve" if args.deterministic else _DEFAULT.slot_policy),
        buckets=args.buckets,
        token_budget=args.token_budget,
        target_tpot=args.target_tpot,
        prefix_cache=args.prefix_cache == "on",
        max_context=args.max_context,
        max_queued_requests=args.max_queued_requests,
        max_queued_tokens=args.max_queued_tokens,
        scheduler=args.scheduler,
        deterministic=args.deterministic,
        speculate=args.speculate,
        speculate_tokens=args.speculate_tokens,
        scoring=not args.no_scoring,
        attention=args.attention,
        tensor=args.tensor,
        stages=args.stages,
        replicas=args.replicas,
        in_flight=args.in_flight,
        layers_per_stage=args.layers_per_stage,
        sharding=args.sharding,
        compilation_cache=None if args.compilation_cache == "off" else args.compilation_cache,
    )


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """One flag for every sampling field; `sampling_fields` reads those that were given."""
    group = parser.add_argument_group("sampling", "Defaults for input lines that do not say otherwise.")
    for name, kind, text in (
        ("max_tokens", int, "most tokens to generate (default: 128)"),
        ("min_tokens", int, "so many are generated before anything ends the text (default: 0)"),
        ("temperature", float, "0 is greedy (default: 1)"),
        ("top_p", float, "draw from the likeliest tokens that hold this much probability (default: 1, off)"),
        ("top_k", int, "draw from this many likeliest tokens (default: 0, off)"),
        ("min_p", float, "leave out tokens less likely than this share of the likeliest (default: 0, off)"),
        ("repetition_penalty", float, "above 1 makes tokens of prompt and answer less likely (default: 1, off)"),
        ("presence_penalty", float, "taken off the logits of generated tokens (default: 0)"),
        ("frequency_penalty", float, "taken off once per occurrence (default: 0)"),
        ("seed", int, "64-bit seed (default: drawn at random and reported)"),
        ("logprobs", int, "report the logprob of every token and this many alternatives"),
        ("prompt_logprobs", int, "likewise for the prompt's tokens"),
    ):
        group.add_argument(_flag(name), type=kind, metavar="N" if kind is int else "X", help=text)
    group.add_argument("--stop", action="append", metavar="TEXT", help="a string that ends the text; may be repeated")
    group.add_argument("--stop-token-ids", type=_integers, metavar="1,2,...", help="tokens that end the text")
    group.add_argument("--bad-words", action="append", metavar="TEXT", help="never to appear; may be repeated")
    group.add_argument("--logit-bias", type=_bias, metavar='{"ID": X}', help="added to the logits of these tokens")
    grammar = group.add_mutually_exclusive_group()
    for flag, kind, text in (
        ("--json-schema", "json_schema", "the text is JSON that this schema describes; @FILE reads it from a file"),
        ("--regex", "regex", "the text is what this regular expression describes, whole"),
        ("--lark", "lark", "the text is one of this grammar (Lark or GBNF); @FILE reads it from a file"),
    ):
        grammar.add_argument(
            flag,
            dest="grammar",
            type=partial(_grammar, kind),
            metavar="TEXT" if kind == "regex" else "TEXT|@FILE",
            help=text,
        )
    grammar.add_argument(
        "--json-object",
        dest="grammar",
        action="store_const",
        const={"type": "json_object"},
        help="the text is a JSON object",
    )
    grammar.add_argument("--choice", dest="grammar", type=_choice, metavar="A,B,...", help="the text is one of these")
    group.add_argument(
        "--ignore-eos", action="store_true", default=None, help="generate on past the end-of-sequence token"
    )


def sampling_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling fields given on the command line, as an input line would carry them."""
    from jaxserve.sampling_params import SAMPLING_FIELDS

    return {name: getattr(args, name) for name in SAMPLING_FIELDS if getattr(args, name) is not None}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 1,2,3") from None


def _buckets(text: str) -> tuple[int, ...] | None:
    if text == "auto":
        return None
    try:
        return tuple(_integers(text))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor a list such as 16,32,64") from None


def duration(text: str) -> float:
    """Seconds of `1.5s` or `100ms`."""
    for unit, scale in (("ms", 1e-3), ("s", 1.0)):
        if text.endswith(unit):
            try:
                seconds = float(text.removesuffix(unit)) * scale
            except ValueError:
                break
            if 0 < seconds < math.inf:
                return seconds
            break
    raise argparse.ArgumentTypeError(f"{text!r} is no time above 0 such as 100ms or 1.5s")


def _layers(text: str) -> tuple[int, ...]:
    return tuple(_integers(text))


def _grammar(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "value": text if kind == "regex" else text_or_file(text)}


def text_or_file(text: str) -> str:
    """A flag's text, or that of the file that it names as @FILE."""
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except (OSError, ValueError) as problem:
        raise argparse.ArgumentTypeError(f"{text[1:]} cannot be read: {problem}") from None


def _choice(text: str) -> dict[str, Any]:
    return {"type": "choice", "value": text.split(",")}


def _bias(text: str) -> dict[str, float]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not an object such as {{"50": -100}}')
    return value
