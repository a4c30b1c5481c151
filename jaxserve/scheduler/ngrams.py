"""Drafts by look-up: what followed when the last few tokens stood there before, in the prompt or in the answer itself
(prompt lookup decoding; LLMA, arXiv:2304.04487)."""

from __future__ import annotations

from collections.abc import Sequence

_LONGEST = 8  # matching tokens beyond which no better match is looked for
_CANDIDATES = 8  # earlier occurrences of the last two tokens that are looked at, latest first


class NgramIndex:
    """Every place where the last two tokens of a growing sequence stood before.

    O(1) a token and a look-up.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        """Args:
        tokens: the sequence; its owner goes on appending to it.
        """
        self._tokens = tokens
        self._latest: dict[tuple[int, int], int] = {}  # a pair of tokens -> where it last ended, the end left out
        self._before = [0, 0]  # by such an end: where the same pair ended before; 0 is nowhere

    def propose(self, most: int) -> list[int]:
        """What followed the longest match of the sequence's end, the latest of equals: `most` tokens, or none.

        A match that reaches the end of the sequence is continued by what it proposes: text that repeats goes on
        repeating.
        """
        tokens, latest, before = self._tokens, self._latest, self._before
        last = len(tokens)
        for end in range(len(before), last):
            pair = (tokens[end - 2], tokens[end - 1])
            before.append(latest.get(pair, 0))
            latest[pair] = end
        if last < 3:
            return []
        best, longest = 0, 1
        end = latest.get((tokens[-2], tokens[-1]), 0)
        for _ in range(_CANDIDATES):
            if not end:
                break
            length = 2
            while length < _LONGEST and length < end and tokens[end - 1 - length] == tokens[last - 1 - length]:
                length += 1
            if length > longest:
                best, longest = end, length
                if length == _LONGEST:
                    break
            end = before[end]
        if not best:
            return []
        found = list(tokens[best : best + most])
        while len(found) < most:
            found.append(found[best - last])  # counts from the end, where the copy catches up with itself
        return found
