"""Links that pass arrays between stages on different hosts.

There are two implementations of `jaxserve.runner.links.Link`. With `DirectLink` the runtime copies from device to
device: natively on TPUs and GPUs, over sockets on CPUs. `BridgeLink` is a compiled collective-permute over the devices
of both stages, which every backend supports. It runs in order with the other programs of both stages. Therefore the
sampled tokens are sent only once they are known; otherwise the first stage would block on them.

Every host of a replica calls `send` on all the replica's links, with the same plans in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from jaxserve.runner.links import DevicePut, Link
from jaxserve.runner.lowering import StagePrograms
from sharding.spec import ShardingSpec

Way = Literal["direct", "bridge"]

_SIDES = ShardingSpec({"side": "side"})


class NoLink:
    """A link that this host has no part in."""

    in_line = False

    def send(self, x: jax.Array | None, what: jax.ShapeDtypeStruct) -> jax.Array | None:
        return None


class DirectLink:
    """A copy between devices of different hosts, by the runtime.

    The replica's hosts without devices of either stage call `send` too. The runtime pairs a sender with its receiver by
    the number of copies between hosts that each process has started. A process that leaves one out then waits for wrong
    copies.
    """

    in_line = False

    def __init__(self, source: StagePrograms, target: StagePrograms) -> None:
        self._source, self._target = source.everywhere, target.everywhere

    def send(self, x: jax.Array | None, what: jax.ShapeDtypeStruct) -> jax.Array | None:
        """Copies between hosts; without devices of the source, the array has no local shards."""
        if x is None:
            x = jax.make_array_from_single_device_arrays(what.shape, self._source, [], dtype=what.dtype)
        received = jax.device_put(x, self._target)
        return received if self._target.has_addressable_devices else None


class _Crossing(NamedTuple):
    """A compiled transfer of one shape: program, argument and the receiver's input buffers."""

    program: jax.stages.Compiled
    argument: jax.ShapeDtypeStruct
    zeros: list[jax.Array]


class BridgeLink:
    """A permutation on the devices of both stages: side 0 sends, side 1 receives.

    The input array is twice as long as the array that is sent. Its first half is on the source's devices. Its second
    half consists of zeros on the target's devices, which are allocated once.
    """

    in_line = True

    def __init__(self, source: StagePrograms, target: StagePrograms) -> None:
        self._target = target.everywhere
        self._receiving = target.mesh.local_devices
        devices = np.array([source.mesh.devices.reshape(-1), target.mesh.devices.reshape(-1)])
        self._mesh = Mesh(devices, ("side", "tensor"), axis_types=(AxisType.Auto, AxisType.Auto))
        self._prepared: dict[tuple[tuple[int, ...], np.dtype], _Crossing] = {}

    def prepare(self, whats: Iterable[jax.ShapeDtypeStruct]) -> None:
        """Compile the transfers of these shapes."""
        for what in whats:
            both = (2 * what.shape[0], *what.shape[1:])
            split = _SIDES.resolve(("side", *[None] * (len(both) - 1)), both, self._mesh)
            across = jax.shard_map(
                partial(jax.lax.ppermute, axis_name="side", perm=[(0, 1)]),
                mesh=self._mesh,
                in_specs=split,
                out_specs=split,
                check_vma=False,
            )
            sharding = NamedSharding(self._mesh, split)
            argument = jax.ShapeDtypeStruct(both, what.dtype, sharding=sharding)
            program = jax.jit(across, out_shardings=sharding).lower(argument).compile()
            zeros = np.zeros(what.shape, what.dtype)
            held = [jax.device_put(zeros, device) for device in self._receiving]
            self._prepared[what.shape, what.dtype] = _Crossing(program, argument, held)

    def send(self, x: jax.Array | None, what: jax.ShapeDtypeStruct) -> jax.Array | None:
        program, both, zeros = self._prepared[what.shape, what.dtype]
        given = [] if x is None else [shard.data for shard in x.addressable_shards]
        held = jax.make_array_from_single_device_arrays(both.shape, both.sharding, given + zeros, dtype=both.dtype)
        crossed = program(held)
        if not self._receiving:
            return None
        received = [shard.data for shard in crossed.addressable_shards if shard.device in self._receiving]
        return jax.make_array_from_single_device_arrays(what.shape, self._target, received)


def make_links(stages: Sequence[StagePrograms], way: Way) -> list[Link]:
    """A replica's links here: from each stage to the next, and from the last to the first."""
    if len(stages) == 1:
        return [NoLink()]
    me, everyone = jax.process_index(), set().union(*map(_hosts, stages))
    links: list[Link] = []
    for source, target in zip(stages, (*stages[1:], stages[0]), strict=True):
        hosts = _hosts(source) | _hosts(target)
        if len(hosts) == 1:
            links.append(DevicePut(target) if me in hosts else NoLink())
        elif way == "direct":
            links.append(DirectLink(source, target) if me in everyone else NoLink())
        else:
            links.append(BridgeLink(source, target) if me in hosts else NoLink())
    return links


def crossing(stages: Sequence[StagePrograms]) -> list[int]:
    """The links of a replica that cross hosts."""
    if len(stages) == 1:
        return []
    ends = enumerate(zip(stages, (*stages[1:], stages[0]), strict=True))
    return [index for index, (source, target) in ends if len(_hosts(source) | _hosts(target)) > 1]


def _hosts(stage: StagePrograms) -> set[int]:
    return {device.process_index for device in stage.mesh.devices.flat}
