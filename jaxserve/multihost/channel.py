"""The control channel: a gRPC stream from every worker to host 0, plain or with mutual TLS.

`HostGroup` and `MasterConnection` send and receive its messages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

from jaxserve.multihost import control_pb2 as pb
from jaxserve.multihost.config import ClusterConfig

SERVICE = "jaxserve.multihost.Control"
METHOD = "Follow"
FIRST_WORD = 10.0  # seconds in which a stream's first message must come
_OPTIONS = (
    ("grpc.max_receive_message_length", 256 * 2**20),  # scores of a large bucket
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
)

# Host 0's side of a stream: takes a worker's messages, returns serialized messages to it.
Follow = Callable[[Iterator[pb.FromWorker], grpc.ServicerContext], Iterator[bytes]]
# A worker's side.
OpenStream = Callable[[Iterator[pb.FromWorker]], Iterator[pb.FromMaster]]


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


def first_word(requests: Iterator[pb.FromWorker], context: grpc.ServicerContext) -> pb.FromWorker | None:
    """A worker's first message; None if the stream ended or none came within 10 s."""
    impatient = threading.Timer(FIRST_WORD, context.cancel)
    impatient.start()
    try:
        return next(requests, None)
    except grpc.RpcError:
        return None
    finally:
        impatient.cancel()


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
