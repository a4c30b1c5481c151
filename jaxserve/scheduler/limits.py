"""Which requests an engine can serve, and how many may wait. Imports no jax."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.config import EngineConfig
from jaxserve.errors import InvalidRequest, QueueFull
from jaxserve.request import Request
from jaxserve.sampling_params import MAX_ENDINGS
from jaxserve.scheduler.state import check_fits


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one engine.

    Attributes:
      slots: slots that one request can have.
      endings: the model's end-of-text tokens.
      scoring: whether the engine serves prompt_logprobs and embeddings.
      has_tokenizer: whether the engine can turn tokens into text.
    """

    vocab_size: int
    max_context: int
    slots: int
    endings: int
    scoring: bool
    has_tokenizer: bool

    @property
    def longest(self) -> int:
        """Most tokens, prompt and generated, of one request."""
        return min(self.max_context, self.slots)

    def check(self, request: Request) -> None:
        """Raise InvalidRequest, naming the field, if the engine can never serve the request."""
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
        if request.pooling is not None and not self.scoring:
            raise InvalidRequest("pooling", "is not served: the engine was started without prompt scoring")
        if request.sampling.bad_words and not request.sampling.bad_word_tokens:
            raise InvalidRequest("bad_words", "must be token sequences here; parse_request converts words")
        endings = self.endings + len(request.sampling.stop_token_ids)
        if request.sampling.min_tokens and endings > MAX_ENDINGS:
            raise InvalidRequest("min_tokens", f"bars {endings} tokens that end the request; at most {MAX_ENDINGS} fit")
        if request.sampling.stop and not self.has_tokenizer:
            raise InvalidRequest("stop", "needs a tokenizer, and this checkpoint has none; use stop_token_ids")
        grammar = request.sampling.grammar
        if grammar is not None and not self.has_tokenizer:
            raise InvalidRequest(grammar.field, "needs a tokenizer, and this checkpoint has none")


def check_queue(config: EngineConfig, request: Request, *, waiting: int, waiting_tokens: int) -> None:
    """Raise QueueFull if the queue cannot take one more request."""
    if waiting + 1 > config.max_queued_requests:
        raise QueueFull(f"{waiting} requests are waiting, which is the limit (max_queued_requests)")
    if waiting_tokens + len(request.prompt) > config.max_queued_tokens and waiting:
        most, new = config.max_queued_tokens, len(request.prompt)
        raise QueueFull(f"{waiting_tokens} tokens are waiting; {new} more would exceed max_queued_tokens ({most})")
