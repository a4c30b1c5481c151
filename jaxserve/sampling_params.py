"""How the tokens of one request are chosen: plain values, no jax."""

from __future__ import annotations

import dataclasses
import math
import sys
from dataclasses import dataclass, fields
from typing import Literal, get_args

from jaxserve.errors import InvalidRequest

MAX_LOGPROBS = 20  # most alternatives reported for a position
MAX_LOGIT_BIAS = 300  # most entries of a logit_bias
MAX_STOP = 16  # most stop strings, and most stop token ids
MAX_ENDINGS = 64  # tokens that min_tokens can bar
MAX_BAD_WORDS = 64  # most strings that are never to appear
MAX_BAD_WORD_TOKENS = 256  # of all of them together, as token ids
MAX_GRAMMAR_BYTES = 65_536  # of a grammar's text in UTF-8

GrammarKind = Literal["json_schema", "regex", "choice", "lark"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What a generated text has to be, whole: a value, checked for its size alone (`grammar.read`, `matcher.Grammars`).

    Attributes:
      kind: what `text` is.
      text: a JSON schema; a regular expression (Rust's syntax, for the whole text); a JSON list of the strings that it
        may be; a grammar in llguidance's dialect of Lark, or in GBNF.
      field: what its caller called it, for errors. Of no matter to what it means.
    """

    kind: GrammarKind
    text: str
    field: str = dataclasses.field(default="grammar", compare=False)

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise InvalidRequest(self.field, f"is of type {self.kind!r}; it must be {', '.join(get_args(GrammarKind))}")
        if not isinstance(self.text, str):
            raise InvalidRequest(self.field, f"has {type(self.text).__name__} for its text; it must be a string")
        if (size := len(self.text.encode(errors="replace"))) > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(self.field, f"has {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends.

    The order is penalties and logit_bias, temperature, top_k, top_p (over what top_k left), min_p. Logprobs are always
    those of the model's own distribution, before any of them.

    Attributes:
      max_tokens: most tokens to generate.
      temperature: 0 is greedy.
      top_p / top_k / min_p: 1, 0 and 0 switch them off.
      repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output (CTRL,
        arXiv:1909.05858, section 4.1); 1 is off.
      presence_penalty / frequency_penalty: taken off the logits of generated tokens, once / per occurrence.
      logit_bias: (token id, bias) pairs added to the logits.
      seed: 64-bit seed; the engine needs one, and callers who do not give one are told which was drawn.
      sample_index: which of several samples of one prompt this is; folded into the random key.
      stop: strings that end the text (checked where text is made, not by the scheduler).
      stop_token_ids: tokens that end the request, beside the model's own end of sequence.
      min_tokens: so many tokens are generated before the end of sequence or a stop token can be chosen, and before stop
        strings are looked for.
      bad_words: strings that are not to be generated; `bad_word_tokens` has them as the sampler does.
      bad_word_tokens: runs of token ids that never stand complete: the last token of a run is barred where those before
        it stand, be it in the prompt. Made of bad_words by `parse_request`.
      ignore_eos: generate on past the end-of-sequence token.
      logprobs: None is off; k reports the chosen token's logprob and the k likeliest tokens.
      prompt_logprobs: likewise for the prompt's tokens.
      grammar: what the text has to be. Tokens that it does not allow are not chosen, and it ends where nothing may
        follow; ignore_eos goes on as long as something may.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    sample_index: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    bad_words: tuple[str, ...] = ()
    bad_word_tokens: tuple[tuple[int, ...], ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        _integer("max_tokens", self.max_tokens, low=1)
        _number("temperature", self.temperature, low=0.0)
        _number("top_p", self.top_p, low=0.0, high=1.0, low_open=True)
        _integer("top_k", self.top_k, low=0)
        _number("min_p", self.min_p, low=0.0, high=1.0)
        _number("repetition_penalty", self.repetition_penalty, low=0.0, low_open=True)
        _number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        _integer("seed", self.seed, low=-(2**63), high=2**64 - 1)
        _integer("sample_index", self.sample_index, low=0, high=2**31 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), low=0, high=MAX_LOGPROBS)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(
                "logit_bias", f"has {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIAS} are allowed"
            )
        for token, bias in self.logit_bias:
            _integer("logit_bias", token, low=0)
            _number("logit_bias", bias, low=-100.0, high=100.0)
        for name, kind, most in (
            ("stop", str, MAX_STOP),
            ("stop_token_ids", int, MAX_STOP),
            ("bad_words", str, MAX_BAD_WORDS),
        ):
            values = getattr(self, name)
            if len(values) > most:
                raise InvalidRequest(name, f"has {len(values)} entries; at most {most} are allowed")
            if any(not isinstance(v, kind) or isinstance(v, bool) or v == "" for v in values):
                raise InvalidRequest(name, f"is {list(values)!r}; every entry must be a non-empty {kind.__name__}")
        _integer("min_tokens", self.min_tokens, low=0)
        if self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens", f"is {self.min_tokens}, more than max_tokens ({self.max_tokens})")
        if not all(self.bad_word_tokens):
            raise InvalidRequest("bad_words", "holds a word of no tokens")
        if (count := sum(map(len, self.bad_word_tokens))) > MAX_BAD_WORD_TOKENS:
            raise InvalidRequest("bad_words", f"come to {count} tokens; at most {MAX_BAD_WORD_TOKENS} are allowed")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise InvalidRequest("grammar", f"is a {type(self.grammar).__name__}; it must be a Grammar")

    @property
    def is_penalised(self) -> bool:
        """Whether choosing a token needs the row's own history, or a bias or bar of its own."""
        return bool(
            self.logit_bias
            or self.min_tokens
            or self.bad_word_tokens
            or self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens are barred from being drawn (greedy rows need no truncation)."""
        return self.temperature > 0 and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)


# What a caller may give; the others are made of that.
SAMPLING_FIELDS = tuple(f.name for f in fields(SamplingParams) if f.name not in ("sample_index", "bad_word_tokens"))


def _integer(name: str, value: object, *, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        limit = f"from {low} to {high}" if high is not None else f"of at least {low}"
        raise InvalidRequest(name, f"is {value!r}; it must be a whole number {limit}")


def _number(name: str, value: object, *, low: float, high: float = math.inf, low_open: bool = False) -> None:
    # math.isfinite raises on whole numbers beyond a float's range.
    largest = sys.float_info.max
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -largest <= value <= largest:
        raise InvalidRequest(name, f"is {value!r}; it must be a finite number")
    if value < low or value > high or (low_open and value == low):
        above = f"above {low:g}" if low_open else f"of at least {low:g}"
        raise InvalidRequest(
            name, f"is {value!r}; it must be {above}" + ("" if math.isinf(high) else f" and at most {high:g}")
        )
