"""Drafts that are written down beforehand, and what buckets cost where drafts are weighed."""

from jaxserve.scheduler.buckets import BucketCost, BucketLadder


def ladder(prices: dict[int, float]) -> BucketLadder:
    return BucketLadder([BucketCost(size=n, compile_seconds=0.0, milliseconds=ms) for n, ms in prices.items()])


class Script:
    """Drafts by how many tokens are known."""

    def __init__(self, tokens, drafts: dict[int, tuple[int, ...]]) -> None:
        self.tokens = tokens
        self.drafts = drafts

    def propose(self, most: int) -> tuple[int, ...]:
        return self.drafts.get(len(self.tokens), ())[:most]
