"""Chooses the replica for a request: the one with the fewest tokens left. Imports no jax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class OutstandingTokens:
    """Tokens that may still have to be computed for a request.

    Attributes:
      prompt: prompt tokens, before it generates; 0 once it does.
      to_generate: tokens that it may still generate.
    """

    prompt: int
    to_generate: int

    @property
    def tokens(self) -> int:
        return self.prompt + self.to_generate

    def generated(self, tokens: int) -> int:
        """Subtract generated tokens. Returns how many tokens are no longer outstanding."""
        paid = self.prompt + tokens
        self.prompt = 0
        self.to_generate -= tokens
        return paid


def choose(owed: Sequence[int], cached: Sequence[int]) -> int:
    """The index of the replica for a request.

    Args:
      owed: tokens that each replica still has to compute.
      cached: tokens of the request's prompt in each replica's prefix cache.
    """
    return min(range(len(owed)), key=lambda index: owed[index] - cached[index])
