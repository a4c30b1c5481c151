"""Assembles the engine's events of one request into text and a completion."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxserve.errors import InvalidRequest
from jaxserve.request import Alternatives, FinishReason, Request, TokenEvent
from jaxserve.text.tokenizer import Tokenizer

PromptLogprob = tuple[float, Alternatives | None]


class Delta(NamedTuple):
    """The part of a completion that one event adds.

    Attributes:
      text: new text; never a part of a character or of a stop string.
      token_ids: new tokens, including the one that ended the request.
      logprobs / top_logprobs: logprob and alternatives of each new token; empty unless requested.
      prompt_logprobs: (logprob, alternatives) of scored prompt tokens, in order; the first token of the prompt has
        none and is left out. Empty unless requested.
      finish_reason: None until the request ends.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[Alternatives, ...] = ()
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    finish_reason: FinishReason | None = None


def merge_deltas(deltas: Sequence[Delta]) -> Delta:
    """Concatenates deltas of one request, in order."""
    if len(deltas) == 1:
        return deltas[0]
    return Delta(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
        top_logprobs=tuple(top for delta in deltas for top in delta.top_logprobs),
        prompt_logprobs=tuple(scored for delta in deltas for scored in delta.prompt_logprobs),
        finish_reason=next((delta.finish_reason for delta in deltas if delta.finish_reason), None),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The answer to a request, complete or so far.

    Attributes:
      token_ids: all generated tokens, including the one that ended the request.
      text: text of the tokens, without the end token and the stop string.
      finish_reason: None if it has not ended yet.
      seed: seed of the sampling; None for a greedy request.
      logprobs: logprob of each token; None unless requested.
      top_logprobs: alternatives of each token; None unless requested.
      prompt_logprobs: logprob of each prompt token, None for the first; None unless requested.
      prompt_top_logprobs: alternatives of each prompt token, None for the first; None unless requested.
      prompt_tokens / cached_tokens: length of the prompt, and how much of it the prefix cache served.
      matched_stop: the stop string that ended the request, if any.
      error: message of FinishReason.ERROR.
      embedding: of the prompt; None unless requested.
      score: of a beam search: the sum of logprobs divided by the length to the power of length_penalty.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    seed: int | None = None
    logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[Alternatives, ...] | None = None
    prompt_logprobs: tuple[float | None, ...] | None = None
    prompt_top_logprobs: tuple[Alternatives | None, ...] | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    matched_stop: str | None = None
    error: str | None = None
    embedding: tuple[float, ...] | None = None
    score: float | None = None

    def __repr__(self) -> str:
        """The text first, then what else there is."""
        names = ("text", *(each.name for each in dataclasses.fields(self) if each.name not in ("text", "token_ids")))
        shown = ((name, value) for name in names if (value := getattr(self, name)) is not None)
        listed = ", ".join(f"{name}={value.value if name == 'finish_reason' else value!r}" for name, value in shown)
        return f"Completion({listed}, token_ids={self.token_ids!r})"

    @property
    def delta(self) -> Delta:
        """The whole completion as one delta."""
        scored = (self.prompt_logprobs or ())[1:]
        tops = (self.prompt_top_logprobs or ())[1:] or (None,) * len(scored)
        return Delta(
            text=self.text,
            token_ids=self.token_ids,
            logprobs=self.logprobs or (),
            top_logprobs=self.top_logprobs or (),
            prompt_logprobs=tuple((p, top) for p, top in zip(scored, tops, strict=True) if p is not None),
            finish_reason=self.finish_reason,
        )

    def to_json(self) -> dict[str, Any]:
        """A mapping for `json.dumps`: id, text, token_ids, finish_reason and the requested logprobs.

        The alternatives of each token are an object from token id to logprob, likeliest first. A logprob that is not
        finite is null. A failed request has only an id and an error.
        """
        if self.error is not None:
            return {"id": self.request_id, "error": self.error}
        line: dict[str, Any] = {
            "id": self.request_id,
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": None if self.finish_reason is None else self.finish_reason.value,
        }
        if self.seed is not None:
            line["seed"] = self.seed
        for name in ("logprobs", "prompt_logprobs"):
            if (values := getattr(self, name)) is not None:
                line[name] = [_finite(value) for value in values]
        for name in ("top_logprobs", "prompt_top_logprobs"):
            if (values := getattr(self, name)) is not None:
                line[name] = [_by_id(alternatives) for alternatives in values]
        return line


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _by_id(alternatives: Alternatives | None) -> dict[str, float | None] | None:
    if alternatives is None:
        return None
    return {str(i): _finite(p) for i, p in zip(alternatives.token_ids, alternatives.logprobs, strict=True)}


class Assembler:
    """Assembles the completion of one request from its events.

    The text ends where a stop string begins, and the tokens end with the one that completed it. If several stop strings
    match, the one that is completed first counts, however the text was split into events. A stop string that is
    completed within the first `min_tokens` tokens is ordinary text. After a stop string the caller must abort the
    request in the engine.

    Args:
      special_tokens: whether special tokens have text, but for the one that ends the request.

    Raises:
      InvalidRequest: the request has stop strings and there is no tokenizer to make text.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer | None,
        eos_token_ids: Iterable[int] = (),
        *,
        special_tokens: bool = False,
    ) -> None:
        sampling = request.sampling
        if sampling.stop and tokenizer is None:
            raise InvalidRequest("stop", "needs a tokenizer, and this checkpoint has none; use stop_token_ids")
        self._request = request
        self._ending = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            self._ending |= frozenset(eos_token_ids)
        self._stream = None if tokenizer is None else tokenizer.stream(request.prompt, special_tokens=special_tokens)
        self._held = ""  # text that may be the beginning of a stop string
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._top_logprobs: list[Alternatives] = []
        self._prompt_logprobs: list[PromptLogprob] = []
        self._cached_tokens = 0
        self._matched_stop: str | None = None
        self._error: str | None = None
        self._embedding: tuple[float, ...] | None = None
        self._finish_reason: FinishReason | None = None

    @property
    def finished(self) -> bool:
        """Whether the completion is complete; later events are ignored."""
        return self._finish_reason is not None

    def push(self, event: TokenEvent) -> Delta:
        """Adds an event and returns its delta."""
        if self.finished:
            return Delta()
        text, used, stopped = self._add_text(event)
        reason = FinishReason.STOP if stopped else event.finish_reason
        sampling = self._request.sampling
        delta = Delta(
            text=text,
            token_ids=event.token_ids[:used],
            logprobs=() if sampling.logprobs is None else event.logprobs[:used],
            top_logprobs=event.top_logprobs[:used] if sampling.logprobs else (),
            prompt_logprobs=() if sampling.prompt_logprobs is None else event.prompt_logprobs,
            finish_reason=reason,
        )
        self._texts.append(delta.text)
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs
        self._top_logprobs += delta.top_logprobs
        self._prompt_logprobs += delta.prompt_logprobs
        self._cached_tokens = max(self._cached_tokens, event.cached_tokens)
        self._error = event.error
        self._embedding = event.embedding or self._embedding
        self._finish_reason = reason
        return delta

    def completion(self) -> Completion:
        """The completion so far; complete once `finished`."""
        sampling = self._request.sampling
        prompt_logprobs = prompt_top = None
        if sampling.prompt_logprobs is not None:
            prompt_logprobs = (None, *(logprob for logprob, _ in self._prompt_logprobs))
            if sampling.prompt_logprobs:
                prompt_top = (None, *(alternatives for _, alternatives in self._prompt_logprobs))
        return Completion(
            request_id=self._request.request_id,
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            finish_reason=self._finish_reason,
            seed=sampling.seed if sampling.temperature > 0 else None,
            logprobs=None if sampling.logprobs is None else tuple(self._logprobs),
            top_logprobs=tuple(self._top_logprobs) if sampling.logprobs else None,
            prompt_logprobs=prompt_logprobs,
            prompt_top_logprobs=prompt_top,
            prompt_tokens=len(self._request.prompt),
            cached_tokens=self._cached_tokens,
            matched_stop=self._matched_stop,
            error=self._error,
            embedding=self._embedding,
        )

    def _add_text(self, event: TokenEvent) -> tuple[str, int, bool]:
        """(new text, tokens used, whether a stop string was completed)."""
        tokens, stream = event.token_ids, self._stream
        if stream is None:
            return "", len(tokens), False
        if not self._request.sampling.stop:
            text = stream.push(token for token in tokens if token not in self._ending)
            return text + (stream.flush() if event.finish_reason else ""), len(tokens), False
        out = ""
        early = self._request.sampling.min_tokens - len(
            self._token_ids
        )  # tokens within min_tokens, at which nothing stops
        for used, token in enumerate(tokens, 1):
            if token not in self._ending:
                text, stopped = self._until_stop(stream.push((token,)), stops=used > early)
                out += text
                if stopped:
                    return out, used, True
        if event.finish_reason:
            text, stopped = self._until_stop(stream.flush(), stops=len(tokens) > early)
            if stopped:
                return out + text, len(tokens), True
            out += text + self._held
        return out, len(tokens), False

    def _until_stop(self, piece: str, *, stops: bool) -> tuple[str, bool]:
        """Adds text; returns (text that is outside any stop string, whether one is complete).

        Args:
          stops: whether a stop string completed by this piece counts.
        """
        if not piece:
            return "", False
        known, text, strings = len(self._held), self._held + piece, self._request.sampling.stop
        ends = [
            (at + len(stop), at, stop)
            for stop in strings
            if (at := text.find(stop, max(0, known - len(stop) + 1))) >= 0
        ]
        if ends and stops:
            _, at, self._matched_stop = min(ends)
            self._held = ""
            return text[:at], True
        held = _partial_stop(text, strings)
        self._held = text[held:]
        return text[:held], False


def _partial_stop(text: str, stops: Sequence[str]) -> int:
    """Start of the longest suffix that is a prefix of a stop string; len(text) if there is none."""
    first = {stop[0] for stop in stops}
    for at, character in enumerate(text):
        if character in first and any(stop.startswith(text[at:]) for stop in stops):
            return at
    return len(text)
