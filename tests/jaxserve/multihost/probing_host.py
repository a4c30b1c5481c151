"""One host of a group that joins, probes direct links and leaves, as a process: no model.

It prints what the probe returned. What it is told to do wrong stands for a network or a layout that does not work.
"""

import json
import socket
import sys
from types import SimpleNamespace
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.multihost import distributed
from jaxserve.multihost.config import ClusterConfig
from jaxserve.multihost.group import HostGroup
from jaxserve.multihost.links import DirectLink
from jaxserve.multihost.probe import probe
from jaxserve.multihost.worker import MasterConnection
from sharding import mesh


def break_links(fault: str, taken: socket.socket) -> None:
    if fault == "port":  # another program has the port of this host's transfers
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        distributed._reserve_port = lambda address: taken.getsockname()[1]
    send = DirectLink.send
    if fault == "absent":  # it takes part in no copy
        DirectLink.send = lambda self, x, what: None
    if fault == "astray":  # it counts more copies than the others, who wait for others than it sends
        DirectLink.send = lambda self, x, what: (send(self, x, what), send(self, x, what))[1]


def main(told: dict) -> None:
    cluster = ClusterConfig(hosts=told["hosts"], host=told["host"], coordinator=told["coordinator"])

    def say(line: str) -> None:
        del line

    def end(code: int) -> None:  # the process ends as it would without a watchdog
        del code

    with socket.socket() as taken:
        if told.get("faulty") == cluster.host:
            break_links(told["fault"], taken)
        facts = [("hosts", str(cluster.hosts))]
        party: Any
        if cluster.host:
            party = MasterConnection(cluster, facts, tell=say, end=end)
        else:
            party = HostGroup(cluster, facts, tell=say, end=end)
            party.listen()
        party.join()
        with party.coordinator() as address:
            distributed.join(cluster, address)
        if "address_timeout" in told:
            jax.config.update("jax_cross_host_transfer_timeout_seconds", told["address_timeout"])
        (meshes,) = mesh.make_meshes({"tensor": told["tensor"]}, told["stages"], devices=jax.devices())
        stages: Any = [SimpleNamespace(mesh=each, everywhere=NamedSharding(each, PartitionSpec())) for each in meshes]
        found = probe([stages], party.check, told.get("seconds", 60.0))
        if found:
            distributed.keep_client()
        print(json.dumps({"found": found}), flush=True)
        party.agree("done", 1)
        if isinstance(party, HostGroup):
            party.stop()
        distributed.leave()
        if isinstance(party, MasterConnection):
            party.left()
        print(json.dumps({"left": True}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
