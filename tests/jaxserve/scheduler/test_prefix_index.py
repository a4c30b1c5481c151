"""The index of all replicas' prefix caches, against a walk through each."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from operator import is_
from random import Random

import pytest

from jaxserve.scheduler import prefix_index
from jaxserve.scheduler.block_allocation import BlockAllocation
from jaxserve.scheduler.cache_groups import CacheGroups, make_pool
from jaxserve.scheduler.prefix_digests import PrefixDigests
from jaxserve.scheduler.prefix_index import PrefixIndex
from jaxserve.scheduler.slot_pool import SlotPool
from tests.jaxserve.scheduler.host_memory import attach_host, fetch_from_host


def allocation(tokens: list[int], salt: str = "", *, takes_hits: bool = True) -> BlockAllocation:
    return BlockAllocation(
        tokens=list(tokens), max_length=len(tokens), prompt_length=len(tokens), salt=salt, takes_hits=takes_hits
    )


# Chunks of a fixed size have one cache group.
@pytest.mark.parametrize("host", [0, 12])
@pytest.mark.parametrize(("windows", "runs"), [((None,), None), ((None,), 3), ((None, 4), None)])
@pytest.mark.parametrize("seed", range(6))
def test_the_index_is_what_a_walk_through_every_cache_finds(seed, runs, windows, host):
    """Random traffic on three small pools: publications, evictions, releases, flushes and salts."""
    draw = Random(seed)
    groups = CacheGroups(windows=windows, block_size=2, max_context=80, n_rows=3, most_tokens=8)
    pools = [make_pool(groups, 24, policy="grow", prefix_cache=True, prefix_blocks=runs) for _ in range(3)]
    index, held = PrefixIndex(pools), [[] for _ in pools]
    for pool in pools:
        attach_host(pool, host)
    shared, found_some, fetched = [[draw.randrange(3) for _ in range(40)] for _ in range(2)], 0, 0
    for _ in range(400):
        at = draw.randrange(3)
        pool, mine = pools[at], held[at]
        tokens = draw.choice(shared)[: draw.randint(1, 30)] + [draw.randrange(3) for _ in range(draw.randint(1, 8))]
        new = allocation(tokens, draw.choice(["", "salt"]))
        action = draw.random()
        fetched += fetch_from_host(pool, new, draw)
        if action < 0.5 and pool.can_admit(new):
            pool.admit(new)
            pool.extend(new, len(tokens))
            pool.publish(new, len(tokens))
            mine.append(new)
        elif action < 0.9 and mine:
            pool.release(mine.pop(draw.randrange(len(mine))))
        elif action > 0.98:
            pool.flush(mine)
        for asked in (allocation(tokens, new.salt), allocation(tokens, new.salt, takes_hits=draw.random() < 0.9)):
            walked = [pool.cached_tokens(allocation(tokens, new.salt, takes_hits=asked.takes_hits)) for pool in pools]
            assert index.cached_tokens(asked) == walked
            found_some += any(walked) and len(set(walked)) > 1
    assert found_some > 20
    assert (fetched > 10) == (host > 0)


def test_many_replicas_cost_as_much_as_few():
    """A prompt of 13.6k tokens, cached to different lengths on 64 replicas; hashed once."""
    pools = [SlotPool(900, 16, policy="grow", prefix_cache=True) for _ in range(64)]
    index, tokens = PrefixIndex(pools), [number % 251 for number in range(13_600)]
    full = allocation(tokens)
    for number, pool in enumerate(pools):
        part = allocation([*tokens[: 16 * (1 + 13 * number)], 0])
        pool.admit(part)
        pool.extend(part, len(part.tokens))
        pool.publish(part, len(part.tokens))
    assert index.cached_tokens(full) == [16 * (1 + 13 * number) for number in range(64)]
    read = index._holders = Counted(index._holders)
    index.cached_tokens(full)
    assert 0 < read.count <= 850  # blocks of the prompt, not 64 times as many


@pytest.mark.parametrize("seed", range(4))
def test_a_prompt_takes_digests_of_an_earlier_one(seed, monkeypatch):
    """Prompts that part at any place, under two salts; and those that are kept are few."""
    monkeypatch.setattr(prefix_index, "_PART", 2)
    draw, pools = Random(seed), [SlotPool(250, 4, policy="grow", prefix_cache=True) for _ in range(2)]
    index, prompts, equal = PrefixIndex(pools), [([], "")], Counter()
    count = PrefixDigests.take_equal
    for _ in range(300):
        tokens, salt = draw.choice(prompts[-40:])
        tokens = tokens[: draw.randint(0, len(tokens))] + [draw.randrange(2) for _ in range(draw.randint(1, 60))]
        prompts.append((tokens, draw.choice([salt, "", "salt"])))
        asked, walked = (allocation(*prompts[-1]) for _ in range(2))

        def take(digests, *args):
            before = len(digests.known)
            count(digests, *args)
            equal[len(digests.known) > before] += 1

        monkeypatch.setattr(PrefixDigests, "take_equal", take)
        found = index.cached_tokens(asked)
        assert found == [pool.cached_tokens(walked) for pool in pools]
        blocks = len(tokens) // 4
        assert asked.digests(blocks, 4) == allocation(*prompts[-1]).digests(blocks, 4)
        kept = {id(digests): len(digests._content) for digests, _ in index._hashed.values()}
        assert sum(kept.values()) <= 2000  # what the pools hold
        pool = draw.choice(pools)
        pool.admit(asked)
        pool.extend(asked, len(tokens))
        pool.publish(asked, len(tokens))
        pool.release(asked)
    assert min(equal[True], equal[False]) > 20


def test_answers_are_counted_among_what_is_kept(monkeypatch):
    """Every second request asks and is answered what the one before was, so the cache gets no block of it."""
    monkeypatch.setattr(prefix_index, "_PART", 2)
    pool = SlotPool(250, 4, policy="grow", prefix_cache=True)
    index, most = PrefixIndex([pool]), 0
    for number in range(40):
        asked = allocation([number // 2] * 40)
        index.cached_tokens(asked)
        pool.admit(asked)
        pool.extend(asked, 340)
        for token in range(300):
            pool.publish(asked, len(asked.tokens))
            asked.tokens.append(token)
            kept = {id(digests): len(digests._content) for digests, _ in index._hashed.values()}
            assert sum(kept.values()) <= 1000, number  # what the pool holds
            most = max(most, sum(kept.values()))
        pool.release(asked)
    assert most > 600


def test_a_prompt_that_was_hashed_is_not_hashed_again():
    pool, tokens = SlotPool(900, 16, policy="grow", prefix_cache=True), [number % 251 for number in range(13_600)]
    index, other, first, again = PrefixIndex([pool]), allocation(tokens[5:30]), allocation(tokens), allocation(tokens)
    for each, length in ((other, 25), (first, len(tokens))):
        assert index.cached_tokens(each) == [0]
        pool.admit(each)
        pool.extend(each, length)
        pool.publish(each, length)
    assert index.cached_tokens(again) == [13_584]
    assert again.digests(849, 16) == first.digests(849, 16)[:849]
    assert all(map(is_, again.digests(849, 16)[32:], first.digests(849, 16)[32:]))


def test_a_digest_is_of_the_salt_and_all_tokens_to_its_block():
    tokens = list(range(1000, 1040))
    for salt in ("", "a"):
        whole = allocation(tokens, salt).digests(10, 4)
        parts = allocation(tokens[:17], salt)
        parts.digests(2, 4)
        parts.digests(4, 4)
        parts.tokens += tokens[17:]
        assert parts.digests(10, 4) == whole
        taken = allocation(tokens, salt)
        taken.digests(2, 4)
        taken.take_digests(parts, 7)
        assert len(taken._digests.known) == 7
        assert taken.digests(10, 4) == whole
        salted = hashlib.sha256(salt.encode()).digest()
        for number, digest in enumerate(whole, start=1):
            content = b"".join(token.to_bytes(4, sys.byteorder) for token in tokens[: 4 * number])
            assert digest == hashlib.sha256(salted + content).digest()
    others = allocation(tokens, "b")
    others.take_digests(allocation(tokens, "a"), 7)
    assert not set(others.digests(10, 4)) & set(whole)


class Counted(dict[bytes, int]):
    """A dictionary that counts its look-ups."""

    count = 0

    def get(self, key: bytes, default: int = 0) -> int:
        self.count += 1
        return super().get(key, default)

    def __getitem__(self, key: bytes) -> int:
        self.count += 1
        return super().__getitem__(key)
