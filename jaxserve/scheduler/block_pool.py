"""The blocks of one slot pool: free, held by requests, or kept for the prefix cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from jaxserve.scheduler.block_allocation import NO_BLOCK, BlockAllocation, BlockListener
from jaxserve.scheduler.host_cache import Fetch, HostCache


class BlockPool:
    """Which blocks are free, how many requests hold each of the others, and what the cache has.

    A block enters the cache when its owner publishes it. It stays while a request holds it, and afterwards until it is
    evicted as the least recently used. With a host cache (`attach`) evicted blocks are still found, on the
    host, and a block counts as cached until it is in neither place.

    Attributes:
      n_blocks: number of blocks.
      num_available: blocks that no request holds.
      listeners: are told of changes to the prefix cache.
      host / group: where evicted blocks are kept, if they are, and as which group's.
      find: the block with a digest, if there is one. Any thread may call it.
    """

    def __init__(self, n_blocks: int, first_block: int = 0) -> None:
        """
        Args:
          first_block: number of its first block.
        """
        end = first_block + n_blocks
        self.n_blocks = self.num_available = n_blocks
        self.listeners: list[BlockListener] = []
        self.host: HostCache | None = None
        self.group = 0
        self._free = list(range(end - 1, first_block - 1, -1))  # never published or evicted; the lowest goes first
        self._references = [0] * end
        self._digest_of: list[bytes | None] = [None] * end
        self._block_of: dict[bytes, int] = {}
        self.find: Callable[[bytes], int | None] = self._block_of.get  # without a call of ours for each block
        self._idle: OrderedDict[int, None] = OrderedDict()  # published, held by no request; LRU first

    @property
    def num_idle(self) -> int:
        """Blocks that no request holds and that `find` finds."""
        return len(self._idle)

    @property
    def num_cached(self) -> int:
        """Blocks that `find` finds."""
        return len(self._block_of)

    def is_on_host(self, digest: bytes) -> bool:
        """Whether the host cache has the block with a digest. Any thread may call this."""
        return self.host is not None and self.host.has(self.group, digest)

    def num_unheld(self, blocks: Iterable[int]) -> int:
        """How many of these blocks no request holds."""
        references = self._references
        return sum(references[block] == 0 for block in blocks if block != NO_BLOCK)

    def take(self, count: int) -> list[int]:
        """Take available blocks, each held once; evict cached ones where there are no others."""
        free, references = self._free, self._references
        self.num_available -= count
        if count == 1 and free:
            block = free.pop()
            references[block] = 1
            return [block]
        if count <= len(free):
            taken = free[: -count - 1 : -1]
            del free[len(free) - count :]
        else:
            taken = free[::-1]
            free.clear()
            taken += self._evict(count - len(taken))
        for block in taken:
            references[block] = 1
        return taken

    def _evict(self, count: int) -> list[int]:
        evicted, removed, digest_of, block_of, first = [], [], self._digest_of, self._block_of, self._idle.popitem
        for _ in range(count):
            block, _ = first(False)
            digest = digest_of[block]
            assert digest is not None
            del block_of[digest]
            digest_of[block] = None
            evicted.append(block)
            removed.append(digest)
            if self.host is not None:
                self.host.keep(self.group, digest, block)
        if self.host is None:
            for listener in self.listeners:
                listener.removed(removed)
        return evicted

    def hold(self, blocks: Iterable[int]) -> None:
        """Hold blocks that are in the cache or that others hold, once more."""
        for block in blocks:
            if block == NO_BLOCK:
                continue
            if self._references[block] == 0:
                del self._idle[block]
                self.num_available -= 1
            self._references[block] += 1

    def drop(self, blocks: Iterable[int]) -> None:
        """Hold blocks once less."""
        references, digest_of, idle, dropped = self._references, self._digest_of, self._idle, 0
        for block in blocks:
            if block == NO_BLOCK:
                continue
            references[block] -= 1
            if references[block] == 0:
                dropped += 1
                if digest_of[block] is None:
                    self._free.append(block)
                else:
                    idle[block] = None
        self.num_available += dropped

    def publish(self, allocation: BlockAllocation, first: int, last: int) -> None:
        """Let these full blocks of an allocation, but not the last, be found by their digests."""
        blocks, block_of, digest_of, stored = allocation.blocks, self._block_of, self._digest_of, []
        for index in range(first, last):
            digest, block = allocation.digest(index), blocks[index]
            # A request that computed the same prefix at the same time keeps a private copy until it ends.
            if block != NO_BLOCK and digest not in block_of and digest_of[block] is None:
                block_of[digest] = block
                digest_of[block] = digest
                stored.append(index)
        if self.listeners:
            self._tell_stored(allocation, [index for index in stored if not self.is_on_host(allocation.digest(index))])

    def _tell_stored(self, allocation: BlockAllocation, places: list[int]) -> None:
        if places:
            for listener in self.listeners:
                listener.stored(allocation, places)

    def flush(self) -> None:
        """Forget every cached block."""
        known = list(self._block_of)
        if self.host is not None:
            known += [digest for digest in self.host.clear(self.group) if digest not in self._block_of]
        for listener in self.listeners:
            listener.cleared(known)
        self._free.extend(reversed(self._idle))
        self._idle.clear()
        for block in self._block_of.values():
            self._digest_of[block] = None
        self._block_of.clear()

    def attach(self, host: HostCache) -> None:
        """Have evicted blocks kept on the host, as those of its next cache group."""
        self.host, self.group = host, len(host.forgotten)
        host.forgotten.append(self._left_host)

    def _left_host(self, digest: bytes) -> None:
        if digest not in self._block_of:
            for listener in self.listeners:
                listener.removed([digest])

    def came_back(self, fetch: Fetch, holder: BlockAllocation) -> None:
        """Let blocks be found that a fetch has brought back to those of `holder`."""
        host, stored = self.host, []
        assert host is not None
        for group, index in fetch.copied:
            digest, block = holder.digest(index), holder.blocks[index]
            if group != self.group or fetch.generation != host.generation:
                continue
            if (group, index) in fetch.failed:
                host.drop(group, digest)
            elif digest not in self._block_of:
                self._block_of[digest] = block
                self._digest_of[block] = digest
                if not host.has(group, digest):
                    stored.append(index)
        self._tell_stored(holder, stored)
