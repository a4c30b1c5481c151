"""Beam search on top of an engine: finds the likeliest continuations of a prompt.

Each step sends a request of one token per beam; the alternatives of that token extend the beam. The prefix cache serves
the tokens that beams share. A search of width w considers the 2w likeliest tokens of each beam, so that at least w
beams continue even if w tokens end their beams. The score of a complete beam is its sum of logprobs divided by its
length to the power of `length_penalty`. The length counts prompt and answer without the end token, as in vLLM
(`vllm/beam_search.py`) and transformers. The search ends when no live beam can reach a better score than the best
complete ones.
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
_NEUTRAL = {"length_penalty": 1.0, "early_stopping": False}  # clients send these without a search, too


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamParams:
    """Parameters of a beam search.

    Attributes:
      width: number of beams.
      n: number of the best answers to return.
      length_penalty: scores are divided by the length to this power; above 0 favours long answers.
      early_stopping: end as soon as `width` beams are complete, even if better ones are possible.
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


def parse_beam_params(fields: Mapping[str, Any]) -> BeamParams | None:
    """Parses the fields in FIELDS of a call; returns None for a call without beam search.

    A field whose value is None counts as absent.

    Raises:
      InvalidRequest: naming the field.
    """
    given = {name: fields[name] for name in FIELDS if fields.get(name) is not None}
    if not given.pop("use_beam_search", False):
        for name, neutral in _NEUTRAL.items():
            if given.get(name, neutral) != neutral:
                raise InvalidRequest(name, "is for beam search; set use_beam_search as well")
        return None
    n = given.pop("n", 1)
    if (not _is_whole(n) or n > MAX_WIDTH) and "best_of" not in given:
        raise InvalidRequest("n", f"is {n!r}; a beam search is from 1 to {MAX_WIDTH} beams wide")
    return BeamParams(width=given.pop("best_of", n), n=n, **given)


def check(request: Request) -> None:
    """Raises InvalidRequest for a sampling parameter that beam search does not support."""
    sampling = request.sampling
    for name, param in SAMPLING_PARAMS.items():
        if not param.beam_search and getattr(sampling, name) != param.default:
            raise InvalidRequest(name, "is not served with use_beam_search")
    if sampling.temperature not in (0.0, 1.0):
        raise InvalidRequest("temperature", f"is {sampling.temperature}; use_beam_search does not sample; leave it out")


class Beam(NamedTuple):
    """A continuation of the prompt.

    Attributes:
      logprobs / tops: logprob and alternatives of each token.
      total: sum of the logprobs.
      score: length-normalised total of a complete beam; 0 before.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    tops: tuple[Alternatives, ...] = ()
    total: float = 0.0
    score: float = 0.0
    finish_reason: FinishReason | None = None


class _Candidate(NamedTuple):
    """A beam and one more token; only the best candidates become beams."""

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
    """One beam search: in each step, run `requests()` and pass the answers to `take`."""

    def __init__(self, request: Request, params: BeamParams, eos_token_ids: Sequence[int]) -> None:
        """Args:
        request: the prompt, max_tokens and the tokens that end an answer.

        Raises:
          InvalidRequest: it has a sampling parameter that beam search does not support.
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
        """Number of generated tokens of each live beam."""
        return len(self._live[0].token_ids) if self._live else self.request.sampling.max_tokens

    @property
    def is_finished(self) -> bool:
        return not self._live

    def requests(self, name: Callable[[], str]) -> list[Request]:
        """The requests of this step: one token for each live beam."""
        prompt = self.request.prompt
        return [
            dataclasses.replace(
                self.request, request_id=name(), prompt=prompt + beam.token_ids, sampling=self._step, fork_of=None
            )
            for beam in self._live
        ]

    def take(self, answers: Sequence[Alternatives]) -> None:
        """Extends the live beams by their likeliest next tokens, given as alternatives per beam."""
        width = self.params.width
        candidates: list[_Candidate] = []
        for beam, tops in zip(self._live, answers, strict=True):
            for token, logprob in zip(tops.token_ids[: 2 * width], tops.logprobs[: 2 * width], strict=True):
                candidate = _Candidate(beam.total + logprob, beam, token, logprob, tops)
                if token in self._endings:
                    self._end(candidate.beam(), FinishReason.EOS if token in self._eos else FinishReason.STOP)
                elif logprob > -math.inf:
                    candidates.append(candidate)
        candidates.sort(
            key=lambda each: -each.total
        )  # stable: among equals, the likelier beam first, then the likelier token
        self._live = [candidate.beam() for candidate in candidates[:width]]
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
        """The `n` best answers, best first; fewer only if the vocabulary allows no more."""
        return self._complete[: self.params.n]

    def _score(self, total: float, length: int) -> float:
        return total / max(1, len(self.request.prompt) + length) ** self.params.length_penalty

    def _bound(self, total: float) -> float:
        """Upper bound of the final score of a beam with this total.

        More tokens never raise the total, and the score is monotonic in the length.
        """
        return max(self._score(total, self.length), self._score(total, self.request.sampling.max_tokens))

    def _end(self, beam: Beam, reason: FinishReason) -> None:
        if beam.total == -math.inf:
            return
        counted = len(beam.token_ids) - (reason is not FinishReason.LENGTH)
        self._complete.append(beam._replace(score=self._score(beam.total, counted), finish_reason=reason))


def completions(search: BeamSearch, tokenizer: Tokenizer | None, eos_token_ids: Sequence[int]) -> list[Completion]:
    """Converts the best answers to completions with scores, best first."""
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
