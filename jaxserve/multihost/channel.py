"""The control channel: a gRPC stream from every worker to host 0, plain or with mutual TLS."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import grpc

from jaxserve.multihost import control_pb2 as pb
from jaxserve.multihost.config import ClusterConfig

SERVICE = "jaxserve.multihost.Control"
FOLLOW, COORDINATE = "Follow", "Coordinate"
LEAVING_SECONDS = 5.0  # for jax to disconnect, over this channel
_OPTIONS = (
    ("grpc.max_receive_message_length", 256 * 2**20),  # scores of a large bucket
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
)

# Host 0's side of a stream: takes a worker's messages, returns serialized messages to it.
Handler = Callable[[Iterator[pb.FromWorker], grpc.ServicerContext], Iterator[bytes]]
# A worker's side.
OpenStream = Callable[[Iterator[pb.FromWorker]], Iterator[pb.FromMaster]]


class ControlChannel:
    """Calls on the channel during the start, by host 0 (`HostGroup`) and `MasterConnection`."""

    def reached(self, step: str) -> None:
        """Announce this host's step of the start."""
        raise NotImplementedError

    def agree(self, about: str, value: int) -> int:
        """Wait for every host's number and return the least."""
        return self._decide(pb.Vote(about=about, value=value)).value

    def check(self, about: str, problem: str) -> str:
        """Waits for every host's problem ("" for none); returns all of them by host."""
        return self._decide(pb.Vote(about=about, problem=problem)).problem

    def _decide(self, mine: pb.Vote) -> pb.Agreed:
        raise NotImplementedError

    def coordinator(self) -> AbstractContextManager[str]:
        """The address of jax's coordinator on this host, for a block that joins the job."""
        raise NotImplementedError


def listen(cluster: ClusterConfig, methods: Mapping[str, Handler]) -> grpc.Server:
    """Serve each worker's streams on their own threads. Raises ValueError if the port is taken."""
    handlers = {
        name: grpc.stream_stream_rpc_method_handler(
            handler, request_deserializer=pb.FromWorker.FromString, response_serializer=bytes
        )
        for name, handler in methods.items()
    }
    server = grpc.server(ThreadPoolExecutor(2 * cluster.hosts + 2), options=_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    secrets, address = cluster.secrets, cluster.coordinator
    try:
        if secrets is None:
            server.add_insecure_port(address)
        else:
            credentials = grpc.ssl_server_credentials(
                [(secrets.key, secrets.certificate)],
                root_certificates=secrets.authority,
                require_client_auth=True,
            )
            server.add_secure_port(address, credentials)
    except RuntimeError as problem:
        raise ValueError(f"cannot listen on {address} for the other hosts: {problem}") from None
    server.start()
    return server


def connect(cluster: ClusterConfig, method: str = FOLLOW) -> OpenStream:
    """Connect to host 0 for streams of a method. ValueError after the join timeout."""
    address, secrets = cluster.coordinator, cluster.secrets
    if secrets is None:
        channel = grpc.insecure_channel(address, options=_OPTIONS)
    else:
        credentials = grpc.ssl_channel_credentials(secrets.authority, secrets.key, secrets.certificate)
        channel = grpc.secure_channel(address, credentials, options=_OPTIONS)
    try:
        grpc.channel_ready_future(channel).result(timeout=cluster.join_timeout)
    except grpc.FutureTimeoutError:
        raise ValueError(f"host 0 cannot be reached at {address} within {cluster.join_timeout:g} s") from None
    return channel.stream_stream(
        f"/{SERVICE}/{method}",
        request_serializer=pb.FromWorker.SerializeToString,
        response_deserializer=pb.FromMaster.FromString,
    )
