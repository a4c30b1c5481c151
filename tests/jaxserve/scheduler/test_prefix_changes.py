"""The changes of prefix caches, against what the caches have: a reader that applies them knows every block."""

from __future__ import annotations

import hashlib
from array import array
from random import Random

import pytest

from jaxserve.scheduler import prefix_changes
from jaxserve.scheduler.block_allocation import BlockAllocation
from jaxserve.scheduler.cache_groups import CacheGroups, make_pool
from jaxserve.scheduler.prefix_changes import BlocksRemoved, BlocksStored, CacheCleared, PrefixChange, PrefixChanges
from jaxserve.scheduler.slot_pool import SlotPool
from tests.jaxserve.scheduler.host_memory import attach_host, fetch_from_host

SIZE = 2


def allocation(tokens: list[int], salt: str = "") -> BlockAllocation:
    return BlockAllocation(tokens=list(tokens), max_length=len(tokens), prompt_length=len(tokens), salt=salt)


class Reader:
    """Knows the cached blocks from the changes alone, and checks every digest."""

    def __init__(self, *, may_forget: bool = False) -> None:
        self.may_forget = may_forget
        self.known: set[bytes] = set()
        self.ever: dict[bytes, bytes] = {}  # digest -> what it is of

    def apply(self, changes: list[PrefixChange]) -> None:
        for change in changes:
            match change:
                case BlocksStored():
                    self._store(change)
                case BlocksRemoved():
                    assert self.may_forget or self.known.issuperset(change.digests)
                    self.known.difference_update(change.digests)
                case CacheCleared():
                    self.known.clear()

    def _store(self, change: BlocksStored) -> None:
        assert change.block_size == SIZE
        assert len(change.tokens) == SIZE * len(change.digests)
        assert change.parent is None or change.parent in self.ever
        content = hashlib.sha256(change.salt.encode()).digest() if change.parent is None else self.ever[change.parent]
        for index, digest in enumerate(change.digests):
            content += array("I", change.tokens[SIZE * index : SIZE * (index + 1)]).tobytes()
            assert digest == hashlib.sha256(content).digest()
            assert digest not in self.known
            self.ever[digest] = content
        self.known.update(change.digests)


@pytest.mark.parametrize("host", [0, 12, 500])
@pytest.mark.parametrize("windows", [(None,), (None, 4)])
@pytest.mark.parametrize("seed", range(4))
def test_a_reader_knows_what_the_caches_have(seed, windows, host):
    """Random traffic on three small pools: publications, evictions, releases, flushes and salts.

    A block that is on the host counts until it is in neither place.
    """
    draw = Random(seed)
    groups = CacheGroups(windows=windows, block_size=SIZE, max_context=80, n_rows=3, most_tokens=8)
    pools = [make_pool(groups, 24, policy="grow", prefix_cache=True) for _ in range(3)]
    plain = [pool if isinstance(pool, SlotPool) else pool.pools[0] for pool in pools]
    for pool in pools:
        attach_host(pool, host)
    woken: list[None] = []
    changes, reader, held = PrefixChanges(pools, lambda: woken.append(None)), Reader(), [[] for _ in pools]
    shared, kinds = [[draw.randrange(3) for _ in range(40)] for _ in range(2)], set()
    for step in range(600):
        at = draw.randrange(3)
        pool, mine = pools[at], held[at]
        tokens = draw.choice(shared)[: draw.randint(1, 30)] + [draw.randrange(3) for _ in range(draw.randint(1, 8))]
        new, action = allocation(tokens, draw.choice(["", "salt"])), draw.random()
        fetch_from_host(pool, new, draw)
        if action < 0.5 and pool.can_admit(new):
            pool.admit(new)
            pool.extend(new, len(tokens))
            pool.publish(new, len(tokens))
            mine.append(new)
        elif action < 0.9 and mine:
            pool.release(mine.pop(draw.randrange(len(mine))))
        elif action > 0.98:
            for each in pools if draw.random() < 0.5 else [pool]:
                each.flush(held[pools.index(each)])
        if step % 3 == 0:
            taken = changes.take()
            assert bool(taken) == bool(woken)
            woken.clear()
            kinds.update(map(type, taken))
            reader.apply(taken)
            on_hosts = {digest for each in plain if each.host for group, digest in each.host._keys if not group}
            assert reader.known == on_hosts.union(*(each.blocks._block_of for each in plain))
    assert kinds == {BlocksStored, BlocksRemoved, CacheCleared} or host == 500


def test_a_reader_that_is_too_slow_forgets_all(monkeypatch):
    """It may then know too little, never a block that is gone."""
    pool, reader = SlotPool(64, SIZE, policy="grow", prefix_cache=True), Reader(may_forget=True)
    changes = PrefixChanges([pool], lambda: None)
    monkeypatch.setattr(prefix_changes, "MOST_BYTES", 2000)
    for round_ in range(40):
        new = allocation([round_ * 8 + number for number in range(8)])
        pool.admit(new)
        pool.extend(new, 8)
        pool.publish(new, 8)
        pool.release(new)
        if round_ in (1, 30):
            taken = changes.take()
            assert (CacheCleared() in taken) == (round_ == 30)
            assert sum(map(prefix_changes.size_of, taken)) <= 2000 + 64
            reader.apply(taken)
            assert reader.known <= pool.blocks._block_of.keys()
            assert reader.known
