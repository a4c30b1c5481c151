"""Which requests an engine can serve at all, and how many may wait: judged wherever they are handed in. No jax."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.config import EngineConfig
from jaxserve.errors import InvalidRequest, QueueFull
from jaxserve.request import Request
from jaxserve.sampling_params import MAX_ENDINGS
from jaxserve.scheduler.state import check_fits


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an engine serves.

    Attributes:
      slots: of one replica.
      endings: tokens that end the model's texts.
      scoring: whether prompt_logprobs is served.
      has_tokenizer: whether text can be made of tokens.
    """

    vocab_size: int
    max_context: int
    slots: int
    endings: int
    scoring: bool
    has_tokenizer: bool

    def check(self, request: Request) -> None:
        """Raises InvalidRequest, naming the field, for a request that can never be served."""
        check_fits(request, self.max_context, self.slots)
        for field, tokens in (
            ("prompt_token_ids", request.prompt),
            ("stop_token_ids", request.sampling.stop_token_ids),
            ("logit_bias", [token for token, _ in request.sampling.logit_bias]),
            ("bad_words", [token for run in request.sampling.bad_word_tokens for token in run]),
        ):
            if tokens and (min(tokens) < 0 or max(tokens) >= self.vocab_size):
                wrong = next(token for token in tokens if not 0 <= token < self.vocab_size)
                raise InvalidRequest(field, f"has token id {wrong}; the vocabulary has ids 0 to {self.vocab_size - 1}")
        if request.sampling.prompt_logprobs is not None and not self.scoring:
            raise InvalidRequest("prompt_logprobs", "is not served: the engine was started without prompt scoring")
        if request.sampling.bad_words and not request.sampling.bad_word_tokens:
            raise InvalidRequest("bad_words", "are no tokens yet; parse_request makes them so")
        endings = self.endings + len(request.sampling.stop_token_ids)
        if request.sampling.min_tokens and endings > MAX_ENDINGS:
            raise InvalidRequest("min_tokens", f"bars {endings} tokens that end it; at most {MAX_ENDINGS} can be")
        if request.sampling.stop and not self.has_tokenizer:
            raise InvalidRequest("stop", "needs a tokenizer, and this checkpoint has none; use stop_token_ids")
        grammar = request.sampling.grammar
        if grammar is not None and not self.has_tokenizer:
            raise InvalidRequest(grammar.field, "needs a tokenizer, and this checkpoint has none")


def check_queue(config: EngineConfig, request: Request, *, waiting: int, waiting_tokens: int) -> None:
    """Raises QueueFull where so much waits that one more may not."""
    if waiting + 1 > config.max_queued_requests:
        raise QueueFull(f"{waiting} requests are waiting, as many as may (max_queued_requests)")
    if waiting_tokens + len(request.prompt) > config.max_queued_tokens and waiting:
        most, new = config.max_queued_tokens, len(request.prompt)
        raise QueueFull(f"{waiting_tokens} tokens are waiting; {new} more are over max_queued_tokens ({most})")
