"""`jaxserve client`: streams completions from a running server."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import grpc

from server.commands import request_flags
from server.commands.console import UserError, say_outcome
from server.proto.jaxserve.v1.inference_pb2 import Choice, FinishReason, GenerateRequest, GenerateResponse, Grammar
from server.proto.jaxserve.v1.inference_pb2_grpc import InferenceStub

HELP = """\
Streams the completion of a prompt from a running server.

  jaxserve client "It was a" --max-tokens 50 --temperature 0.8
  jaxserve client --server 10.0.0.7:50051 "It was a" --max-tokens 50 --stop .
  jaxserve client "It was a" --n 3 --use-beam-search
  jaxserve client --messages '[{"role": "user", "content": "It was a"}]'
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("prompt", nargs="?", metavar="PROMPT", help="text to continue")
    parser.add_argument(
        "--server", metavar="HOST:PORT", default="127.0.0.1:50051", help="address of the server (default: %(default)s)"
    )
    group = parser.add_argument_group("security")
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help="file with the API key")
    group.add_argument("--tls-ca", type=Path, metavar="FILE.pem", help="use TLS and trust these authorities")
    group.add_argument("--tls-cert", type=Path, metavar="FILE.pem", help="the client's certificate, for mutual TLS")
    group.add_argument("--tls-key", type=Path, metavar="FILE.pem", help="its private key")
    request_flags.add_flags(parser, source)


def _opened(args: argparse.Namespace) -> tuple[grpc.Channel, tuple[tuple[str, str], ...]]:
    """A channel to the server, and the metadata of calls on it.

    Raises:
      ValueError: a flag lacks another, or a file cannot be read.
    """
    if args.tls_ca is None and (args.tls_cert or args.tls_key):
        raise ValueError("--tls-cert and --tls-key need --tls-ca")
    paths = (args.tls_ca, args.tls_key, args.tls_cert, args.api_key_file)
    try:
        ca, key, certificate, api_key = (path.read_bytes() if path is not None else None for path in paths)
    except OSError as problem:
        raise ValueError(f"cannot read {problem.filename}: {problem.strerror}") from None
    secret = api_key.decode().strip() if api_key is not None else ""
    metadata = (("authorization", f"Bearer {secret}"),) if secret else ()
    if ca is None:
        return grpc.insecure_channel(args.server), metadata
    return grpc.secure_channel(args.server, grpc.ssl_channel_credentials(ca, key, certificate)), metadata


def _grammar(type: str, value: Any = True) -> Grammar:
    """The message of a grammar in the form that `grammar.read` takes."""
    fields: dict[str, Any] = {type: Choice(options=value) if type == "choice" else value}
    return Grammar(**fields)


def run(args: argparse.Namespace) -> int:
    """Prints the text as it comes, or several texts at the end; outcomes go to standard error."""
    fields, answers = request_flags.prompt(args) | request_flags.sampling(args), request_flags.answers(args)
    response = GenerateResponse()
    try:
        fields["logit_bias"] = {int(token): bias for token, bias in fields.get("logit_bias", {}).items()}
        if "grammar" in fields:
            fields["grammar"] = _grammar(**fields["grammar"])
        request = GenerateRequest(**fields, **answers)
        channel, metadata = _opened(args)
        with channel:
            stub = InferenceStub(channel)
            if answers:
                response = stub.Generate(request, metadata=metadata)
                for each in response.samples or [response]:
                    print(each.text)
                    _say_outcome(each)
                return 0
            for response in stub.GenerateStream(request, metadata=metadata):
                print(response.text, end="", flush=True)
    except (TypeError, ValueError) as problem:  # a number that does not fit its field
        raise UserError(str(problem)) from None
    except grpc.RpcError as problem:
        status: Any = problem  # every RpcError of a call is a grpc.Call as well
        raise UserError(f"{args.server} answered {status.code().name}: {status.details()}") from None
    print()
    _say_outcome(response)
    return 0


def _say_outcome(response: GenerateResponse) -> None:
    usage, seed = response.usage, response.seed if response.HasField("seed") else None
    reason = FinishReason.Name(response.finish_reason).removeprefix("FINISH_REASON_").lower()
    say_outcome(reason, usage.prompt_tokens, usage.completion_tokens, seed)
