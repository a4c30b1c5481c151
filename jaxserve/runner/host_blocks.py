"""The blocks of a pipeline that are in host memory, and the copies that are on their way.

Every copy is a compiled program for `COUNT` blocks, launched in order with the iterations. The blocks then travel
between the devices' memory and pinned host memory on their own, while iterations run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxserve.runner.block_copies import COUNT, HostBlock
from jaxserve.runner.stage import StageRunner
from jaxserve.scheduler.host_cache import BlockLoad, HostCopies, Store

DEVICE_BYTES = 256 * 2**20  # on each device, of blocks that are on their way in one direction; at least one launch
_PINNED = "pinned_host"


class _Wanted(NamedTuple):
    """A load that is not launched yet, and what is held for it."""

    load: BlockLoad
    held: Sequence[HostBlock | None]


class _Loading(NamedTuple):
    """Loads launched together, and whether each block is intact on each stage, bool[COUNT]."""

    loads: Sequence[BlockLoad]
    intact: Sequence[Any]


class HostBlocks:
    """Stores and loads blocks as a replica's `HostCache` asks for it.

    Attributes:
      held: by key, the block's part in each stage; None where the stage has no layers of the cache group.
    """

    def __init__(self, stages: Sequence[StageRunner]) -> None:
        """
        Args:
          stages: compiled with `host_copies`.
        """
        self.held: dict[int, list[HostBlock | None]] = {}
        self._stages = tuple(stages)
        self._wanted: deque[_Wanted] = deque()
        self._loading: deque[_Loading] = deque()
        self._storing: deque[Any] = deque()
        most = max(bytes_on_device(stage, group) for stage in stages for group in stage.block_shapes)
        self._most = max(DEVICE_BYTES // (COUNT * most), 1)  # launches in one direction
        device = stages[0].programs.mesh.devices.flat[0]
        self._device_kind = device.default_memory().kind
        kinds = {memory.kind for memory in device.addressable_memories()}
        self._host_kind = _PINNED if _PINNED in kinds else self._device_kind

    @property
    def is_loading(self) -> bool:
        """Whether loads have not landed."""
        return bool(self._wanted or self._loading)

    def start(self, copies: HostCopies) -> None:
        """Enqueue copies, before the iteration that writes to the blocks that are stored."""
        for together in _launches(copies.stores):
            if len(self._storing) >= self._most:
                jax.block_until_ready(self._storing.popleft())  # until then it takes memory of the devices
            parts = [stage.store(together[0].group, [each.block for each in together]) for stage in self._stages]
            parts = [None if part is None else self._placed(part, self._host_kind) for part in parts]
            self._storing.append(parts)
            for index, each in enumerate(together):
                self.held[each.key] = [None if part is None else part[index] for part in parts]
        # What is forgotten before it is loaded is loaded all the same.
        self._wanted += [_Wanted(load, self.held[load.key]) for load in copies.loads]
        for key in copies.drops:
            del self.held[key]
        self._launch_loads()

    def _launch_loads(self) -> None:
        wanted = self._wanted
        while wanted and len(self._loading) < self._most:
            together: list[_Wanted] = []
            while wanted and len(together) < COUNT:
                if wanted[0].load.fetch.is_cancelled:
                    wanted.popleft()
                elif together and wanted[0].load.group != together[0].load.group:
                    break
                else:
                    together.append(wanted.popleft())
            if not together:
                break
            group = together[0].load.group
            loads, intact = [each.load for each in together], []
            for stage, *parts in zip(self._stages, *(each.held for each in together), strict=True):
                if parts[0] is not None:
                    there = self._placed(parts, self._device_kind)
                    intact.append(stage.load(group, [load.block for load in loads], there))
            self._loading.append(_Loading(loads, intact))

    def _placed(self, blocks: Any, kind: str) -> Any:
        """Blocks in another memory of their devices, once they are there."""
        if self._host_kind == self._device_kind:
            return blocks
        return jax.device_put(blocks, jax.tree.map(lambda leaf: leaf.sharding.with_memory_kind(kind), blocks))

    def landed(self, *, wait: bool) -> list[tuple[BlockLoad, bool]]:
        """The loads that have landed since the last call, and whether each block is intact.

        Args:
          wait: wait for the oldest, if there is one.
        """
        found: list[tuple[BlockLoad, bool]] = []
        while self._loading and (wait or all(each.is_ready() for each in self._loading[0].intact)):
            loads, intact = self._loading.popleft()
            good = np.logical_and.reduce([np.asarray(each) for each in intact])
            found += zip(loads, good[: len(loads)].tolist(), strict=True)
            wait = False
        self._launch_loads()
        return found


def _launches(stores: Sequence[Store]) -> Iterator[Sequence[Store]]:
    """The stores of each launch: at most COUNT, of one cache group."""
    for _, same in groupby(stores, key=lambda each: each.group):
        same = list(same)
        for start in range(0, len(same), COUNT):
            yield same[start : start + COUNT]


def bytes_on_device(stage: StageRunner, group: int) -> int:
    """Bytes of one block of a cache group on each device of a stage."""
    leaves = jax.tree.leaves(stage.block_shapes[group])
    return sum(int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in leaves)


def block_bytes(stages: Sequence[StageRunner], n_groups: int) -> list[int]:
    """Bytes of one block of each cache group on all devices of all stages, copies counted."""
    return [
        sum(bytes_on_device(stage, group) * stage.programs.mesh.size for stage in stages if group in stage.block_shapes)
        for group in range(n_groups)
    ]
