"""Beam search on top of an engine: the most likely continuations of a prompt, so many of them kept at a time.

A step is one request of one token for every beam, whose alternatives are what the beam can go on with; what the beams
have in common is in the prefix cache. A beam of width w looks at the 2w likeliest tokens of each of its beams, so that
at least w of them go on whatever ends. A sum of logprobs is divided by the length to the power of `length_penalty`,
where the length counts prompt and answer but not the token that ended it, as vLLM (`vllm/beam_search.py`) and
transformers count. The search ends when no beam can come to a better score than the best that are complete: none that
would have been found by going on is missed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxserve.errors import InvalidRequest
from jaxserve.generation.completion import Assembler, Completion
from jaxserve.request import Alternatives, FinishReason, Request, TokenEvent
from jaxserve.sampling_params import MAX_LOGPROBS, SAMPLING_PARAMS, SamplingParams
from jaxserve.text.tokenizer import Tokenizer

MAX_WIDTH = MAX_LOGPROBS // 2
FIELDS = ("use_beam_search", "n", "best_of", "length_penalty", "early_stopping")


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamParams:
    """How wide to search and what to prefer.

    Attributes:
      width: beams kept.
      n: of the best that are answered with.
      length_penalty: power of the length that scores are divided by; above 0 favours long answers.
      early_stopping: end as soon as `width` are complete, whether or not better ones could still come.
    """

    width: int
    n: int
    length_penalty: float = 1.0
    early_stopping: bool = False

    def __post_init__(self) -> None:
        if not _is_whole(self.width) or not 1 <= self.width <= MAX_WIDTH:
            raise InvalidRequest("best_of", f"is {self.width!r}; a beam search is from 1 to {MAX_WIDTH} beams wide")
        if not _is_whole(self.n) or not 1 <= self.n <= self.width:
            raise InvalidRequest("n", f"is {self.n!r}; it must be from 1 to the {self.width} beams of best_of")
        penalty = self.length_penalty
        if isinstance(penalty, bool) or not isinstance(penalty, int | float) or not -10.0 <= penalty <= 10.0:
            raise InvalidRequest("length_penalty", f"is {penalty!r}; it must be a number from -10 to 10")
        if not isinstance(self.early_stopping, bool):
            raise InvalidRequest("early_stopping", f"is {self.early_stopping!r}; it must be true or false")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def params_of(fields: Mapping[str, Any]) -> BeamParams | None:
    """How a call wants its answers searched for, of those of its fields that are named in FIELDS (None is not given);
    None where it wants them drawn.

    Raises:
      InvalidRequest: naming the field.
    """
    given = {name: fields[name] for name in FIELDS if fields.get(name) is not None}
    if not given.pop("use_beam_search", False):
        for name in ("length_penalty", "early_stopping"):
            if name in given:
                raise InvalidRequest(name, "is for beam search; set use_beam_search as well")
        return None
    n = given.pop("n", 1)
    if (not _is_whole(n) or n > MAX_WIDTH) and "best_of" not in given:
        raise InvalidRequest("n", f"is {n!r}; a beam search is from 1 to {MAX_WIDTH} beams wide")
    return BeamParams(width=given.pop("best_of", n), n=n, **given)


def check(request: Request) -> None:
    """Raises InvalidRequest for a request with a field that means nothing to a beam search."""
    sampling = request.sampling
    for name, param in SAMPLING_PARAMS.items():
        if not param.beam_search and getattr(sampling, name) != param.default:
            raise InvalidRequest(name, "is not served with use_beam_search")
    if sampling.temperature not in (0.0, 1.0):
        raise InvalidRequest("temperature", f"is {sampling.temperature}; with use_beam_search nothing is drawn")


class Beam(NamedTuple):
    """A continuation of the prompt.

    Attributes:
      logprobs / tops: of each token, and what else stood there.
      total: sum of the logprobs.
      score: by which complete ones are compared; the total until then.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    tops: tuple[Alternatives, ...] = ()
    total: float = 0.0
    score: float = 0.0
    finish_reason: FinishReason | None = None


class _Follower(NamedTuple):
    """A beam with one token more, which few of them come to be."""

    total: float
    before: Beam
    token: int
    logprob: float
    tops: Alternatives

    def beam(self) -> Beam:
        before = self.before
        token_ids, logprobs = (*before.token_ids, self.token), (*before.logprobs, self.logprob)
        return Beam(token_ids, logprobs, (*before.tops, self.tops), self.total)


class BeamSearch:
    """One search, a step at a time: the caller has the engine answer `requests()` and hands the answers to `take`."""

    def __init__(self, request: Request, params: BeamParams, eos_token_ids: Sequence[int]) -> None:
        """Args:
        request: the prompt, the limit and what ends an answer.

        Raises:
          InvalidRequest: it has a field that means nothing here.
        """
        check(request)
        self.request, self.params = request, params
        self._eos = frozenset() if request.sampling.ignore_eos else frozenset(eos_token_ids)
        self._endings = self._eos.union(request.sampling.stop_token_ids)
        self._live = [Beam()]
        self._complete: list[Beam] = []
        wanted = max(2 * params.width, request.sampling.logprobs or 0)
        self._step = SamplingParams(max_tokens=1, temperature=0.0, logprobs=wanted, ignore_eos=True)

    @property
    def length(self) -> int:
        """Tokens that the beams have come to."""
        return len(self._live[0].token_ids) if self._live else self.request.sampling.max_tokens

    @property
    def is_finished(self) -> bool:
        return not self._live

    def requests(self, name: Callable[[], str]) -> list[Request]:
        """What the engine is to do in this step: one token for each beam."""
        prompt = self.request.prompt
        return [
            dataclasses.replace(
                self.request, request_id=name(), prompt=prompt + beam.token_ids, sampling=self._step, fork_of=None
            )
            for beam in self._live
        ]

    def take(self, answers: Sequence[Alternatives]) -> None:
        """Goes on with the likeliest tokens after each beam."""
        width = self.params.width
        followers: list[_Follower] = []
        for beam, tops in zip(self._live, answers, strict=True):
            for token, logprob in zip(tops.token_ids[: 2 * width], tops.logprobs[: 2 * width], strict=True):
                follower = _Follower(beam.total + logprob, beam, token, logprob, tops)
                if token in self._endings:
                    self._end(follower.beam(), FinishReason.EOS if token in self._eos else FinishReason.STOP)
                elif logprob > -math.inf:
                    followers.append(follower)
        followers.sort(key=lambda each: -each.total)  # stable: of equals the likelier beam's, then its likelier token
        self._live = [follower.beam() for follower in followers[:width]]
        if self._live and self.length == self.request.sampling.max_tokens:
            for beam in self._live:
                self._end(beam, FinishReason.LENGTH)
            self._live = []
        if not self._live and not self._complete:
            raise RuntimeError("no token has a probability above zero")
        self._complete.sort(key=lambda beam: -beam.score)
        del self._complete[width:]
        if self._live and len(self._complete) == width:
            bound = self._bound(self._live[0].total)
            if self.params.early_stopping or bound <= self._complete[-1].score:
                self._live = []

    def best(self) -> list[Beam]:
        """The best answers, best first; fewer than asked for only where the vocabulary has no more."""
        return self._complete[: self.params.n]

    def _score(self, total: float, length: int) -> float:
        return total / max(1, len(self.request.prompt) + length) ** self.params.length_penalty

    def _bound(self, total: float) -> float:
        """The best score that a beam of this total can come to: no token adds to a total, and a score falls or rises
        with the length."""
        return max(self._score(total, self.length), self._score(total, self.request.sampling.max_tokens))

    def _end(self, beam: Beam, reason: FinishReason) -> None:
        if beam.total == -math.inf:
            return
        counted = len(beam.token_ids) - (reason is not FinishReason.LENGTH)
        self._complete.append(beam._replace(score=self._score(beam.total, counted), finish_reason=reason))


def completions(search: BeamSearch, tokenizer: Tokenizer | None, eos_token_ids: Sequence[int]) -> list[Completion]:
    """The best answers as completions, best first, with their scores."""
    request, made = search.request, []
    most = request.sampling.logprobs
    for beam in search.best():
        assembler = Assembler(request, tokenizer, eos_token_ids)
        tops = tuple(Alternatives(top.token_ids[:most], top.logprobs[:most]) for top in beam.tops) if most else ()
        assembler.push(
            TokenEvent(request.request_id, beam.token_ids, beam.logprobs, tops, finish_reason=beam.finish_reason)
        )
        made.append(dataclasses.replace(assembler.completion(), score=beam.score, seed=None))
    return made
