"""The nodes of a TPU slice, by the resources and labels that Ray gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.tpu import SlicePlacementGroup, get_tpu_worker_resources

_NAME, _WORKER, _TOPOLOGY, _TYPE = (f"ray.io/tpu-{key}" for key in ("slice-name", "worker-id", "topology", "pod-type"))


def bundle(actor_options: Mapping[str, Any]) -> dict[str, float]:
    """What an actor with these options takes of a node."""
    named = {"CPU": actor_options.get("num_cpus", 1), "GPU": actor_options.get("num_gpus", 0)}
    return {name: amount for name, amount in (named | actor_options.get("resources", {})).items() if amount}


def on_first_worker(tpu_slice: str) -> dict[str, Any]:
    """Options of an actor on worker 0 of a free slice: Ray gives that node one such resource."""
    return {"num_cpus": 0, "resources": {f"TPU-{tpu_slice}-head": 1}}


def slice_of_this_node(hosts: int, actor_options: Mapping[str, Any]) -> PlacementGroup:
    """A bundle on each node of this node's slice, in the order of their workers.

    Raises:
      ValueError: the slice has another number of hosts.
    """
    labels = ray.get_runtime_context().get_node_labels()
    version, topology, taken = labels[_TYPE].partition("-")[0], labels[_TOPOLOGY], bundle(actor_options)
    there, _ = get_tpu_worker_resources(topology, version, taken)
    if there != hosts:
        chips = f"{taken.get('TPU', 0):g} chips each"
        raise ValueError(f"hosts is {hosts}; the slice {labels[_NAME]} ({labels[_TYPE]}) has {there}, with {chips}")
    workers = [{_NAME: labels[_NAME], _WORKER: str(worker)} for worker in range(hosts)]
    group = SlicePlacementGroup(topology, version, taken, bundle_label_selector=workers).placement_group
    assert group is not None
    return group
