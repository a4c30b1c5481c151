"""Requests that arrive at their times, and the loops that serve them with any engine.

A load is `prompts` (token ids), `outputs` (how many tokens to generate for each), `arrivals` (ascending seconds) and
`rows`, the most requests that an engine may work at together.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

REHEARSAL = 4  # tokens


class Traffic:
    """One run of a load: yields requests by number when they are due, and records token times."""

    def __init__(self, load: dict[str, Any]) -> None:
        self.prompts, self.outputs, self.arrivals = load["prompts"], load["outputs"], load["arrivals"]
        self.rows: int = load["rows"]
        self.tokens: list[list[int]] = [[] for _ in self.prompts]
        self.times: list[list[float]] = [[] for _ in self.prompts]
        self._taken = 0
        self._started = time.perf_counter()

    @classmethod
    def rehearsal(cls, load: dict[str, Any]) -> Traffic:
        """A few short requests of the same kind at once, to warm an engine up."""
        prompts = [prompt[::-1] for prompt in load["prompts"][: load["rows"]]]
        return cls(
            {**load, "prompts": prompts, "outputs": [REHEARSAL] * len(prompts), "arrivals": [0.0] * len(prompts)}
        )

    def begin(self) -> None:
        """Starts the clock."""
        self._started = time.perf_counter()

    @property
    def coming(self) -> bool:
        """Whether some requests have not been taken."""
        return self._taken < len(self.prompts)

    def take(self, most: int) -> list[int]:
        """Takes up to `most` requests that have arrived, in the order of arrival."""
        now, begin = time.perf_counter() - self._started, self._taken
        while self._taken < min(begin + most, len(self.prompts)) and self.arrivals[self._taken] <= now:
            self._taken += 1
        return list(range(begin, self._taken))

    def wait(self) -> None:
        """Sleeps until the next request arrives."""
        if self.coming:
            time.sleep(max(0.0, self._started + self.arrivals[self._taken] - time.perf_counter()))

    def add(self, request: int, token: int) -> bool:
        """Records a token, unless the request is complete; returns whether it is complete now."""
        if len(self.tokens[request]) < self.outputs[request]:
            self.tokens[request].append(token)
            self.times[request].append(time.perf_counter() - self._started)
        return len(self.tokens[request]) >= self.outputs[request]

    def result(self) -> dict[str, Any]:
        """`tokens` of every request and their `times`, seconds on the clock of the arrivals."""
        return {"tokens": self.tokens, "times": self.times}


def serve_by_batches(traffic: Traffic, generate: Callable[[list[int]], None]) -> None:
    """Request-level batching: serves up to `rows` waiting requests to their end, then the next.

    Args:
      generate: serves a batch of requests, and adds each token to the traffic.
    """
    traffic.begin()
    while traffic.coming:
        batch = traffic.take(traffic.rows)
        if batch:
            generate(batch)
        else:
            traffic.wait()


class Token(NamedTuple):
    """One token of a batch; `wanted` asks for the token after it."""

    token: int
    position: int
    sequence: int
    wanted: bool


def serve_by_iterations(
    traffic: Traffic, largest: int, step: Callable[[list[Token]], Sequence[int]], forget: Callable[[int], None]
) -> None:
    """Continuous batching as llama.cpp's server does it.

    A batch has the next token of every generating request and then, in the order of arrival, prompt tokens, up to
    `largest` in all.

    Args:
      step: runs a batch; returns the likeliest token after each token that was wanted.
      forget: empties a sequence for another request.
    """
    free = deque(range(traffic.rows))
    request_of: dict[int, int] = {}  # by sequence
    done: dict[int, int] = {}  # tokens of each sequence that have been through a batch
    traffic.begin()
    while traffic.coming or request_of:
        for request in traffic.take(len(free)):
            sequence = free.popleft()
            request_of[sequence], done[sequence] = request, 0
        if not request_of:
            traffic.wait()
            continue
        batch: list[Token] = []
        for sequence, request in request_of.items():
            if traffic.tokens[request]:
                batch.append(Token(traffic.tokens[request][-1], done[sequence], sequence, True))
        for sequence, request in request_of.items():
            prompt, begin = traffic.prompts[request], done[sequence]
            end = min(len(prompt), begin + largest - len(batch))
            batch += [Token(prompt[at], at, sequence, at == len(prompt) - 1) for at in range(begin, end)]
        answers = step(batch)
        for token in batch:
            done[token.sequence] += 1
        wanted = (token for token in batch if token.wanted)
        for token, answer in zip(wanted, answers, strict=True):
            if traffic.add(request_of[token.sequence], int(answer)):
                forget(token.sequence)
                free.append(token.sequence)
                del request_of[token.sequence]
