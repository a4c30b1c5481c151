"""The control channel: a gRPC stream from every worker to host 0, plain or with mutual TLS."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

from jaxserve.multihost import control_pb2 as pb
from jaxserve.multihost.config import ClusterConfig

SERVICE = "jaxserve.multihost.Control"
METHOD = "Follow"
_OPTIONS = (
    ("grpc.max_receive_message_length", 256 * 2**20),  # scores of a large bucket
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
)

# Host 0's side of a stream: takes a worker's messages, returns serialized messages to it.
Follow = Callable[[Iterator[pb.FromWorker], grpc.ServicerContext], Iterator[bytes]]
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


def listen(cluster: ClusterConfig, follow: Follow) -> grpc.Server:
    """Serve each worker's stream on its own thread. Raises ValueError if the port is taken."""
    handler = grpc.stream_stream_rpc_method_handler(
        follow, request_deserializer=pb.FromWorker.FromString, response_serializer=bytes
    )
    server = grpc.server(ThreadPoolExecutor(cluster.hosts + 2), options=_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
    secrets, address = cluster.secrets, cluster.control
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


def connect(cluster: ClusterConfig) -> OpenStream:
    """Connect to host 0. Raises ValueError if that takes longer than the join timeout."""
    address, secrets = cluster.control, cluster.secrets
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
        f"/{SERVICE}/{METHOD}",
        request_serializer=pb.FromWorker.SerializeToString,
        response_deserializer=pb.FromMaster.FromString,
    )
