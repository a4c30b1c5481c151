"""The engine: one or several replicas of a model behind one API.

Requests go in, an iteration at a time is planned, launched and completed by the replica that took them, events come
out.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from jaxserve import startup
from jaxserve.config import EngineConfig
from jaxserve.errors import InvalidRequest, QueueFull
from jaxserve.generation import streaming
from jaxserve.generation.beam_search import BeamParams
from jaxserve.generation.completion import Completion, Delta
from jaxserve.generation.streaming import Prompt, Sink, Terms
from jaxserve.loop import EngineLoop
from jaxserve.models.schema import ModelConfig
from jaxserve.request import Request
from jaxserve.runner.stage import Progress
from jaxserve.scheduler import routing
from jaxserve.scheduler.limits import Limits, check_queue
from jaxserve.scheduler.state import allocation_of
from jaxserve.stats import IterationRecord, Load, total
from jaxserve.structured_output.matcher import Compiled, Grammars
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.timeline import Timeline


class Engine:
    """A model, compiled and ready to serve requests.

    Make one with `from_checkpoint` or `from_params`; `start` it (or use it in a `with` block) to have threads run the
    loops, or call `step` yourself.
    """

    def __init__(self, config: EngineConfig, started: startup.Started, tokenizer: Tokenizer | None) -> None:
        self.config = config
        self.report = started.report
        self.tokenizer = tokenizer
        self.model_config: ModelConfig = started.loops[0].pipeline.model.config
        self.max_context = started.report.max_context
        self.grammars: Grammars | None = None  # without a tokenizer there are none
        if tokenizer is not None:
            model, prepare = self.model_config, started.loops[0].pipeline.prepare
            self.grammars = Grammars(tokenizer, model.vocab_size, model.eos_token_ids, elsewhere=prepare)
        self.limits = Limits(
            vocab_size=self.model_config.vocab_size,
            max_context=self.max_context,
            slots=self.report.slots,
            endings=len(self.model_config.eos_token_ids),
            scoring=config.scoring,
            has_tokenizer=tokenizer is not None,
        )
        self._loops = started.loops
        self._lock = threading.Lock()
        self._changing_weights = False
        # An engine that is dropped, as by a notebook's cell that is run again, takes its threads and memory with it.
        weakref.finalize(self, _end, self._loops).atexit = False

    @classmethod
    def from_checkpoint(
        cls, path: str | Path, config: EngineConfig | None = None, *, progress: Progress = startup.silent
    ) -> Self:
        """Loads a checkpoint directory (Hugging Face, or written by `jaxserve convert`) and compiles everything.

        Raises:
          CheckpointError: the checkpoint cannot be served; the message names file and tensor.
          ValueError: a setting does not fit the model or the device.
        """
        config = config or EngineConfig()
        started, tokenizer = startup.from_checkpoint(path, config, progress)
        return cls(config, started, tokenizer)

    @classmethod
    def from_params(
        cls,
        model_config: ModelConfig,
        params: Any,
        config: EngineConfig | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        progress: Progress = startup.silent,
    ) -> Self:
        """An engine on weights that are already in memory (the tree that `models.build(model_config).init` returns).

        Raises:
          ValueError: a setting does not fit the model or the device, or the tree is not the model's.
        """
        config = config or EngineConfig()
        return cls(config, startup.from_params(model_config, params, config, progress), tokenizer)

    def step(self) -> bool:
        """One turn of every replica's loop (see `EngineLoop.step`), for who does without its thread.

        Returns:
          Whether there was anything to do.
        """
        busy = [replica.step() for replica in self._loops]
        return any(busy)

    def start(self) -> None:
        """Starts the threads of the replicas, unless they run already."""
        for replica in self._loops:
            replica.start()

    def stop(self) -> None:
        """Ends every request (FinishReason.ABORTED) and the threads.

        The engine cannot be started again.
        """
        for replica in self._loops:
            replica.ask_to_stop()
        for replica in self._loops:
            replica.join()
            replica.pipeline.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def is_healthy(self) -> bool:
        """Whether requests are being served, by every replica: threads run and none has failed."""
        return all(replica.is_healthy for replica in self._loops)

    @property
    def problem(self) -> str | None:
        """Why no request is being served, in words for callers: a host that failed, of several; None while they are."""
        if self.is_healthy:
            return None
        why = next((text for replica in self._loops if (text := replica.pipeline.problem)), None)
        return "the engine has failed" + (f": {why}" if why else "")

    @property
    def takes_requests(self) -> bool:
        """Whether a request that is handed in now will be served."""
        return self.is_healthy

    def submit(self, request: Request, sink: Sink) -> None:
        """Hands a request in.

        Its events come to `sink`, called on the replica's thread once an iteration with all of the events for requests
        that share the sink; the last event of a request has a finish_reason.

        Raises:
          InvalidRequest: it can never be served; the message names the field.
          QueueFull: too many requests, tokens or grammars wait already.
          EngineStopped: the engine was stopped or has failed.
        """
        self.limits.check(request)
        self.submit_checked(request, sink)

    def submit_checked(self, request: Request, sink: Sink) -> None:
        """As `submit`, for a request that `limits` has passed already, as the front of an engine process does."""
        grammar = self._compiled(request)
        with self._lock:
            if any(replica.holds(request.request_id) for replica in self._loops):
                raise InvalidRequest("request_id", f"is {request.request_id!r}, which names a request that is alive")
            if self._changing_weights:
                raise QueueFull("the weights are being replaced; no request is taken until they are")
            check_queue(
                self.config,
                request,
                waiting=sum(replica.num_waiting for replica in self._loops),
                waiting_tokens=sum(replica.waiting_tokens for replica in self._loops),
            )
            replica, cached = self._choose(request)
            replica.submit(request, sink, cached=cached, grammar=grammar)

    def _choose(self, request: Request) -> tuple[EngineLoop, int]:
        """The replica with the least left to compute once it has the request, and the tokens of its prompt that are
        found in that one's prefix cache, or will be taken over from another request."""
        for replica in self._loops:
            if request.fork_of is not None and replica.holds(request.fork_of):
                return replica, len(request.prompt) - 1  # where the prompt is computed anyway
        if len(self._loops) == 1:
            return self._loops[0], 0
        serving = [replica for replica in self._loops if replica.takes_requests] or self._loops[:1]
        allocation = allocation_of(request)
        cached = [replica.scheduler.pool.cached_tokens(allocation) for replica in serving]
        chosen = routing.choose([replica.outstanding_tokens for replica in serving], cached)
        return serving[chosen], cached[chosen]

    def check(self, request: Request) -> None:
        """Raises InvalidRequest, naming the field, for a request that this engine can never serve.

        Its grammar is compiled here, if `grammars` has not done so (see `Grammars.prepare` for event loops).
        """
        self.limits.check(request)
        self._compiled(request)

    def _compiled(self, request: Request) -> Compiled | None:
        grammar = request.sampling.grammar
        if grammar is None:
            return None
        assert self.grammars is not None  # there is a tokenizer, or it has been refused
        return self.grammars.compiled(grammar)

    def abort(self, request_id: str) -> None:
        """Ends a request within one iteration and gives its slots back; its last event says ABORTED. A request that
        is not alive is left alone."""
        for replica in self._loops:
            replica.abort(request_id)

    def update_params(self, params: Any) -> None:
        """Replaces the weights by others of the same shapes and forgets cached prefixes.

        Blocks until it is done; requests that come meanwhile are refused (QueueFull).

        Raises:
          ValueError: the tree or a shape differs, or several hosts share the model.
          RuntimeError: requests are alive; their answers would belong to neither set of weights.
        """
        pipeline = self._loops[0].pipeline
        if pipeline.spans_hosts:
            raise ValueError("weights are not replaced where several hosts share a model; start the hosts with others")
        expected = pipeline.model.unpadded.shapes(pipeline.shape.attention.dtype)
        startup.check_tree(expected, params, int8=self.config.quantize == "int8")
        with self._lock:
            if self._changing_weights:
                raise RuntimeError("the weights are being replaced by another call")
            if alive := sum(replica.num_live for replica in self._loops):
                raise RuntimeError(f"{alive} requests are alive; wait for them or abort them first")
            self._changing_weights = True
        try:
            for replica in self._loops:
                replica.replace_params(params)
        finally:
            with self._lock:
                self._changing_weights = False

    def load(self) -> Load:
        """How busy the engine is, all replicas together. Cheap."""
        return total(self.loads())

    def loads(self) -> list[Load]:
        """How busy each replica is."""
        return [replica.load() for replica in self._loops]

    def record(self, recorder: Callable[[IterationRecord], None]) -> None:
        """Has `recorder` called after every iteration, on the thread of the replica that ran it."""
        for replica in self._loops:
            replica.stats.recorders.append(recorder)

    def timeline(self) -> Timeline:
        """What each stage does, watched in a `with` block, and a trace of it afterwards.

        Raises:
          ValueError: several hosts share the model.
        """
        if self._loops[0].pipeline.spans_hosts:
            raise ValueError("a timeline is of the stages of one host; here several share a model")
        return Timeline([replica.pipeline for replica in self._loops])

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
        """Generates for every prompt and waits for all of them.

        Args:
          prompts: each a text, token ids, or fields as an input line of `jaxserve generate` has them, such as
            `{"messages": [{"role": "user", "content": "Hi"}]}` for a chat; these go before what the call says.
          n: samples of each prompt, which is computed once for all of them; they are next to each other in the list.
          best_of: so many are drawn, and the n of them returned whose tokens are the likeliest on average.
          priority / cache_salt: see `Request`.
          timeout: seconds to wait at most.
          sampling: fields of SamplingParams, the same for every prompt; a seed is drawn for each where none is given.

        Raises:
          InvalidRequest: before anything is generated, naming the field.
          QueueFull: as much as may waits already, of others.
          TimeoutError: it took too long; every request is ended.
        """
        terms = Terms(n=n, best_of=best_of, priority=priority, cache_salt=cache_salt, timeout=timeout)
        return streaming.generate(self, prompts, sampling, terms)

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
        """The n likeliest answers to a prompt that a beam search finds, best first, each with its score.

        Args:
          prompt: as one of `generate`.
          best_of: beams, n unless given (see `beams.BeamParams`, also for length_penalty and early_stopping).
          sampling: max_tokens, stop_token_ids, ignore_eos and logprobs of SamplingParams.

        Raises:
          InvalidRequest: before anything is generated, naming the field.
          TimeoutError: it took too long; every request is ended.
        """
        width = n if best_of is None else best_of
        params = BeamParams(width=width, n=n, length_penalty=length_penalty, early_stopping=early_stopping)
        terms = Terms(priority=priority, cache_salt=cache_salt, timeout=timeout)
        return streaming.search(self, prompt, params, sampling, terms)

    def stream(
        self,
        prompt: Prompt,
        *,
        priority: int = 0,
        cache_salt: str = "",
        timeout: float | None = None,
        **sampling: Any,
    ) -> AsyncIterator[Delta]:
        """Generates for one prompt, as `generate` takes it, an item an iteration.

        Leaving the loop early ends the request.

        Raises:
          TimeoutError: it took longer than so many seconds.
        """
        terms = Terms(priority=priority, cache_salt=cache_salt, timeout=timeout)
        return streaming.stream(self, prompt, sampling, terms)


def _end(replicas: Sequence[EngineLoop]) -> None:
    for replica in replicas:
        replica.ask_to_stop()
