"""Who is let into a group of hosts: proofs of the secret, and connections that are no host's."""

import dataclasses
import queue
import shutil
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from jaxserve.multihost import channel, handshake
from jaxserve.multihost import control_pb2 as pb
from jaxserve.multihost.config import TlsFiles
from tests.jaxserve.multihost.groups import FACTS, SECRET, Ends, join, joined, listening, place, until, worker
from tests.jaxserve.multihost.processes import WAIT_SECONDS, free_address, make_certificates


def stranger(coordinator: str, *said: Callable[[pb.Hello, pb.Challenge], pb.FromWorker]) -> list[pb.FromMaster]:
    """What host 0 answers to a stream that says these things, each once host 0 has spoken."""
    to_say: queue.SimpleQueue[pb.FromWorker | None] = queue.SimpleQueue()
    hello = handshake.hello()
    to_say.put(pb.FromWorker(hello=hello))
    answers = []
    for answer in channel.connect(place(1, coordinator))(iter(to_say.get, None)):
        answers.append(answer)
        if len(answers) <= len(said):
            to_say.put(said[len(answers) - 1](hello, answer.challenge))
    to_say.put(None)
    return answers


def test_hosts_prove_that_they_know_the_secret() -> None:
    group, membership = joined(shared_secret=SECRET)
    assert membership._cluster.shared_secret == SECRET
    assert group.reception.strangers == 0
    group.stop()


@pytest.mark.parametrize("theirs", [None, b"another secret, long enough"])
def test_a_host_with_another_secret_is_told_of_it(theirs) -> None:
    coordinator = free_address()
    group = listening(coordinator, shared_secret=SECRET)
    with pytest.raises(ValueError, match="has another secret: give every host the same --hosts-secret"):
        worker(coordinator, shared_secret=theirs).join()
    until(lambda: group.reception.strangers == 1)
    group.stop()


@pytest.mark.parametrize("up", [False, True])
def test_a_stranger_learns_nothing_and_ends_nothing(up) -> None:
    """Without facts or with those of another group, whatever it uses as a proof: before and after the group is up."""
    coordinator, ends = free_address(), Ends()
    group, membership = (
        listening(coordinator, ends, shared_secret=SECRET),
        worker(coordinator, ends, shared_secret=SECRET),
    )
    if up:
        join(group, membership)
    wrong = [("max_rows", "5")]

    def forged(secret: bytes | None, facts: list[tuple[str, str]]) -> Callable[..., pb.FromWorker]:
        def say(hello: pb.Hello, challenge: pb.Challenge) -> pb.FromWorker:
            own = pb.Challenge(nonce=challenge.nonce, proof=handshake._proof(secret, hello, challenge.nonce))
            return pb.FromWorker(join=handshake.join(secret, hello, own, 1, facts))

        return say

    def reflected(hello: pb.Hello, challenge: pb.Challenge) -> pb.FromWorker:
        del hello
        return pb.FromWorker(join=pb.Join(host=1, facts=[pb.Fact(field="max_rows")], proof=challenge.proof))

    said = [forged(None, wrong), forged(b"a guess of the secret", wrong), reflected, lambda *_: pb.FromWorker()]
    for one in said:
        (answer,) = stranger(coordinator, one)
        assert answer.WhichOneof("message") == "challenge"
    until(lambda: group.reception.strangers == len(said))
    if not up:
        join(group, membership)
    assert group.failure is None
    assert group.stop()
    assert ends.codes.get(timeout=WAIT_SECONDS) == 0


def test_a_replayed_proof_proves_nothing() -> None:
    hello, challenge = handshake.hello(), pb.Challenge(nonce=b"1" * 32)
    challenge.proof = handshake._proof(SECRET, hello, challenge.nonce)
    joining = handshake.join(SECRET, hello, challenge, 1, FACTS)
    assert joining is not None
    assert joining.proof == handshake._proof(SECRET, hello, challenge.nonce, joining)
    changed = pb.Join(host=2, facts=joining.facts)
    for other in (
        handshake._proof(SECRET, hello, b"2" * 32, joining),
        handshake._proof(SECRET, handshake.hello(), challenge.nonce, joining),
        handshake._proof(SECRET, hello, challenge.nonce, changed),
    ):
        assert joining.proof != other


def test_a_hello_without_facts_is_a_strangers() -> None:
    coordinator = free_address()
    group = listening(coordinator)
    assert len(stranger(coordinator, lambda h, c: pb.FromWorker(join=handshake.join(None, h, c, 1, [])))) == 1
    join(group, worker(coordinator))
    assert group.reception.strangers == 1
    group.stop()


def test_who_says_no_hello_is_no_host(caplog) -> None:
    coordinator = free_address()
    group = listening(coordinator)
    open_stream = channel.connect(place(1, coordinator))
    for said in ([], [pb.FromWorker(heartbeat=pb.Heartbeat())]):
        assert list(open_stream(iter(said))) == []
    join(group, worker(coordinator))
    group.stop()
    assert group.reception.strangers == 2
    assert [record.message.partition(" is no")[2] for record in caplog.records] == [
        " host of this group: dropped, 1 connections so far"
    ]


def test_who_says_nothing_keeps_no_host_out(monkeypatch) -> None:
    monkeypatch.setattr(handshake, "_SECONDS", 1.0)
    coordinator = free_address()
    group = listening(coordinator)
    never: queue.SimpleQueue[pb.FromWorker] = queue.SimpleQueue()
    streams = [channel.connect(place(1, coordinator))(iter(never.get, None)) for _ in range(12)]  # all threads
    join(group, worker(coordinator))
    group.stop()
    for stream in streams:
        with pytest.raises(grpc.RpcError):
            list(stream)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")
@pytest.mark.long
def test_mutual_tls(tmp_path) -> None:
    make_certificates(tmp_path)
    make_certificates(other := tmp_path / "other")

    def secrets(folder: Path) -> TlsFiles:
        ca, certificate, key = ((folder / name).read_bytes() for name in ("ca.pem", "host.pem", "host.key"))
        return TlsFiles(authority=ca, certificate=certificate, key=key)

    coordinator = free_address()
    group = listening(coordinator, secrets=secrets(tmp_path))
    for theirs in (None, secrets(other), dataclasses.replace(secrets(other), authority=secrets(tmp_path).authority)):
        with pytest.raises(ValueError, match="host 0"):
            worker(coordinator, secrets=theirs, join_timeout=2.0).join()
    join(group, worker(coordinator, secrets=secrets(tmp_path)))
    assert group.stop()
