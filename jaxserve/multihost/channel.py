"""The control channel, opened from either side: a gRPC stream from every worker to host 0, in the clear or by mutual
TLS. What is said on it is `HostGroup`'s and `MasterConnection`'s."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

from jaxserve.multihost import control_pb2 as pb
from jaxserve.multihost.config import ClusterConfig

SERVICE = "jaxserve.multihost.Control"
METHOD = "Follow"
FIRST_WORD = 10.0  # seconds that a stream has for it
_OPTIONS = (
    ("grpc.max_receive_message_length", 256 * 2**20),  # scores of a large bucket
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
)

# One worker's stream on host 0: what it says, to what it is told, which comes as bytes that are the same for many.
Follow = Callable[[Iterator[pb.FromWorker], grpc.ServicerContext], Iterator[bytes]]
# Its other side.
OpenStream = Callable[[Iterator[pb.FromWorker]], Iterator[pb.FromMaster]]


def listen(cluster: ClusterConfig, follow: Follow) -> grpc.Server:
    """Serves every worker's stream on a thread of its own. Raises ValueError if the port cannot be had."""
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
    """What a worker says first; None of a stream that has ended, or that says nothing in time and holds a thread."""
    impatient = threading.Timer(FIRST_WORD, context.cancel)
    impatient.start()
    try:
        return next(requests, None)
    except grpc.RpcError:
        return None
    finally:
        impatient.cancel()


def connect(cluster: ClusterConfig) -> OpenStream:
    """Reaches host 0; what opens the stream. Raises ValueError if it cannot be reached within the join timeout."""
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
