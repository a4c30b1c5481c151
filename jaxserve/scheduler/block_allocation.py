"""The blocks of one request in the slot pool of one cache group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from typing import NamedTuple, Protocol

from jaxserve.scheduler.prefix_digests import PrefixDigests

NO_BLOCK = -1  # in the place of a block behind the sliding window, which the request does not hold


@dataclass(slots=True, eq=False, kw_only=True)
class BlockAllocation:
    """The blocks of one request, from admission to release.

    Attributes:
      tokens: the request's known tokens. The owner appends to this list and never changes it otherwise.
      max_length: most tokens the request may come to hold.
      prompt_length: how many of the tokens are its prompt.
      salt: prefixes are shared only between requests with the same salt.
      takes_hits: whether the request may start from blocks of the prefix cache.
      blocks: block of each run of `block_size` positions, in order; NO_BLOCK for those behind the sliding window.
      capacity: positions that `blocks` cover.
      copied: (from, to): the last block at admission is a copy, to be made before it is read.
      publish_at: number of computed positions at which the next block can be published; infinite if none ever can.
      others: the request's blocks in the cache groups after the first; as many as here in each.
      part: the part of the pool that the blocks are in, where it is split by rows (`row_parts`).
    """

    tokens: list[int]
    max_length: int
    prompt_length: int
    salt: str = ""
    takes_hits: bool = True
    blocks: list[int] = field(default_factory=list, init=False)
    capacity: int = field(default=0, init=False)
    copied: tuple[int, int] | None = field(default=None, init=False)
    publish_at: float = field(default=inf, init=False)
    others: tuple[BlockAllocation, ...] = field(default=(), init=False)
    part: int = field(default=0, init=False)
    _set_aside: int = field(default=0, init=False)  # blocks promised to this allocation and not yet in `blocks`
    _published: int = field(default=0, init=False)  # leading blocks that are published already
    _held: bool = field(default=False, init=False)
    _digests: PrefixDigests = field(init=False)  # survive a release

    def __post_init__(self) -> None:
        self._digests = PrefixDigests(self.salt)

    @property
    def is_held(self) -> bool:
        """Whether it was admitted and has not been released."""
        return self._held

    @property
    def groups(self) -> tuple[BlockAllocation, ...]:
        """The request's blocks in each cache group."""
        return (self, *self.others)

    def digest(self, index: int) -> bytes:
        """The digest of a full block of its tokens, given by its place; `digests` has computed it."""
        return self._digests.known[index]

    def digests(self, blocks: int, block_size: int) -> list[bytes]:
        """The digests of at least the first blocks of its tokens; each is computed once."""
        return self._digests.first(blocks, self.tokens, block_size)

    @property
    def prefix_digests(self) -> PrefixDigests:
        """The digests of its blocks, which outlive the request's blocks."""
        return self._digests

    def take_digests(self, source: BlockAllocation, blocks: int) -> None:
        """Learns the digests of the first blocks from their source, as far as it knows them."""
        self._digests.take_over(source._digests, blocks)

    def entries(self, index: int = 0) -> list[int]:
        """The row's block-table entries from block `index` on: each block's in every cache group."""
        if not self.others:
            return self.blocks[index:]
        return list(chain.from_iterable(zip(*(each.blocks[index:] for each in self.groups), strict=True)))

    def prefix(self, length: int) -> BlockAllocation:
        """An empty allocation of the first `length` tokens, which are whole blocks."""
        made = BlockAllocation(tokens=self.tokens[:length], max_length=length, prompt_length=length, salt=self.salt)
        made._digests = self._digests
        return made

    def in_another_group(self) -> BlockAllocation:
        """An empty allocation of the same request."""
        made = BlockAllocation(
            tokens=self.tokens, max_length=self.max_length, prompt_length=self.prompt_length, salt=self.salt
        )
        made._digests = self._digests  # of the same tokens: computed once
        return made


class BlockListener(Protocol):
    """Is told of every change to a pool's prefix cache, on the thread that makes it."""

    def stored(self, allocation: BlockAllocation, blocks: Sequence[int]) -> None:
        """These blocks of an allocation (by their place in it) can be found from now on."""
        ...

    def removed(self, digests: Sequence[bytes]) -> None:
        """These blocks were evicted."""
        ...

    def cleared(self, digests: Sequence[bytes]) -> None:
        """Every block was forgotten: these."""
        ...


class SharedPrefix(NamedTuple):
    """Keys and values of the first `length` positions, which another request can take over.

    The tokens are the same, and the iterations that compute them are already launched.
    """

    allocation: BlockAllocation
    length: int


def preempt_for(
    shortage: Callable[[], int],
    release: Callable[[BlockAllocation], None],
    allocation: BlockAllocation,
    candidates: Iterable[BlockAllocation],
) -> list[BlockAllocation]:
    """Releases candidates in order until nothing is short or `allocation` is one; returns them."""
    victims: list[BlockAllocation] = []
    for victim in candidates:
        release(victim)
        victims.append(victim)
        if victim is allocation or not shortage():
            return victims
    raise AssertionError("a request does not fit the pool with all candidates released")
