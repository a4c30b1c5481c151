"""The slot pool on the host: which blocks a request gets, and which are set aside for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from typing import Literal

from jaxserve.scheduler.block_allocation import NO_BLOCK, BlockAllocation, BlockListener, SharedPrefix, preempt_for
from jaxserve.scheduler.block_pool import BlockPool
from jaxserve.scheduler.host_cache import ON_HOST, BlockLoad, Fetch, HostCache

SlotPolicy = Literal["reserve", "grow"]


class SlotPool:
    """`n_blocks` blocks of `block_size` slots, shared by the requests on one device pool.

    `can_admit`, `extend` and `release` follow one of two policies. `reserve` sets a request's worst case aside at
    admission (Orca, OSDI'22, Algorithm 1, in whole blocks; shared blocks count once) and never takes blocks back.
    `grow` sets aside only the tokens known at admission. Later blocks come on demand; when none is left, `extend`
    returns the allocations that lost theirs.

    Under `grow`, a request is admitted only if `growth_tokens` for each request stay free. Simulated on random requests
    of a hundred tokens, 16 gives the most throughput at block sizes from 4 to 128: with 0 a quarter of all computing is
    repeated after preemptions, with 32 rows stand empty.

    Prefix reuse: full blocks are addressed by a SHA-256 of salt and tokens to their end. `BlockPool` keeps them.

    A request can also begin with the blocks of another one, cached or not (`SharedPrefix`). The two share the full
    blocks, and the new request gets a copy of a block that is filled in part.

    `WindowPool` is the pool of layers that have a sliding window; `trim` gives back blocks that a request has left
    behind. `GroupedPool` joins the pools of layers with different windows.

    With `prefix_blocks`, prefixes are found and published only in whole runs of that many blocks, and only within
    prompts. Then no prefix mixes what chunks of a fixed size computed with what decodes computed.

    With a host cache, `fetch` brings the blocks of a prompt back before the request is admitted.

    Attributes:
      n_groups: cache groups, each with a pool.
      gives_back: whether `trim` gives anything back.
      blocks: its blocks.
    """

    n_groups = 1
    gives_back = False

    def __init__(
        self,
        n_blocks: int,
        block_size: int,
        *,
        policy: SlotPolicy,
        prefix_cache: bool,
        prefix_blocks: int | None = None,
        first_block: int = 0,
    ) -> None:
        """Args:
        first_block: number of its first block.
        """
        if n_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {n_blocks} blocks of {block_size} slots is empty; both must be at least 1")
        if policy not in ("reserve", "grow"):
            raise ValueError(f"slot policy is {policy!r}; it must be reserve or grow")
        self.n_blocks = n_blocks
        self.block_size = block_size
        self.policy: SlotPolicy = policy
        self.prefix_cache = prefix_cache
        self._prefix_blocks = prefix_blocks
        self.growth_tokens = 16
        self.blocks = BlockPool(n_blocks, first_block)
        self._set_aside = 0
        self._num_held = 0

    @property
    def host(self) -> HostCache | None:
        """Where evicted blocks are kept, if they are."""
        return self.blocks.host

    @property
    def listeners(self) -> list[BlockListener]:
        """Are told of changes to the prefix cache."""
        return self.blocks.listeners

    @property
    def n_slots(self) -> int:
        """Tokens the pool holds."""
        return self.n_blocks * self.block_size

    @property
    def request_slots(self) -> int:
        """Tokens that one request can hold."""
        return self.n_slots

    @property
    def slots_used(self) -> int:
        """Slots in blocks that a request holds or that are set aside for one."""
        return (self.n_blocks - self.blocks.num_available + self._set_aside) * self.block_size

    @property
    def slots_cached(self) -> int:
        """Slots in blocks that no request holds and that a prefix lookup can find."""
        return self.blocks.num_idle * self.block_size

    @property
    def slots_held(self) -> int:
        """Slots in blocks that a request holds, without those only set aside."""
        return (self.n_blocks - self.blocks.num_available) * self.block_size

    @property
    def num_unpromised(self) -> int:
        """Blocks that no request holds and that are set aside for none."""
        return self.blocks.num_available - self._set_aside

    def blocks_for(self, length: int) -> int:
        """Blocks that `length` tokens need; the last one may be filled in part."""
        return -(-length // self.block_size)

    def cached_tokens(self, allocation: BlockAllocation) -> int:
        """Tokens of `allocation` in the prefix cache now, host included. For any thread."""
        return len(self._match(allocation, anywhere=True)) * self.block_size

    def can_admit(self, allocation: BlockAllocation, source: SharedPrefix | None = None) -> bool:
        """Whether `admit(allocation, source)` has the blocks it needs."""
        return self._has_blocks(allocation, self._first_blocks(allocation, source)[0])

    def _has_blocks(self, allocation: BlockAllocation, hits: list[int]) -> bool:
        # Hits that no request holds now stop being available; the others are counted there already.
        need = self._to_set_aside(allocation) - len(hits) + self.blocks.num_unheld(hits)
        if self.policy == "grow":
            # Blocks for the tokens that this and every other request will soon have; without it they would preempt one
            # another at once. A request alone in the pool does not need it, and one that was accepted must start.
            need += self.blocks_for((self._num_held + 1) * self.growth_tokens) if self._num_held else 0
        return need <= self.blocks.num_available - self._set_aside

    def admit(self, allocation: BlockAllocation, source: SharedPrefix | None = None) -> int:
        """Give `allocation` its first blocks and reserve what the policy promises it.

        The first blocks are its prefix hits, or those of `source` where they are more. Returns the number of tokens
        that need not be computed.
        """
        return self._begin(allocation, *self._first_blocks(allocation, source))

    def _begin(self, allocation: BlockAllocation, hits: list[int], source: SharedPrefix | None) -> int:
        self._hold(allocation, hits)
        self._promise(allocation, len(hits))
        allocation._published = len(hits)
        allocation.blocks = hits
        allocation.capacity = len(hits) * self.block_size
        allocation.publish_at = allocation.capacity + self.block_size if self.prefix_cache else inf
        return allocation.capacity if source is None else self._inherit(allocation, source)

    def _hold(self, allocation: BlockAllocation, hits: list[int]) -> None:
        """Let an allocation hold blocks that are in the cache or that others hold."""
        assert not allocation._held
        self.blocks.hold(hits)
        allocation._held = True
        self._num_held += 1

    def shortage(self, allocation: BlockAllocation, length: int) -> int:
        """Blocks missing before `allocation` can cover `length` positions without preemption."""
        need = -(-length // self.block_size) - len(allocation.blocks) - allocation._set_aside
        return max(need - (self.blocks.num_available - self._set_aside), 0) if need > 0 else 0

    def extend(
        self, allocation: BlockAllocation, length: int, candidates: Iterable[BlockAllocation] = ()
    ) -> list[BlockAllocation]:
        """Make `allocation` cover `length` positions.

        When blocks are short (under `grow` only), `candidates`, latest arrival first, lose theirs until
        there are enough. They are returned. When `allocation` is among them, it was the latest and is not extended.
        """
        victims = []
        if self.shortage(allocation, length):
            victims = preempt_for(lambda: self.shortage(allocation, length), self.release, allocation, candidates)
        if allocation._held:
            self._grow(allocation, length)
        return victims

    def _grow(self, allocation: BlockAllocation, length: int) -> None:
        """Make `allocation` cover `length` positions; there is no shortage."""
        need = -(-length // self.block_size) - len(allocation.blocks)
        if need <= 0:
            return
        allocation.blocks += self.blocks.take(need)
        allocation.capacity += need * self.block_size
        self._keep_promise(allocation, need)

    def trim(self, allocation: BlockAllocation, start: int) -> None:
        """Gives back blocks that no position from `start` on attends to, with a sliding window."""

    def release(self, allocation: BlockAllocation) -> None:
        """Release all blocks of `allocation`; published blocks can be found until they are evicted."""
        if not allocation._held:
            return
        # The end of a chain is useless without its start: evict it earlier.
        self.blocks.drop(reversed(allocation.blocks))
        self._cancel_promise(allocation)
        self._num_held -= 1
        allocation._held = False
        allocation._published = allocation.capacity = 0
        allocation.blocks = []
        allocation.copied = None
        allocation.publish_at = inf

    def _promise(self, allocation: BlockAllocation, hits: int) -> None:
        """Set aside the blocks that an allocation is promised at admission, beside its first `hits`."""
        allocation._set_aside = self._to_set_aside(allocation) - hits
        self._set_aside += allocation._set_aside
        assert self._set_aside <= self.blocks.num_available

    def _keep_promise(self, allocation: BlockAllocation, taken: int) -> None:
        """Set aside less after an allocation has taken blocks."""
        if allocation._set_aside:
            promised = min(taken, allocation._set_aside)
            allocation._set_aside -= promised
            self._set_aside -= promised
        assert self._set_aside <= self.blocks.num_available

    def _cancel_promise(self, allocation: BlockAllocation) -> None:
        """Set nothing aside for an allocation any more."""
        self._set_aside -= allocation._set_aside
        allocation._set_aside = 0

    def _behind(self, start: int) -> int:
        """Leading blocks that no position from `start` on attends to."""
        return 0

    def publish(self, allocation: BlockAllocation, computed: int) -> None:
        """Make the full blocks among the first `computed` positions available to other requests.

        The caller guarantees that the tokens at those positions are known and that the iterations that computed them
        have completed. Then no iteration in flight writes to them: a request writes its positions in order, once.
        """
        full = computed // self.block_size
        if self._prefix_blocks is not None:
            full = self.whole_runs(min(full, allocation.prompt_length // self.block_size))
        if not self.prefix_cache or full <= allocation._published or allocation.publish_at == inf:
            return
        allocation.digests(full, self.block_size)
        self.blocks.publish(allocation, allocation._published, full)
        allocation._published = full
        allocation.publish_at = (full + 1) * self.block_size

    def flush(self, allocations: Iterable[BlockAllocation] = ()) -> None:
        """Forget every cached prefix, and never publish the blocks that `allocations` hold now."""
        self.blocks.flush()
        for allocation in allocations:
            allocation.publish_at = inf

    def _first_blocks(
        self, allocation: BlockAllocation, source: SharedPrefix | None
    ) -> tuple[list[int], SharedPrefix | None]:
        """The full blocks that a request can begin with, and their source unless it is the cache."""
        size = self.block_size
        most_cached = (len(allocation.tokens) - 1) // size * size
        if source is not None:
            source = source if self._holds(source) else None
        hits = [] if source is not None and source.length >= most_cached else self._match(allocation)
        if source is None or source.length <= len(hits) * size:
            return hits, None
        return source.allocation.blocks[: source.length // size], source

    def _holds(self, source: SharedPrefix) -> bool:
        """Whether the source has not left behind what would be shared."""
        return NO_BLOCK not in source.allocation.blocks[self._behind(source.length) : self.blocks_for(source.length)]

    def _inherit(self, allocation: BlockAllocation, source: SharedPrefix) -> int:
        """Finish an allocation that begins with a source's full blocks.

        Returns the number of tokens that need not be computed.
        """
        shared = len(allocation.blocks)
        allocation.take_digests(source.allocation, shared)
        if self.prefix_cache:  # the source may end before it has published them
            allocation._published = 0
            allocation.publish_at = self.block_size if source.allocation.publish_at < inf else inf
        if source.length > allocation.capacity:
            self.extend(allocation, source.length)
            allocation.copied = source.allocation.blocks[shared], allocation.blocks[shared]
        return source.length

    def _to_set_aside(self, allocation: BlockAllocation) -> int:
        return self.blocks_for(allocation.max_length if self.policy == "reserve" else len(allocation.tokens))

    def _match(self, allocation: BlockAllocation, most: int | None = None, *, anywhere: bool = False) -> list[int]:
        """The blocks of the longest prefix in the cache, of at most `most` blocks.

        Args:
          anywhere: also look on the host; such blocks are ON_HOST.
        """
        # At least the last token is computed: its logits choose the next one.
        full = (len(allocation.tokens) - 1) // self.block_size
        on_host = anywhere and bool(self.host)
        if not self.prefix_cache or not allocation.takes_hits or not (self.blocks.num_cached or on_host):
            return []
        full = full if most is None else min(full, most)
        digests = allocation.digests(full, self.block_size)[:full]
        return self._find(digests, self._anywhere if on_host else self.blocks.find)

    def _anywhere(self, digest: bytes) -> int | None:
        block = self.blocks.find(digest)
        return ON_HOST if block is None and self.blocks.is_on_host(digest) else block

    def _find(self, digests: list[bytes], block_of: Callable[[bytes], int | None]) -> list[int]:
        found: list[int] = []
        for digest in digests:
            block = block_of(digest)
            if block is None:
                break
            found.append(block)
        return found[: self.whole_runs(len(found))]

    def whole_runs(self, n_blocks: int) -> int:
        """The leading blocks that a prefix may have, of this many that are found."""
        run = self._prefix_blocks or 1
        return n_blocks // run * run

    def fetch(self, allocation: BlockAllocation) -> Fetch | None:
        """Begin to bring the blocks of a prompt's prefix back from the host.

        Returns None if there are none, or too few blocks. The caller calls `fetched` when the copies landed.
        """
        entries = self._match(allocation, anywhere=True)
        if ON_HOST not in entries or not self._has_blocks(allocation, [block for block in entries if block != ON_HOST]):
            return None
        assert self.host is not None
        fetch = Fetch(allocation.prefix(len(entries) * self.block_size), self.host.generation)
        self._begin_fetch(fetch, fetch.holder, entries, self._keys_on_host(fetch, entries))
        return fetch

    def _keys_on_host(self, fetch: Fetch, entries: list[int]) -> dict[int, int]:
        """The key of each block of a prefix that is on the host, by its place.

        They are asked for before blocks of any group are taken for the fetch: that evicts others, for which the host
        may forget these. It copies them all the same.
        """
        assert self.host is not None
        places = [index for index, block in enumerate(entries) if block == ON_HOST]
        return {index: self.host.load(self.blocks.group, fetch.holder.digest(index), index, fetch) for index in places}

    def _begin_fetch(self, fetch: Fetch, holder: BlockAllocation, entries: list[int], keys: dict[int, int]) -> None:
        """Gives `holder` a prefix's blocks, and asks for copies of those on the host."""
        assert self.host is not None
        self._hold(holder, [block for block in entries if block != ON_HOST])
        self._promise(holder, len(entries))
        blocks, loads = entries.copy(), []
        for (index, key), block in zip(keys.items(), self.blocks.take(len(keys)), strict=True):
            blocks[index] = block
            loads.append(BlockLoad(key, self.blocks.group, block, index, fetch))
        holder.blocks, holder.capacity = blocks, len(blocks) * self.block_size
        self.host.start(loads)

    def fetched(self, fetch: Fetch) -> None:
        """Make the blocks available that have come back, and hold none of them any more."""
        self._end_fetch(fetch, fetch.holder)

    def _end_fetch(self, fetch: Fetch, holder: BlockAllocation) -> None:
        self.blocks.came_back(fetch, holder)
        self.release(holder)
