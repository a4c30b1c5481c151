"""`jaxserve client`: completions from a running server, and an example of a client."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
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


def stream(
    address: str,
    *,
    credentials: grpc.ChannelCredentials | None = None,
    api_key: str | None = None,
    **fields: Any,
) -> Iterator[GenerateResponse]:
    """Streams the answer to a request with these fields; the last message has its finish reason.

    Raises:
      grpc.RpcError: the call failed.
    """
    with _opened(address, credentials) as channel:
        request = GenerateRequest(**fields)
        yield from InferenceStub(channel).GenerateStream(request, metadata=_metadata(api_key))


def whole(
    address: str,
    *,
    credentials: grpc.ChannelCredentials | None = None,
    api_key: str | None = None,
    **fields: Any,
) -> list[GenerateResponse]:
    """The complete answers to a request. Raises grpc.RpcError."""
    with _opened(address, credentials) as channel:
        request = GenerateRequest(**fields)
        response = InferenceStub(channel).Generate(request, metadata=_metadata(api_key))
        return list(response.samples) or [response]


def _opened(address: str, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
    return grpc.insecure_channel(address) if credentials is None else grpc.secure_channel(address, credentials)


def _metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


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


def _security(args: argparse.Namespace) -> dict[str, Any]:
    """Credentials and key as `stream` takes them.

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
    return {
        "credentials": grpc.ssl_channel_credentials(ca, key, certificate) if ca is not None else None,
        "api_key": api_key.decode().strip() if api_key is not None else None,
    }


def _grammar(type: str, value: Any = True) -> Grammar:
    """The message of a grammar in the form that `grammar.read` takes."""
    fields: dict[str, Any] = {type: Choice(options=value) if type == "choice" else value}
    return Grammar(**fields)


def run(args: argparse.Namespace) -> int:
    """Prints the text as it comes, or several texts, and how each ended on standard error."""
    fields, answers = request_flags.prompt(args) | request_flags.sampling(args), request_flags.answers(args)
    response = GenerateResponse()
    try:
        fields["logit_bias"] = {int(token): bias for token, bias in fields.get("logit_bias", {}).items()}
        if "grammar" in fields:
            fields["grammar"] = _grammar(**fields["grammar"])
        if answers:
            for response in whole(args.server, **_security(args), **fields, **answers):
                print(response.text)
                _say_outcome(response)
            return 0
        for response in stream(args.server, **_security(args), **fields):
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
