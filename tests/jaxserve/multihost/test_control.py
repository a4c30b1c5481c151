"""The control channel between threads of a process: who is let in, what is agreed on, and what is told of the rest."""

import dataclasses
import math
import queue
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import grpc
import pytest

from jaxserve.config import EngineConfig
from jaxserve.multihost import channel, handshake, process_watchdog
from jaxserve.multihost import control_pb2 as pb
from jaxserve.multihost import startup as start
from jaxserve.multihost.config import ClusterConfig, TlsFiles, check_settings, detect, facts
from jaxserve.multihost.failure import ExitCode
from jaxserve.multihost.failure_detector import STARTING_SILENCE
from jaxserve.multihost.group import HostGroup
from jaxserve.multihost.worker import MasterConnection
from tests.jaxserve.multihost.processes import WAIT_SECONDS, free_ports, make_certificates

SECRET = b"a secret of 24 bytes or so"
FACTS = [("max_rows", "4"), ("the model's fingerprint", "abc")]


class Ends:
    """Takes the place of the end of a process."""

    def __init__(self) -> None:
        self.codes: queue.SimpleQueue[int] = queue.SimpleQueue()

    def __call__(self, code: int) -> None:
        self.codes.put(code)


def place(host: int, coordinator: str, hosts: int = 2, **settings: Any) -> ClusterConfig:
    return ClusterConfig(hosts=hosts, host=host, coordinator=coordinator, **{"join_timeout": 30.0} | settings)


def joined(coordinator: str, ends: Ends, **settings: Any) -> tuple[HostGroup, MasterConnection]:
    """Both sides, past the handshake."""
    group = HostGroup(place(0, coordinator, **settings), FACTS, tell=lambda _: None, end=ends)
    group.listen()
    membership = MasterConnection(place(1, coordinator, **settings), FACTS, tell=lambda _: None, end=ends)
    aside(membership.join)
    group.join()
    return group, membership


def until(condition: Callable[[], bool]) -> None:
    bound = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < bound
        time.sleep(0.01)


def aside(call: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def test_the_least_number_is_agreed_on() -> None:
    ends = Ends()
    group, membership = joined(free_ports(), ends)
    found: queue.SimpleQueue[int] = queue.SimpleQueue()
    aside(lambda: found.put(membership.agree("blocks", 70)))
    assert group.agree("blocks", 80) == 70
    assert found.get(timeout=WAIT_SECONDS) == 70
    assert group.stop()
    assert ends.codes.get(timeout=WAIT_SECONDS) == 0


def test_problems_are_told_by_host() -> None:
    group, membership = joined(free_ports(), Ends())
    found: queue.SimpleQueue[str] = queue.SimpleQueue()
    for about, problem in (("sending", ""), ("receiving", "nothing arrived")):
        aside(lambda about=about, problem=problem: found.put(membership.check(about, problem)))
    assert group.check("sending", "") == ""
    assert group.check("receiving", "refused") == "host 0: refused; host 1: nothing arrived"
    assert {found.get(timeout=WAIT_SECONDS) for _ in range(2)} == {"", "host 0: refused; host 1: nothing arrived"}
    group.stop()


def test_worker_error_reaches_all_hosts() -> None:
    ends, told = Ends(), queue.SimpleQueue()
    group, membership = joined(free_ports(), ends)
    group.on_failure = told.put
    membership.reached("compiling")
    membership.fail("ValueError: no\nand more of it")
    problem = told.get(timeout=WAIT_SECONDS)
    assert str(problem) == "host 1, while compiling: ValueError: no"
    assert {ends.codes.get(timeout=WAIT_SECONDS), ends.codes.get(timeout=WAIT_SECONDS)} == {
        ExitCode.BROKEN,
        ExitCode.LOST,
    }
    assert str(group.failure) == str(problem)


def test_invalid_message_fails_the_group() -> None:
    ends, told = Ends(), queue.SimpleQueue()
    group, membership = joined(free_ports(), ends)
    group.on_failure = told.put
    group.place({0: (0,), 1: (1,)})
    membership._out.put(pb.FromWorker(completed=pb.Completed(sequence=3)))  # of an iteration that was never sent
    assert "it sent an invalid message" in str(told.get(timeout=WAIT_SECONDS))


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
    group, membership = joined(free_ports(), Ends(), shared_secret=SECRET)
    assert membership._cluster.shared_secret == SECRET
    assert group.reception.strangers == 0
    group.stop()


@pytest.mark.parametrize("theirs", [None, b"another secret, long enough"])
def test_a_host_with_another_secret_is_told_of_it(theirs) -> None:
    place_0 = place(0, free_ports(), shared_secret=SECRET)
    group = HostGroup(place_0, FACTS, tell=lambda _: None, end=Ends())
    group.listen()
    membership = MasterConnection(
        place(1, place_0.coordinator, shared_secret=theirs), FACTS, tell=lambda _: None, end=Ends()
    )
    with pytest.raises(ValueError, match="has another secret: give every host the same --hosts-secret"):
        membership.join()
    until(lambda: group.reception.strangers == 1)
    group.stop()


@pytest.mark.parametrize("up", [False, True])
def test_a_stranger_learns_nothing_and_ends_nothing(up) -> None:
    """Without facts or with those of another group, whatever it uses as a proof: before and after the group is up."""
    coordinator, ends = free_ports(), Ends()
    group = HostGroup(place(0, coordinator, shared_secret=SECRET), FACTS, tell=lambda _: None, end=ends)
    group.listen()
    membership = MasterConnection(place(1, coordinator, shared_secret=SECRET), FACTS, tell=lambda _: None, end=ends)
    if up:
        aside(membership.join)
        group.join()
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
        aside(membership.join)
        group.join()
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


def test_a_hello_without_facts_is_a_strangers_without_a_secret_too() -> None:
    place_0 = place(0, free_ports())
    group = HostGroup(place_0, FACTS, tell=lambda _: None, end=Ends())
    group.listen()
    assert len(stranger(place_0.coordinator, lambda h, c: pb.FromWorker(join=handshake.join(None, h, c, 1, [])))) == 1
    membership = MasterConnection(place(1, place_0.coordinator), FACTS, tell=lambda _: None, end=Ends())
    aside(membership.join)
    group.join()
    assert group.reception.strangers == 1
    group.stop()


def test_who_says_no_hello_is_no_host(caplog) -> None:
    place_0 = place(0, free_ports())
    group = HostGroup(place_0, FACTS, tell=lambda _: None, end=Ends())
    group.listen()
    open_stream = channel.connect(place(1, place_0.coordinator))
    for said in ([], [pb.FromWorker(heartbeat=pb.Heartbeat())]):
        assert list(open_stream(iter(said))) == []
    membership = MasterConnection(place(1, place_0.coordinator), FACTS, tell=lambda _: None, end=Ends())
    aside(membership.join)
    group.join()
    group.stop()
    assert group.reception.strangers == 2
    assert [record.message.partition(" is no")[2] for record in caplog.records] == [
        " host of this group: dropped, 1 connections so far"
    ]


def test_who_says_nothing_keeps_no_host_out(monkeypatch) -> None:
    monkeypatch.setattr(handshake, "_SECONDS", 1.0)
    place_0 = place(0, free_ports())
    group = HostGroup(place_0, FACTS, tell=lambda _: None, end=Ends())
    group.listen()
    never: queue.SimpleQueue[pb.FromWorker] = queue.SimpleQueue()
    streams = [channel.connect(place(1, place_0.coordinator))(iter(never.get, None)) for _ in range(12)]  # all threads
    membership = MasterConnection(place(1, place_0.coordinator), FACTS, tell=lambda _: None, end=Ends())
    aside(membership.join)
    group.join()
    group.stop()
    for stream in streams:
        with pytest.raises(grpc.RpcError):
            list(stream)


def test_alive_reports_the_allowed_silence(monkeypatch) -> None:
    """Not half a second later: should the worker be stopped meanwhile, what held before would hold for as long."""
    monkeypatch.setattr(process_watchdog, "BEAT", 3600.0)  # beats once, at the start
    ends, allowed = Ends(), queue.SimpleQueue()
    coordinator = free_ports()
    group = HostGroup(place(0, coordinator), FACTS, tell=lambda _: None, end=ends)
    group.listen()
    membership = MasterConnection(place(1, coordinator), FACTS, tell=lambda _: None, alive=allowed.put, end=ends)
    aside(membership.join)
    group.join()
    assert allowed.get(timeout=WAIT_SECONDS) == STARTING_SILENCE
    for deadline in (120.0, 3.0):
        group.phase(deadline, serving=deadline < 10)
        assert allowed.get(timeout=WAIT_SECONDS) == deadline
    group.stop()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")
@pytest.mark.long
def test_mutual_tls(tmp_path) -> None:
    make_certificates(tmp_path)
    make_certificates(other := tmp_path / "other")

    def secrets(folder: Path) -> TlsFiles:
        ca, certificate, key = ((folder / name).read_bytes() for name in ("ca.pem", "host.pem", "host.key"))
        return TlsFiles(authority=ca, certificate=certificate, key=key)

    coordinator, ends = free_ports(), Ends()
    group = HostGroup(place(0, coordinator, secrets=secrets(tmp_path)), FACTS, tell=lambda _: None, end=ends)
    group.listen()
    for theirs in (None, secrets(other), dataclasses.replace(secrets(other), authority=secrets(tmp_path).authority)):
        stranger = place(1, coordinator, secrets=theirs, join_timeout=2.0)
        with pytest.raises(ValueError, match="host 0"):
            MasterConnection(stranger, FACTS, tell=lambda _: None, end=ends).join()
    ours = MasterConnection(place(1, coordinator, secrets=secrets(tmp_path)), FACTS, tell=lambda _: None, end=ends)
    aside(ours.join)
    group.join()
    assert group.stop()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hosts": 1}, "hosts is 1; it must be at least 2"),
        ({"host": 2}, "host-id is 2; with 2 hosts it must be from 0 to 1"),
        ({"coordinator": "10.0.0.1"}, "coordinator is '10.0.0.1'; it must be HOST:PORT"),
        ({"coordinator": ":9000"}, "coordinator is ':9000'; it must be HOST:PORT"),
        ({"step_deadline": 0.0}, "step-deadline is 0.0; it must be above 0 seconds"),
        ({"step_deadline": math.inf}, "step-deadline is inf; it must be above 0 seconds and at most 1000000"),
        ({"join_timeout": 1e300}, "join-timeout is 1e.300; it must be above 0 seconds and at most 1000000"),
        ({"record_seconds": math.nan}, "flight-seconds is nan; it must be above 0 seconds and at most 1000000"),
        ({"control_port": 70000}, "control-port is 70000; it must be from 1 to 65535"),
        ({"shared_secret": b"fifteen letters"}, "the secret of the hosts has 15 bytes; it needs 16"),
        ({"links": "wet string"}, "links is 'wet string'; it must be one of auto, direct, bridge"),
    ],
)
def test_places_that_cannot_be(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        ClusterConfig(**{"hosts": 2, "host": 0, "coordinator": "10.0.0.1:9000"} | settings)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EngineConfig(tensor=3), "tensor 3 times stages 1 is 3 devices, which 2 hosts cannot share evenly"),
        (EngineConfig(tensor=2, replicas=2), "replicas is 2; with hosts it must be 1"),
        (EngineConfig(tensor=2, speculate="ngram"), None),
    ],
)
def test_settings_that_hosts_do_not_go_with(config, message) -> None:
    cluster = place(0, "127.0.0.1:9000")
    if message is None:
        check_settings(config, cluster)
        return
    with pytest.raises(ValueError, match=message):
        check_settings(config, cluster)


def test_a_model_does_not_draft_across_hosts() -> None:
    config = EngineConfig(speculate="a folder")
    with pytest.raises(ValueError, match="speculate is a folder; several hosts support no draft model, only ngram"):
        check_settings(config, place(0, "127.0.0.1:9000", hosts=2))


def test_beyond_this_machine_hosts_need_a_secret() -> None:
    config, tls = EngineConfig(tensor=2), TlsFiles(authority=b"", certificate=b"", key=b"")
    for coordinator in ("127.0.0.1:9000", "localhost:9000", "[::1]:9000"):
        check_settings(config, place(0, coordinator))
    for coordinator in ("10.0.0.1:9000", "a-name:9000", "0.0.0.0:9000"):
        with pytest.raises(ValueError, match="other machines may reach: give every host the same --hosts-secret"):
            check_settings(config, place(0, coordinator))
        check_settings(config, place(0, coordinator, shared_secret=SECRET))
        check_settings(config, place(0, coordinator, secrets=tls))


def test_what_hosts_compare(tmp_path) -> None:
    (tmp_path / "a.toml").write_text("[axes]\n")
    (tmp_path / "b.toml").write_text("[axes]\nvocab = 'none'\n")
    cluster = place(0, "10.0.0.1:9000")

    def found(**settings: Any) -> dict[str, str]:
        return dict(facts(EngineConfig(**settings), cluster, (4, 12), "abc", [tmp_path / "tokenizer.json"]))

    assert found(compilation_cache="here") == found(compilation_cache="there")
    assert found(sharding=str(tmp_path / "a.toml")) != found(sharding=str(tmp_path / "b.toml"))
    assert found()["the bucket table"] == "4, 12"
    assert found()["the model's fingerprint"] == "abc"
    assert found()["the model's tokenizer.json"] == "no file"
    (tmp_path / "tokenizer.json").write_text("{}")
    assert found()["the model's tokenizer.json"].startswith("a file of SHA-256 ")
    assert {"the version of jax", "the version of jaxserve", "max_rows", "links"} <= found().keys()


@pytest.mark.parametrize(("problem", "traced"), [(ValueError("no room"), False), (KeyError("a defect"), True)])
def test_a_worker_shows_where_a_defect_is_and_nothing_else(monkeypatch, caplog, problem, traced) -> None:
    said: list[str] = []
    membership = SimpleNamespace(join=lambda: None, fail=said.append)
    monkeypatch.setattr(start, "MasterConnection", lambda *_, **__: membership)
    monkeypatch.setattr(start, "_facts", lambda *_: [])
    monkeypatch.setattr(start, "_prepare", raising(problem))
    with pytest.raises(type(problem)):
        start.follow("a model", EngineConfig(tensor=2), place(1, "127.0.0.1:9000"), tell=lambda _: None)
    assert said == [f"{type(problem).__name__}: {problem}"]
    assert any(record.exc_info for record in caplog.records) == traced


def test_workers_are_told_that_host_0_was_interrupted(monkeypatch) -> None:
    said: list[str] = []
    group = SimpleNamespace(
        listen=lambda: None, reached=lambda _: None, join=raising(KeyboardInterrupt()), stop=said.append
    )
    monkeypatch.setattr(start, "HostGroup", lambda *_, **__: group)
    monkeypatch.setattr(start, "_facts", lambda *_: [])
    with pytest.raises(KeyboardInterrupt):
        start.lead("a model", EngineConfig(tensor=2), place(0, "127.0.0.1:9000"), tell=lambda _: None)
    assert said == ["host 0: KeyboardInterrupt"]


def raising(problem: BaseException) -> Callable[..., Any]:
    def call(*_: object) -> NoReturn:
        raise problem

    return call


def test_slurm_is_found(monkeypatch) -> None:
    for name, value in {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": "node[3-4]",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
    }.items():
        monkeypatch.setenv(name, value)
    hosts, host, coordinator, _ = detect()
    assert (hosts, host) == (2, 1)
    assert coordinator.startswith("node3:")
