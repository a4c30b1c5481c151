"""Drafts by n-gram lookup in the prompt and the answer so far.

The draft is what followed the last few tokens at an earlier place (prompt lookup decoding; LLMA, arXiv:2304.04487).
"""

from __future__ import annotations

from collections.abc import Sequence

_LONGEST = 8  # a match of this many tokens ends the search
_CANDIDATES = 8  # earlier occurrences of the last two tokens that are compared, latest first


class NgramIndex:
    """An index of every pair of adjacent tokens in a growing sequence.

    Adding a token and looking up a pair are both O(1).
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        """Args:
        tokens: the sequence; its owner keeps appending to it.
        """
        self._tokens = tokens
        self._latest: dict[tuple[int, int], int] = {}  # a pair of tokens -> the exclusive end of its latest occurrence
        self._before = [0, 0]  # such an end -> the end of the pair's previous occurrence; 0 means none

    def propose(self, most: int) -> list[int]:
        """`most` tokens that followed the longest earlier match of the sequence's end, or none.

        Among matches of equal length the latest wins. A match that reaches the end of the sequence continues with the
        proposed tokens themselves, so text that repeats keeps repeating.
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
            found.append(found[best - last])  # a negative index: the copy has caught up with itself
        return found
