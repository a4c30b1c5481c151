"""Several samples of one prompt, as requests: the first computes and scores the prompt, the others are forks of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from jaxserve.generation.completion import Completion
from jaxserve.request import Request, TokenEvent

MAX_SAMPLES = 128  # of one prompt


def samples_of(request: Request, count: int, name: Callable[[], str]) -> list[Request]:
    """So many samples of a request, each with a name and a sample_index of its own."""
    made: list[Request] = []
    for index in range(count):
        sampling = dataclasses.replace(request.sampling, sample_index=index)
        fork_of = made[0].request_id if made else None
        made.append(dataclasses.replace(request, request_id=name(), sampling=sampling, fork_of=fork_of))
    return made


def for_engine(request: Request) -> Request:
    """What the engine is to do of a request made here: a fork does not have the prompt scored again."""
    if request.fork_of is None or request.sampling.prompt_logprobs is None:
        return request
    return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, prompt_logprobs=None))


class PromptScores:
    """Passes the prompt's logprobs, which the engine tells for the first sample, on to the others."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._forks: dict[str, list[str]] = {}
        for request in requests:
            if request.fork_of is not None and request.sampling.prompt_logprobs is not None:
                self._forks.setdefault(request.fork_of, []).append(request.request_id)

    def spread(self, event: TokenEvent) -> list[TokenEvent]:
        """An event, and what it tells the other samples."""
        if not event.prompt_logprobs:
            return [event]
        forks = self._forks.get(event.request_id, ())
        return [event, *(TokenEvent(name, prompt_logprobs=event.prompt_logprobs) for name in forks)]


def best(completions: Sequence[Completion], n: int) -> list[Completion]:
    """The n completions of one prompt whose tokens are the likeliest on average; they have logprobs."""
    if n == len(completions):
        return list(completions)
    return sorted(completions, key=lambda one: -sum(one.logprobs or ()) / max(1, len(one.token_ids)))[:n]
