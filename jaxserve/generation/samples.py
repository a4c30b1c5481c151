"""Several samples of one prompt: the first request computes the prompt, the others fork it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from jaxserve.generation.completion import Completion
from jaxserve.request import Request, TokenEvent

MAX_SAMPLES = 128  # samples per prompt


def expand_samples(request: Request, count: int, name: Callable[[], str]) -> list[Request]:
    """Expands a request into `count` samples, each with its own request_id and sample_index."""
    made: list[Request] = []
    for index in range(count):
        sampling = dataclasses.replace(request.sampling, sample_index=index)
        fork_of = made[0].request_id if made else None
        made.append(dataclasses.replace(request, request_id=name(), sampling=sampling, fork_of=fork_of))
    return made


def without_fork_scores(request: Request) -> Request:
    """Removes prompt_logprobs from a fork: the prompt is scored for the first sample only."""
    if request.fork_of is None or request.sampling.prompt_logprobs is None:
        return request
    return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, prompt_logprobs=None))


class PromptScores:
    """Copies prompt logprobs from the first sample, which alone computes them, to the others."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._forks: dict[str, list[str]] = {}
        for request in requests:
            if request.fork_of is not None and request.sampling.prompt_logprobs is not None:
                self._forks.setdefault(request.fork_of, []).append(request.request_id)

    def copy_to_forks(self, event: TokenEvent) -> list[TokenEvent]:
        """The event, and an event with its prompt logprobs for each fork."""
        if not event.prompt_logprobs:
            return [event]
        forks = self._forks.get(event.request_id, ())
        return [event, *(TokenEvent(name, prompt_logprobs=event.prompt_logprobs) for name in forks)]


def best(completions: Sequence[Completion], n: int) -> list[Completion]:
    """The n completions of one prompt with the highest mean logprob. They must have logprobs."""
    if n == len(completions):
        return list(completions)
    return sorted(completions, key=lambda one: -sum(one.logprobs or ()) / max(1, len(one.token_ids)))[:n]
