"""A host cache for a pool without a device: copies land at once."""

from __future__ import annotations

from random import Random

from jaxserve.scheduler.block_allocation import BlockAllocation
from jaxserve.scheduler.cache_groups import GroupedPool
from jaxserve.scheduler.host_cache import HostCache
from jaxserve.scheduler.slot_pool import SlotPool


def attach_host(pool: SlotPool | GroupedPool, blocks: int) -> None:
    """Host memory for so many blocks of a pool; none if 0."""
    if blocks:
        cache = HostCache(blocks, [1] * pool.n_groups)
        for each in pool.pools if isinstance(pool, GroupedPool) else [pool]:
            each.blocks.attach(cache)


def fetch_from_host(pool: SlotPool | GroupedPool, prompt: BlockAllocation, draw: Random) -> bool:
    """Brings the blocks of a prompt's prefix back, some of them corrupt; whether there were any."""
    if pool.host is None or (fetch := pool.fetch(prompt)) is None:
        return False
    fetch.failed.update(each for each in fetch.copied if draw.random() < 0.1)
    pool.fetched(fetch)
    return True
