"""TLS for the ports of the server, from a certificate and its key."""

from __future__ import annotations

import argparse
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """The files for TLS, and for mutual TLS.

    Attributes:
      certificate: PEM file, the server's own certificate first.
      key: PEM file of its private key, without a passphrase.
      client_ca: PEM file of authorities that must have signed the certificates of clients; None requires none.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for files that are not a certificate and its key."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # Without the callback, OpenSSL would ask for a passphrase on the terminal.
            context.load_cert_chain(self.certificate, self.key, password=lambda: "")
        except OSError as problem:  # also SSLError, which names no file
            raise ValueError(f"--tls-cert {self.certificate} and --tls-key {self.key}: {_reason(problem)}") from None
        if self.client_ca is not None:
            try:
                context.load_verify_locations(self.client_ca)
            except OSError as problem:
                raise ValueError(f"--tls-client-ca {self.client_ca}: {_reason(problem)}") from None

    def grpc_credentials(self) -> grpc.ServerCredentials:
        return grpc.ssl_server_credentials(
            [(self.key.read_bytes(), self.certificate.read_bytes())],
            root_certificates=self.client_ca.read_bytes() if self.client_ca else None,
            require_client_auth=self.client_ca is not None,
        )

    def uvicorn_settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {"ssl_certfile": str(self.certificate), "ssl_keyfile": str(self.key)}
        if self.client_ca is not None:
            settings |= {"ssl_ca_certs": str(self.client_ca), "ssl_cert_reqs": ssl.CERT_REQUIRED}
        return settings


def add_flags(group: Any) -> None:
    group.add_argument("--tls-cert", type=Path, metavar="FILE.pem", help="the server's certificate (default: no TLS)")
    group.add_argument("--tls-key", type=Path, metavar="FILE.pem", help="its private key")
    group.add_argument(
        "--tls-client-ca",
        type=Path,
        metavar="FILE.pem",
        help="mutual TLS: clients must have a certificate signed by one of these",
    )


def from_flags(args: argparse.Namespace) -> Tls | None:
    """The files that the flags name; None without flags.

    Raises:
      ValueError: a flag is missing, or a file is wrong.
    """
    if args.tls_cert is None and args.tls_key is None:
        if args.tls_client_ca is not None:
            raise ValueError("--tls-client-ca needs --tls-cert and --tls-key")
        return None
    if args.tls_cert is None or args.tls_key is None:
        raise ValueError("--tls-cert and --tls-key go together")
    return Tls(certificate=args.tls_cert, key=args.tls_key, client_ca=args.tls_client_ca)


def _reason(problem: OSError) -> str:
    if isinstance(problem, ssl.SSLError):
        return (problem.reason or "no PEM, or a passphrase is required").lower().replace("_", " ")
    return problem.strerror or str(problem)
