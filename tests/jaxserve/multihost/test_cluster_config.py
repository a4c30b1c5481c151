"""Places and settings that hosts can have, and what they compare before they start."""

import math
from typing import Any

import pytest

from jaxserve.config import EngineConfig
from jaxserve.multihost.config import ClusterConfig, TlsFiles, check_settings, facts, shared_by_links
from jaxserve.multihost.config import place as hosts_of_replicas
from tests.jaxserve.multihost.groups import SECRET, place


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
        (
            EngineConfig(tensor=3),
            "tensor 3 times stages 1 is 3 devices, which 2 hosts cannot share evenly; it must be a multiple of 2",
        ),
        (
            EngineConfig(stages=3, replicas=3),
            "tensor 1 times stages 3 times replicas 3 is 9 devices, which 2 hosts cannot share evenly; it must be a",
        ),
        (EngineConfig(tensor=3, replicas=2), None),
        (EngineConfig(tensor=2, speculate="ngram"), None),
        (EngineConfig(speculate="a folder"), "speculate is a folder; several hosts support no draft model, only ngram"),
    ],
)
def test_settings_that_hosts_do_not_go_with(config, message) -> None:
    cluster = place(0, "127.0.0.1:9000")
    if message is None:
        check_settings(config, cluster)
        return
    with pytest.raises(ValueError, match=message):
        check_settings(config, cluster)


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


@pytest.mark.parametrize(
    ("hosts", "tensor", "stages", "mine"),
    [
        (2, 1, 2, [(0,), (1,)]),
        (2, 2, 1, [(0,), (0,)]),
        (4, 2, 2, [(0,), (0,), (1,), (1,)]),
        (2, 2, 3, [(0, 1), (1, 2)]),
    ],
)
def test_the_stages_of_a_host(hosts: int, tensor: int, stages: int, mine: list[tuple[int, ...]]) -> None:
    config = EngineConfig(tensor=tensor, stages=stages)
    assert hosts_of_replicas(config, hosts) == [dict(enumerate(mine))]


@pytest.mark.parametrize(
    ("hosts", "tensor", "stages", "replicas", "placed"),
    [
        (2, 2, 1, 2, [{0: (0,)}, {1: (0,)}]),
        (2, 1, 1, 4, [{0: (0,)}, {0: (0,)}, {1: (0,)}, {1: (0,)}]),
        (4, 1, 2, 2, [{0: (0,), 1: (1,)}, {2: (0,), 3: (1,)}]),
        (2, 1, 2, 3, [{0: (0, 1)}, {0: (0,), 1: (1,)}, {1: (0, 1)}]),
        (2, 3, 2, 1, [{0: (0,), 1: (1,)}]),
        (3, 3, 1, 2, [{0: (0,), 1: (0,)}, {1: (0,), 2: (0,)}]),
    ],
)
def test_replicas_take_the_devices_of_the_hosts_in_order(
    hosts: int, tensor: int, stages: int, replicas: int, placed: list[dict[int, tuple[int, ...]]]
) -> None:
    config = EngineConfig(tensor=tensor, stages=stages, replicas=replicas)
    assert hosts_of_replicas(config, hosts) == placed


@pytest.mark.parametrize(
    ("hosts", "tensor", "stages", "replicas", "told"),
    [
        (2, 1, 2, 3, ""),  # one of them has links between hosts
        (4, 1, 2, 2, ""),  # two have, on hosts of their own
        (3, 3, 1, 2, ""),  # no stages, no links
        (3, 1, 3, 2, "replicas 0 and 1 both link stages of host 1 to other hosts"),
        (4, 1, 4, 9, "replicas 2 and 4 both link stages of host 1 to other hosts"),  # and replica 3 is on it alone
        (2, 1, 3, 4, ""),
    ],
)
def test_replicas_that_share_a_host_of_their_links(
    hosts: int, tensor: int, stages: int, replicas: int, told: str
) -> None:
    """Direct links would mix up the copies of both: they are refused, and `auto` takes the bridge."""
    config = EngineConfig(tensor=tensor, stages=stages, replicas=replicas)
    assert shared_by_links(config, hosts).startswith(told)
    assert bool(told) == bool(shared_by_links(config, hosts))
    check_settings(config, place(0, "127.0.0.1:9000", hosts=hosts))
    if told:
        with pytest.raises(ValueError, match=f"^links is direct, but {told}.*; it must be auto or bridge$"):
            check_settings(config, place(0, "127.0.0.1:9000", hosts=hosts, links="direct"))
