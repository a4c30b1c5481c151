"""Which evicted blocks host memory keeps, and the copies for that. Imports no jax.

The pool evicts a block by giving it to another request. The host cache then asks for a copy of it, to be launched
before the iteration that writes the block: the device runs in order, so the copy is whole. A prompt that begins with
blocks on the host has them copied back before it is admitted, while others run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxserve.scheduler.block_allocation import BlockAllocation

ON_HOST = -2  # in the place of a block that is not on the device but on the host


class Store(NamedTuple):
    """A copy of a block to the host, where `key` names it from then on."""

    key: int
    group: int
    block: int


@dataclass(slots=True, eq=False)
class Fetch:
    """A prefix's blocks that come back from the host, and those it begins with on the device.

    Attributes:
      holder: holds the blocks until they can be found on the device.
      copied: (cache group, place in the prefix) of each block that comes back.
      pending: copies that have not landed.
      failed: of `copied`, the blocks whose copy was not what had been stored.
      is_cancelled: whether its blocks were needed for requests that run; copies that are not launched must not be.
      generation: of the host cache when the fetch began.
    """

    holder: BlockAllocation
    generation: int
    copied: list[tuple[int, int]] = field(default_factory=list)
    pending: int = 0
    failed: set[tuple[int, int]] = field(default_factory=set)
    is_cancelled: bool = False


class BlockLoad(NamedTuple):
    """A copy of the block that is called `key` on the host to a block of the device.

    Attributes:
      place: of the block in the prefix that is fetched.
    """

    key: int
    group: int
    block: int
    place: int
    fetch: Fetch


class HostCopies(NamedTuple):
    """Copies before the next iteration: all stores, then all loads; then `drops` are forgotten."""

    stores: list[Store]
    loads: list[BlockLoad]
    drops: list[int]


class HostCache:
    """The blocks of one replica that are in host memory, least recently used first.

    Attributes:
      n_bytes / bytes_used: of host memory.
      forgotten: of each cache group, what is called with the digest of a block that is no longer kept.
      stored_blocks / loaded_blocks / corrupt_blocks: copies to the host, copies back, and those of the latter that
        were not what had been stored, since the start.
    """

    def __init__(self, n_bytes: int, block_bytes: Sequence[int]) -> None:
        """
        Args:
          n_bytes: most host memory to use.
          block_bytes: bytes of a block of each cache group, on all devices.

        Raises:
          ValueError: not even one block fits.
        """
        if n_bytes < max(block_bytes):
            raise ValueError(f"host_cache is {n_bytes} bytes, less than one block of {max(block_bytes)}")
        self.n_bytes, self.bytes_used = n_bytes, 0
        self.stored_blocks = self.loaded_blocks = self.corrupt_blocks = 0
        self.generation = 0  # of what is held: `clear` begins another
        self._block_bytes = tuple(block_bytes)
        self.forgotten: list[Callable[[bytes], None]] = []
        self._keys: OrderedDict[tuple[int, bytes], int] = OrderedDict()  # (group, digest) -> key; LRU first
        self._next_key = 0
        self._copies = HostCopies([], [], [])

    def __len__(self) -> int:
        return len(self._keys)

    def has(self, group: int, digest: bytes) -> bool:
        """Whether a block is on the host. Any thread may call this."""
        return (group, digest) in self._keys

    def keep(self, group: int, digest: bytes, block: int) -> None:
        """Store a block that is evicted, unless it is on the host already."""
        place = group, digest
        if place in self._keys:
            self._keys.move_to_end(place)
            return
        while self.bytes_used + self._block_bytes[group] > self.n_bytes:
            self._forget(next(iter(self._keys)))
        self._keys[place] = key = self._next_key
        self._next_key += 1
        self.bytes_used += self._block_bytes[group]
        self.stored_blocks += 1
        self._copies.stores.append(Store(key, group, block))

    def load(self, group: int, digest: bytes, index: int, fetch: Fetch) -> int:
        """Keep a block that will be loaded. Returns its key."""
        self._keys.move_to_end((group, digest))
        fetch.copied.append((group, index))
        return self._keys[group, digest]

    def start(self, loads: Sequence[BlockLoad]) -> None:
        """Ask for copies to the device."""
        for load in loads:
            load.fetch.pending += 1
        self.loaded_blocks += len(loads)
        self._copies.loads.extend(loads)

    def drop(self, group: int, digest: bytes) -> None:
        """Forget a block that was found to be corrupt."""
        self.corrupt_blocks += 1
        if (group, digest) in self._keys:
            self._forget((group, digest))

    def clear(self, group: int) -> list[bytes]:
        """Forget every block of a group, without a word to listeners. Returns their digests."""
        self.generation += 1
        places = [place for place in self._keys if place[0] == group]
        self._copies.drops.extend(self._keys.pop(place) for place in places)
        self.bytes_used -= len(places) * self._block_bytes[group]
        return [digest for _, digest in places]

    def _forget(self, place: tuple[int, bytes]) -> None:
        group, digest = place
        self._copies.drops.append(self._keys.pop(place))
        self.bytes_used -= self._block_bytes[group]
        self.forgotten[group](digest)

    def figures(self) -> dict[str, int]:
        """What `stats.Load` says of it."""
        return {
            "host_cache_bytes": self.bytes_used,
            "host_cache_blocks": len(self._keys),
            "host_cache_stored": self.stored_blocks,
            "host_cache_loaded": self.loaded_blocks,
            "host_cache_corrupt": self.corrupt_blocks,
        }

    def take(self) -> HostCopies | None:
        """The copies to launch now, if there are any."""
        if not any(self._copies):
            return None
        taken, self._copies = self._copies, HostCopies([], [], [])
        return taken
