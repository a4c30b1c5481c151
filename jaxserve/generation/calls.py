"""The calls of `Engine` that generate: they wait for what requests produce, or yield it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxserve.generation import embedding, streaming
from jaxserve.generation.beam_search import BeamParams
from jaxserve.generation.completion import Completion, Delta
from jaxserve.generation.parsing import PROMPT_FIELDS
from jaxserve.generation.streaming import CallOptions, EngineProtocol, Prompt
from jaxserve.request import Pooling


class GenerationCalls(EngineProtocol):
    """The calls that an engine has on top of `submit`."""

    def generate(
        self,
        prompts: Mapping[str, Any] | Sequence[Prompt],
        *,
        n: int = 1,
        best_of: int | None = None,
        priority: int = 0,
        cache_salt: str = "",
        timeout: float | None = None,
        **sampling: Any,
    ) -> list[Completion]:
        """Generate for every prompt and wait for all of them.

        Args:
          prompts: each a text, token ids, or fields as in an input line of `jaxserve generate`, such as
            `{"messages": [{"role": "user", "content": "Hi"}]}` for a chat. These fields override the arguments.
          n: samples of each prompt. The prompt is computed once; its samples are adjacent in the list.
          best_of: number of samples to draw; the n with the highest mean token logprob are returned.
          priority / cache_salt: see `Request`.
          timeout: most seconds to wait.
          sampling: fields of SamplingParams, for every prompt; without a seed, one is drawn for each. A prompt for
            which no field is given has the checkpoint's defaults (`request_defaults`).

        Raises:
          InvalidRequest: a request is invalid; the message names the field, and nothing was generated.
          QueueFull: the queue is full of other requests.
          TimeoutError: it took too long; every request was ended.
        """
        options = CallOptions(n=n, best_of=best_of, priority=priority, cache_salt=cache_salt, timeout=timeout)
        return streaming.generate(self, prompts, sampling, options)

    def chat(self, messages: str | Sequence[Mapping[str, Any]], **fields: Any) -> Completion:
        """Answer a chat; a text is one message of the user.

        Args:
          messages: each with role and content.
          fields: as of `generate`, and add_generation_prompt, chat_template_kwargs, reasoning_effort and tools.

        Raises: as `generate`, and InvalidRequest if the checkpoint has no chat template.
        """
        prompt = {"messages": [{"role": "user", "content": messages}] if isinstance(messages, str) else messages}
        prompt |= {name: fields.pop(name) for name in PROMPT_FIELDS if name in fields}
        return self.generate(prompt, **fields)[0]

    def embed(
        self,
        prompts: Sequence[Prompt],
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        cache_salt: str = "",
        timeout: float | None = None,
    ) -> np.ndarray:  # float32[prompts, hidden_size]
        """Embed prompts by the hidden states after the model's last norm.

        Args:
          prompts: as in `generate`.
          pooling: "last" takes the state of a prompt's last token, "mean" the mean over its tokens.
          normalize: whether to divide each embedding by its Euclidean norm.

        Raises: as `generate`.
        """
        pooling = embedding.parse_pooling(pooling)
        options = CallOptions(cache_salt=cache_salt, timeout=timeout, pooling=pooling)
        completions = streaming.generate(self, prompts, embedding.SAMPLING, options)
        found = [embedding.of(completion) for completion in completions]
        return np.array([embedding.normalized(each) for each in found] if normalize else found, np.float32)

    def beam_search(
        self,
        prompt: Prompt,
        *,
        n: int = 1,
        best_of: int | None = None,
        length_penalty: float = 1.0,
        early_stopping: bool = False,
        priority: int = 0,
        cache_salt: str = "",
        timeout: float | None = None,
        **sampling: Any,
    ) -> list[Completion]:
        """The n most likely answers that a beam search finds, best first, each with its score.

        Args:
          prompt: as in `generate`.
          best_of: number of beams; the default is n (see `BeamParams`, also for length_penalty, early_stopping).
          sampling: max_tokens, stop_token_ids, ignore_eos and logprobs of SamplingParams.

        Raises:
          InvalidRequest: the request is invalid; the message names the field, and nothing was generated.
          TimeoutError: it took too long; every request was ended.
        """
        width = n if best_of is None else best_of
        params = BeamParams(width=width, n=n, length_penalty=length_penalty, early_stopping=early_stopping)
        options = CallOptions(priority=priority, cache_salt=cache_salt, timeout=timeout)
        return streaming.search(self, prompt, params, sampling, options)

    def stream(
        self,
        prompt: Prompt,
        *,
        priority: int = 0,
        cache_salt: str = "",
        timeout: float | None = None,
        **sampling: Any,
    ) -> AsyncIterator[Delta]:
        """Generate for one prompt, as in `generate`, and yield one item per iteration.

        Leaving the loop early ends the request.

        Raises:
          TimeoutError: it took longer than `timeout` seconds.
        """
        options = CallOptions(priority=priority, cache_salt=cache_salt, timeout=timeout)
        return streaming.stream(self, prompt, sampling, options)
