"""The slot pool of layers with a sliding window: blocks return while a request goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxserve.scheduler.block_allocation import NO_BLOCK, BlockAllocation
from jaxserve.scheduler.slot_pool import SlotPool


def window_blocks(window: int, block_size: int, draft_tokens: int) -> int:
    """Most blocks that a request holds between iterations.

    They are those of its window and of drafted tokens that were not accepted, which begin and end anywhere.
    """
    return -(-(window + draft_tokens) // block_size) + 2


def blocks_behind(start: int, window: int, block_size: int) -> int:
    """Leading blocks that no position from `start` on attends to."""
    return max(start - window + 1, 0) // block_size


class WindowPool(SlotPool):
    """A slot pool whose requests give back the blocks that they have left behind (`trim`).

    A request needs blocks for all of its tokens or for a window, whichever is less, and, in an iteration, for its chunk
    as well. So the pool is promised to requests by the former, except for the tokens of one iteration, which those
    share that may need more. `trim` after each chunk keeps them to it. A request counts in full even if it shares
    blocks with others, since each of them takes blocks of its own as it goes on.

    A prefix is found if the blocks within the window before its end are. Blocks are published before they are given
    back, if their tokens are known: the device runs the iterations in order, so whoever takes them reads them later.
    """

    gives_back = True

    def __init__(
        self, n_blocks: int, block_size: int, *, window: int, most_tokens: int, draft_tokens: int = 0, **settings: Any
    ) -> None:
        """Args:
        most_tokens: most tokens of an iteration.
        draft_tokens: most tokens drafted for one row.
        settings: those of `SlotPool`.
        """
        super().__init__(n_blocks, block_size, **settings)
        self._window = window
        self._bound = window_blocks(window, block_size, draft_tokens)
        self._spare = most_tokens // block_size
        self._beyond = 0  # blocks that requests need beyond `_bound` if none is given back; `_set_aside` are the others

    @property
    def slots_used(self) -> int:
        """Slots in blocks that a request holds or that are set aside for one."""
        return max(self.slots_held, self._promised(0, 0) * self.block_size)

    def shortage(self, allocation: BlockAllocation, length: int) -> int:
        """Blocks missing before `allocation` can cover `length` positions without preemption."""
        blocks, before = self.blocks_for(length), allocation._set_aside
        if blocks <= before or (before >= self._bound and self._beyond >= self._spare):  # nothing more is promised
            return 0
        return max(self._promised(before, blocks) - self.n_blocks, 0)

    def trim(self, allocation: BlockAllocation, start: int) -> None:
        """Give back the blocks that no position from `start` on attends to."""
        behind = min(self._behind(start), len(allocation.blocks))
        if not behind or allocation.blocks[behind - 1] == NO_BLOCK:  # and so are those before it
            return
        self.publish(allocation, min(start, len(allocation.tokens)))
        for index in range(behind - 1, -1, -1):
            block = allocation.blocks[index]
            if block == NO_BLOCK:
                break
            allocation.blocks[index] = NO_BLOCK
            self.blocks.drop([block])

    def _promised(self, before: int, after: int) -> int:
        """Blocks promised in all once a request goes from `before` to `after` (its whole length)."""
        bound = self._bound
        beyond = self._beyond + max(after - bound, 0) - max(before - bound, 0)
        return self._set_aside + min(after, bound) - min(before, bound) + min(beyond, self._spare)

    def _has_blocks(self, allocation: BlockAllocation, hits: list[int]) -> bool:
        need, requests = self._promised(0, self._to_set_aside(allocation)), self._num_held + 1
        if self.policy == "grow" and requests > 1:  # as in SlotPool, but windows do not grow
            growth = self.blocks_for(requests * self.growth_tokens)
            need = min(need + growth, requests * self._bound + self._spare)
        return need <= self.n_blocks

    def _promise(self, allocation: BlockAllocation, hits: int) -> None:
        self._change(allocation, self._to_set_aside(allocation))

    def _keep_promise(self, allocation: BlockAllocation, taken: int) -> None:
        if len(allocation.blocks) > allocation._set_aside:
            self._change(allocation, len(allocation.blocks))

    def _cancel_promise(self, allocation: BlockAllocation) -> None:
        self._change(allocation, 0)

    def _change(self, allocation: BlockAllocation, blocks: int) -> None:
        before, bound = allocation._set_aside, self._bound
        self._set_aside += min(blocks, bound) - min(before, bound)
        self._beyond += max(blocks - bound, 0) - max(before - bound, 0)
        allocation._set_aside = blocks

    def _behind(self, start: int) -> int:
        return blocks_behind(start, self._window, self.block_size)

    def _find(self, digests: list[bytes], block_of: Callable[[bytes], int | None]) -> list[int]:
        found: list[int] = []
        longest = behind = cached = 0  # `cached`: blocks found in a row, up to the last
        for digest in digests:
            block = block_of(digest)
            block = NO_BLOCK if block is None else block
            found.append(block)
            cached = cached + 1 if block != NO_BLOCK else 0
            unseen = self._behind(len(found) * self.block_size)
            if cached >= len(found) - unseen and self.whole_runs(len(found)) == len(found):
                longest, behind = len(found), unseen
        return [NO_BLOCK] * behind + found[behind:longest]
