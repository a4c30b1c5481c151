"""Sampling parameters of a request: plain values, no jax.

`param` gives a field its limits, its help and what protocols do with it. Parsing, command-line flags, HTTP schemas,
refusals and the table in docs/features.md read that, so a new parameter is added here, in the sampler and in the two
.proto files.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

from jaxserve.errors import InvalidRequest
from jaxserve.fields import param, params

MAX_LOGPROBS = 20  # most alternatives reported for a position
MAX_LOGIT_BIAS = 300  # most entries of logit_bias
MAX_STOP = 16  # most stop strings, and most stop token ids
MAX_ENDINGS = 64  # most tokens that min_tokens can bar
MAX_BAD_WORDS = 64  # most strings in bad_words
MAX_BAD_WORD_TOKENS = 256  # most tokens in all bad_words together
MAX_GRAMMAR_BYTES = 65_536  # most bytes of a grammar's text in UTF-8

GrammarKind = Literal["json_schema", "regex", "choice", "lark"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """A constraint on the generated text.

    Only its size is checked here; `compiler.GrammarCompiler` compiles it.

    Attributes:
      kind: what `text` is.
      text: a JSON schema; a regular expression (Rust's syntax) for the whole text; a JSON list of the allowed strings;
        or a grammar in llguidance's dialect of Lark, or in GBNF.
      field: the caller's name for it, used in errors and ignored in comparisons.
    """

    kind: GrammarKind
    text: str
    field: str = dataclasses.field(default="grammar", compare=False)

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise InvalidRequest(self.field, f"is of type {self.kind!r}; it must be {', '.join(get_args(GrammarKind))}")
        if not isinstance(self.text, str):
            raise InvalidRequest(self.field, f"has {type(self.text).__name__} as its text; it must be a string")
        if (size := len(self.text.encode(errors="replace"))) > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(self.field, f"has {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends.

    Rules apply in this order: penalties and logit_bias, temperature, top_k, top_p (over what top_k left), min_p,
    typical_p (over what the others left).
    Logprobs are those of the model's own distribution, before any of these rules.
    """

    max_tokens: int = param(128, "most tokens to generate", minimum=1, beam_search=True)
    min_tokens: int = param(0, "tokens to generate before an end of sequence or a stop can end the text", minimum=0)
    temperature: float = param(1.0, "sampling temperature; 0 is greedy", minimum=0, beam_search=True)
    top_p: float = param(
        1.0,
        "sample from the likeliest tokens that hold this much probability",
        default_help="1, off",
        minimum=0,
        exclusive=True,
        maximum=1,
        truncates=True,
        in_tgi=True,
    )
    top_k: int = param(
        0,
        "sample from this many of the likeliest tokens",
        default_help="0, off",
        minimum=0,
        truncates=True,
        in_tgi=True,
    )
    min_p: float = param(
        0.0,
        "drop tokens less likely than this share of the likeliest token's probability",
        default_help="0, off",
        minimum=0,
        maximum=1,
        truncates=True,
    )
    # Locally typical sampling (Meister et al. 2022, arXiv:2202.00666).
    typical_p: float = param(
        1.0,
        "sample from the tokens with surprisal nearest to the entropy that hold this much probability",
        default_help="1, off",
        minimum=0,
        exclusive=True,
        maximum=1,
        truncates=True,
        in_tgi=True,
    )
    # CTRL, arXiv:1909.05858, section 4.1: divides positive and multiplies negative logits.
    repetition_penalty: float = param(
        1.0,
        "above 1, tokens of the prompt and the answer become less likely",
        default_help="1, off",
        minimum=0,
        exclusive=True,
        in_tgi=True,
    )
    presence_penalty: float = param(0.0, "subtracted from the logits of generated tokens", minimum=-2, maximum=2)
    frequency_penalty: float = param(
        0.0,
        "subtracted from a generated token's logit once per occurrence",
        minimum=-2,
        maximum=2,
        in_tgi=True,
    )
    logit_bias: tuple[tuple[int, float], ...] = param(
        (), "added to the logits of these tokens", minimum=-100, maximum=100, max_items=MAX_LOGIT_BIAS
    )
    seed: int = param(
        0,
        "64-bit seed; the same seed gives the same answer",
        default_help="drawn at random and reported",
        minimum=-(2**63),
        maximum=2**64 - 1,
        beam_search=True,
    )
    stop: tuple[str, ...] = param((), "a string that ends the text; may be repeated", max_items=MAX_STOP)
    stop_token_ids: tuple[int, ...] = param(
        (), "tokens that end the text", minimum=0, max_items=MAX_STOP, beam_search=True
    )
    bad_words: tuple[str, ...] = param((), "a string that must not appear; may be repeated", max_items=MAX_BAD_WORDS)
    ignore_eos: bool = param(False, "continue after an end-of-sequence token", beam_search=True)
    logprobs: int | None = param(
        None,
        "report the logprob of every token, and this many of the likeliest tokens",
        default_help="off",
        minimum=0,
        maximum=MAX_LOGPROBS,
        beam_search=True,
    )
    prompt_logprobs: int | None = param(
        None, "the same for the prompt's tokens", default_help="off", minimum=0, maximum=MAX_LOGPROBS
    )
    grammar: Grammar | None = param(None, "a constraint on the text: JSON, a regular expression, a choice or a grammar")
    # Callers cannot set these. `sample_index` is the index of this sample of its prompt; the random key folds it in.
    # `bad_word_tokens` is bad_words as tokens: the last token of a run is barred after the others.
    sample_index: int = 0
    bad_word_tokens: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        for name, each in SAMPLING_PARAMS.items():
            if (problem := each.problem(getattr(self, name))) is not None:
                raise InvalidRequest(name, problem)
        assert 0 <= self.sample_index < 2**31
        if self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens", f"is {self.min_tokens}, more than max_tokens ({self.max_tokens})")
        if not all(self.bad_word_tokens):
            raise InvalidRequest("bad_words", "has a word without tokens")
        if (count := sum(map(len, self.bad_word_tokens))) > MAX_BAD_WORD_TOKENS:
            raise InvalidRequest("bad_words", f"have {count} tokens; at most {MAX_BAD_WORD_TOKENS} are allowed")

    @property
    def is_penalised(self) -> bool:
        """Whether the logits change before sampling: by a penalty, a bias or barred tokens."""
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
        """Whether unlikely tokens are dropped before sampling; never for a greedy request."""
        return self.temperature > 0 and any(getattr(self, name) != default for name, default in _TRUNCATING)

    @property
    def is_typical(self) -> bool:
        """Whether typical_p drops tokens before sampling; never for a greedy request."""
        return self.temperature > 0 and self.typical_p < 1


SAMPLING_PARAMS = params(SamplingParams)  # the fields that a caller can set
_TRUNCATING = tuple((name, each.default) for name, each in SAMPLING_PARAMS.items() if each.truncates)
