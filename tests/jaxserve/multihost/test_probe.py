"""Direct links between real processes: which layouts work, and what is told where they do not."""

import os
import re
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.multihost import distributed
from jaxserve.multihost import probe as probing
from jaxserve.multihost.config import ClusterConfig, LinksName
from jaxserve.multihost.links import NoLink
from tests.jaxserve.multihost.processes import group

PROBING = "tests.jaxserve.multihost.probing_host"


def probe(folder, hosts: int, tensor: int, stages: int, **told: Any) -> str:
    """What all hosts find, once all have ended as they should."""
    devices = tensor * stages // hosts
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    each = {"tensor": tensor, "stages": stages} | told
    with group(PROBING, [each] * hosts, folder, XLA_FLAGS=flags, JAX_PLATFORMS="cpu") as running:
        found = [host.until(lambda line: "found" in line)["found"] for host in running]
        for host in () if found[0] else running:  # where links work, nobody waits for the end of the job
            host.until(lambda line: "left" in line)
        assert [host.code() for host in running] == [0] * hosts
    assert found == found[:1] * hosts
    return found[0]


@pytest.mark.processes
@pytest.mark.smoke
def test_three_hosts_in_a_ring(tmp_path) -> None:
    assert probe(tmp_path, 3, 1, 3) == ""


@pytest.mark.processes
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("hosts", "tensor", "stages"),
    [(2, 1, 2), (2, 2, 2), (2, 1, 4), (3, 2, 3), (3, 1, 6), (4, 1, 4), (4, 2, 2), (4, 4, 2), (4, 2, 4), (6, 2, 3)],
)
def test_direct_links_of_a_layout(tmp_path, hosts, tensor, stages) -> None:
    assert probe(tmp_path, hosts, tensor, stages) == ""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("hosts", "tensor", "stages", "reason"),
    [
        (2, 2, 3, "host 0: link 0: .*host-local transfer"),
        (3, 3, 2, "host 0: link 0: .*different number of buffers"),
    ],
)
def test_layouts_that_sockets_refuse(tmp_path, hosts, tensor, stages, reason) -> None:
    assert re.match(reason, probe(tmp_path, hosts, tensor, stages))


@pytest.mark.processes
def test_a_port_that_is_taken(tmp_path) -> None:
    found = probe(tmp_path, 3, 1, 3, faulty=1, fault="port")
    assert re.fullmatch("host 1: link 0: .*Address already in use", found)


@pytest.mark.processes
def test_a_host_without_an_address(tmp_path) -> None:
    found = probe(tmp_path, 3, 1, 3, faulty=1, fault="absent", address_timeout=1)
    assert re.match("host 2: link 1: .*_address_1", found)


@pytest.mark.processes
@pytest.mark.parametrize("hosts", [3, 4])
def test_numbers_that_never_arrive(tmp_path, hosts) -> None:
    found = probe(tmp_path, hosts, 1, hosts, faulty=1, fault="astray", seconds=2.0)
    assert "host 2: link 1: nothing arrived in time" in found


def test_a_reserved_port_is_for_transfers() -> None:
    """Only a socket that shares ports on purpose binds it, as the one for transfers does."""
    port = distributed._reserve_port("127.0.0.1")
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    with socket.socket() as transfers:
        transfers.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        transfers.bind(("127.0.0.1", port))


class Party:
    """The control channel of a host that finds what the others find."""

    def reached(self, step: str) -> None:
        del step

    def agree(self, about: str, value: int) -> int:
        return value

    def check(self, about: str, problem: str) -> str:
        return problem


@pytest.fixture
def link(monkeypatch):
    """The links of two stages on two hosts, where the probe finds this."""

    def linked(links: LinksName, found: str) -> list[str]:
        told: list[str] = []
        monkeypatch.setattr(probing, "probe", lambda programs, check: found)
        monkeypatch.setattr(probing, "crossing", lambda programs: [0])
        monkeypatch.setattr(probing, "make_links", lambda programs, way: [NoLink()])
        shape = SimpleNamespace(point_counts=lambda sizes: ())
        programs: Any = [SimpleNamespace(shape=shape, hidden=None)]
        cluster = ClusterConfig(hosts=3, host=0, coordinator="127.0.0.1:8000", links=links)
        probing.choose_links([programs], (), cluster, Party(), told.append)
        return told

    return linked


def test_the_bridge_takes_over_and_why_is_told(link) -> None:
    assert link("auto", "") == ["host 0: links between hosts: direct (probed)"]
    told = "host 0: links between hosts: bridge (direct links do not work: host 2: link 1: refused)"
    assert link("auto", "host 2: link 1: refused") == [told]
    assert link("bridge", "not asked") == ["host 0: links between hosts: bridge (asked for)"]


def test_direct_links_that_do_not_work_are_an_error(link) -> None:
    with pytest.raises(ValueError, match="links is direct, which does not work: host 2: link 1: refused"):
        link("direct", "host 2: link 1: refused")
