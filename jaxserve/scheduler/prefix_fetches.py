"""The scheduler's part of a host cache: requests that wait for prefixes on their way."""

from __future__ import annotations

from jaxserve.scheduler.block_allocation import BlockAllocation
from jaxserve.scheduler.host_cache import BlockLoad, HostCopies
from jaxserve.scheduler.requests import RequestTable
from jaxserve.scheduler.row_parts import PartitionedPool, Pool
from jaxserve.scheduler.state import RequestState


class PrefixFetches:
    """Copies prefixes back from the host, and cancels copies whose blocks running requests need.

    Without a host cache it does nothing.
    """

    def __init__(self, pool: Pool, requests: RequestTable) -> None:
        self._pool = pool
        self._requests = requests

    def take_copies(self) -> HostCopies | None:
        """Copies from and to the host to launch before the plan that `schedule` just returned."""
        return None if self._pool.host is None else self._pool.host.take()

    def begin(self, state: RequestState) -> bool:
        """Whether the queue's first request left it to wait for its prefix, once each such wait."""
        if isinstance(self._pool, PartitionedPool) or self._pool.host is None or state.has_fetched:
            return False
        fetch = self._pool.fetch(state.allocation)
        if fetch is None:
            return False
        self._requests.wait_for(fetch)
        return True

    def landed(self, load: BlockLoad, *, intact: bool) -> None:
        """Note that a copy from the host has landed.

        Args:
          intact: whether it is what had been stored; otherwise the block is forgotten, and computed again.
        """
        assert not isinstance(self._pool, PartitionedPool)
        fetch = load.fetch
        if fetch.is_cancelled:
            return
        fetch.pending -= 1
        if not intact:
            fetch.failed.add((load.group, load.place))
        if not fetch.pending:
            self._pool.fetched(fetch)
            self._requests.fetched(fetch)

    def cancel_for(self, allocation: BlockAllocation, length: int) -> None:
        """Cancels fetches, newest first, while an allocation's first `length` tokens lack blocks."""
        while self._requests.fetching and self._pool.shortage(allocation, length):
            fetch = next(reversed(self._requests.fetching))
            fetch.is_cancelled = True  # copies that are launched do no harm: the device runs in order
            self._pool.release(fetch.holder)
            self._requests.fetched(fetch)
