"""Streams one completion from a running server: what `jaxserve client` does, and an example to copy."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import grpc

from server.proto.jaxserve.v1.inference_pb2 import FinishReason, GenerateRequest, GenerateResponse
from server.proto.jaxserve.v1.inference_pb2_grpc import InferenceStub

HELP = """\
Streams the completion of a prompt from a running server.

  jaxserve client "It was a" --max-tokens 50 --temperature 0.8
  jaxserve client --server 10.0.0.7:50051 "It was a" --max-tokens 50 --stop .
"""


def stream(address: str, prompt: str, **fields: Any) -> Iterator[GenerateResponse]:
    """Yields what each iteration adds; the last message says why it ended. Raises grpc.RpcError."""
    with grpc.insecure_channel(address) as channel:
        yield from InferenceStub(channel).GenerateStream(GenerateRequest(prompt=prompt, **fields))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `jaxserve client`."""
    from server.flags import add_sampling_flags

    parser.add_argument("prompt", metavar="PROMPT", help="text to continue")
    parser.add_argument(
        "--server", metavar="HOST:PORT", default="127.0.0.1:50051", help="address of the server (default: %(default)s)"
    )
    add_sampling_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the text as it comes, and what became of the request on standard error."""
    from server.flags import sampling_fields
    from server.report import UserError, say_outcome

    fields = sampling_fields(args)
    response = GenerateResponse()
    try:
        fields["logit_bias"] = {int(token): bias for token, bias in fields.get("logit_bias", {}).items()}
        for response in stream(args.server, args.prompt, **fields):
            print(response.text, end="", flush=True)
    except (TypeError, ValueError) as problem:  # a number that does not fit its field
        raise UserError(str(problem)) from None
    except grpc.RpcError as problem:
        status: Any = problem  # every RpcError of a call is a grpc.Call as well
        raise UserError(f"{args.server} answered {status.code().name}: {status.details()}") from None
    print()
    usage, seed = response.usage, response.seed if response.HasField("seed") else None
    reason = FinishReason.Name(response.finish_reason).removeprefix("FINISH_REASON_").lower()
    say_outcome(reason, usage.prompt_tokens, usage.completion_tokens, seed)
    return 0
