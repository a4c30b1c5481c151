"""The engine: one or several replicas of a model behind one API.

The replica that takes a request plans, launches and completes one iteration after another, and emits its events.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from jaxserve import startup
from jaxserve.config import EngineConfig
from jaxserve.demo import DEMO_MODEL
from jaxserve.errors import InvalidRequest, QueueFull
from jaxserve.generation import defaults
from jaxserve.generation.calls import GenerationCalls
from jaxserve.loop import EngineLoop
from jaxserve.models.schema import ModelConfig
from jaxserve.progress_bars import progress_bars
from jaxserve.request import Request, Sink
from jaxserve.runner.stage import Progress
from jaxserve.scheduler import routing
from jaxserve.scheduler.block_allocation import BlockAllocation
from jaxserve.scheduler.limits import Limits, check_queue
from jaxserve.scheduler.prefix_changes import PrefixChange, PrefixChanges
from jaxserve.scheduler.prefix_index import PrefixIndex
from jaxserve.scheduler.state import allocation_of
from jaxserve.stats import IterationRecord, Load, total
from jaxserve.structured_output.compiler import GrammarCompiler
from jaxserve.structured_output.matcher import CompiledGrammar
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.timeline import Timeline


class Engine(GenerationCalls):
    """A compiled model that is ready to serve requests.

    Make one with `from_checkpoint` or `from_params`. `start` it (or use it in a `with` block) to run the loops in
    threads, or call `step` yourself.
    """

    def __init__(
        self,
        config: EngineConfig,
        started: startup.EngineParts,
        tokenizer: Tokenizer | None,
        request_defaults: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.config = config
        self.request_defaults = request_defaults  # sampling parameters, of the checkpoint's generation_config.json
        self.report = started.report
        self.tokenizer = tokenizer
        self.model_config: ModelConfig = started.loops[0].pipeline.model.config
        self.max_context = started.report.max_context
        self.grammars: GrammarCompiler | None = None  # None without a tokenizer
        if tokenizer is not None:
            model, prepare = self.model_config, started.loops[0].pipeline.prepare
            self.grammars = GrammarCompiler(
                tokenizer, model.vocab_size, model.eos_token_ids, compile_on_workers=prepare
            )
        self.limits = Limits(
            vocab_size=self.model_config.vocab_size,
            max_context=self.max_context,
            slots=self.report.request_slots,
            endings=len(self.model_config.eos_token_ids),
            scoring=config.scoring,
            has_tokenizer=tokenizer is not None,
        )
        self._loops = started.loops
        self._prefixes: PrefixIndex | None = None  # of several replicas
        if len(self._loops) > 1:
            self._prefixes = PrefixIndex([replica.scheduler.pool for replica in self._loops])
        self._lock = threading.Lock()
        self._changing_weights = False
        # An engine that is garbage-collected, as when a notebook cell runs again, must free its threads and memory.
        weakref.finalize(self, _end, self._loops).atexit = False

    @classmethod
    def from_checkpoint(
        cls, path: str | Path = DEMO_MODEL, config: EngineConfig | None = None, *, progress: Progress | None = None
    ) -> Self:
        """Load a checkpoint directory and compile everything.

        The directory is a Hugging Face one, or one that `jaxserve convert` has written; by default the demo model's.
        Progress is shown in a terminal or a notebook, unless `progress` takes it (`startup.silent` shows nothing).

        Raises:
          CheckpointError: the checkpoint cannot be served; the message names the file and the tensor.
          ValueError: a setting does not fit the model or the device.
        """
        config = config or EngineConfig()
        recommended = defaults.read(path, config)
        with progress_bars() if progress is None else contextlib.nullcontext(progress) as show:
            started, tokenizer = startup.from_checkpoint(path, config, show)
        return cls(config, started, tokenizer, recommended)

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
        """Make an engine from weights in memory.

        The weights are a tree as `models.build(model_config).init` returns it.

        Raises:
          ValueError: a setting does not fit the model or the device, or the tree is not the model's.
        """
        config = config or EngineConfig()
        return cls(config, startup.from_params(model_config, params, config, progress), tokenizer)

    def __repr__(self) -> str:
        it = self.report
        return f"Engine({it.family}, {it.parameters:,} parameters, {it.dtype}, {it.device}, {it.slots:,} slots)"

    def step(self) -> bool:
        """Run one step of every replica's loop (see `EngineLoop.step`), if no threads run.

        Returns:
          Whether there was anything to do.
        """
        busy = [replica.step() for replica in self._loops]
        return any(busy)

    def start(self) -> None:
        """Start the threads of the replicas, unless they are running."""
        for replica in self._loops:
            replica.start()

    def stop(self) -> None:
        """End every request (FinishReason.ABORTED) and stop the threads.

        The engine cannot be started again.
        """
        for replica in self._loops:
            replica.ask_to_stop()
        for replica in self._loops:
            replica.join()
        for replica in self._loops:  # with several hosts, the first ends the workers of all
            replica.pipeline.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def is_healthy(self) -> bool:
        """Whether every replica serves requests: its thread runs and has not failed."""
        return all(replica.is_healthy for replica in self._loops)

    @property
    def problem(self) -> str | None:
        """Why no request is served, as text for callers; None if requests are served."""
        if self.is_healthy:
            return None
        why = next((text for replica in self._loops if (text := replica.pipeline.problem)), None)
        return "the engine has failed" + (f": {why}" if why else "")

    @property
    def takes_requests(self) -> bool:
        """Whether a request submitted now will be served."""
        return self.is_healthy

    def submit(self, request: Request, sink: Sink) -> None:
        """Submit a request.

        The replica's thread calls `sink` once per iteration, with the events of all requests that share the sink. The
        last event of a request has a finish_reason.

        Raises:
          InvalidRequest: the request can never be served; the message names the field.
          QueueFull: too many requests, tokens or grammars are waiting.
          EngineStopped: the engine was stopped or has failed.
        """
        self.limits.check(request)
        self.submit_checked(request, sink)

    def submit_checked(self, request: Request, sink: Sink) -> None:
        """Submit a request that `limits` has checked already, as an engine process does."""
        grammar = self._compiled(request)
        with self._lock:
            if any(replica.holds(request.request_id) for replica in self._loops):
                raise InvalidRequest("request_id", f"is {request.request_id!r}, which names a request that is alive")
            if self._changing_weights:
                raise QueueFull("the weights are being replaced; no requests are taken until that is done")
            check_queue(
                self.config,
                request,
                waiting=sum(replica.num_waiting for replica in self._loops),
                waiting_tokens=sum(replica.waiting_tokens for replica in self._loops),
            )
            replica, cached, allocation = self._choose(request)
            replica.submit(request, sink, cached=cached, allocation=allocation, grammar=grammar)

    def _choose(self, request: Request) -> tuple[EngineLoop, int, BlockAllocation | None]:
        """The chosen replica, its cached tokens of the prompt, and the request's allocation there.

        The replica is the one with the fewest outstanding tokens once it has the request. The tokens come from its
        prefix cache or from another request. The allocation has the digests that were computed for the look-up.
        """
        for replica in self._loops:
            if request.fork_of is not None and replica.holds(request.fork_of):
                return replica, len(request.prompt) - 1, None  # this replica computes the prompt anyway
        allocation = allocation_of(request)
        if self._prefixes is None:
            return self._loops[0], self._loops[0].scheduler.pool.cached_tokens(allocation), allocation
        serving = [replica for replica in self._loops if replica.takes_requests] or self._loops[:1]
        found = self._prefixes.cached_tokens(allocation)
        cached = [found[replica.index] for replica in serving]
        chosen = routing.choose([replica.outstanding_tokens for replica in serving], cached)
        return serving[chosen], cached[chosen], allocation

    def check(self, request: Request) -> None:
        """Raise InvalidRequest, naming the field, if this engine can never serve the request.

        Compiles the request's grammar, unless `grammars` has it already (event loops call `grammars.compile_async`).
        """
        self.limits.check(request)
        self._compiled(request)

    def _compiled(self, request: Request) -> CompiledGrammar | None:
        grammar = request.sampling.grammar
        if grammar is None:
            return None
        assert self.grammars is not None  # there is a tokenizer; otherwise the request was refused
        return self.grammars.compile(grammar)

    def abort(self, request_id: str) -> None:
        """End a request within one iteration and release its slots.

        Its last event has the reason ABORTED. Does nothing if the request is not live.
        """
        for replica in self._loops:
            replica.abort(request_id)

    def update_params(self, params: Any) -> None:
        """Replace the weights by others of the same shapes and forget cached prefixes.

        Blocks until it is done. Requests that come in the meantime are refused (QueueFull).

        Raises:
          ValueError: the tree or a shape differs, or several hosts share the model.
          RuntimeError: requests are live; their answers would mix both sets of weights.
        """
        pipeline = self._loops[0].pipeline
        if pipeline.spans_hosts:
            raise ValueError("several hosts share the model, so its weights cannot be replaced; restart with new ones")
        expected = pipeline.model.unpadded.shapes(pipeline.shape.attention.dtype)
        startup.check_tree(expected, params, quantized=self.config.quantize is not None)
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
        """The load of all replicas together. Cheap."""
        return total(self.loads())

    def loads(self) -> list[Load]:
        """The load of each replica."""
        return [replica.load() for replica in self._loops]

    def record(self, recorder: Callable[[IterationRecord], None]) -> None:
        """Call `recorder` after every iteration, on the thread of the replica that ran it."""
        for replica in self._loops:
            replica.stats.recorders.append(recorder)

    def follow_prefixes(self, wake: Callable[[], None]) -> Callable[[], list[PrefixChange]]:
        """Collect what changes in the prefix caches from now on; call it before the first request.

        Args:
          wake: called on an engine's thread after a change.

        Returns:
          A function that returns all changes since it was called last, in order. Any thread may call it.
        """
        return PrefixChanges([replica.scheduler.pool for replica in self._loops], wake).take

    def tell_profile(self, running: bool) -> None:
        """Start or stop a profile (`profiler.Profiler`) on the other hosts, if there are any."""
        self._loops[0].pipeline.tell_profile(running)

    def timeline(self) -> Timeline:
        """A recorder of what each stage does within a `with` block; it writes a trace.

        Raises:
          ValueError: several hosts share the model.
        """
        if self._loops[0].pipeline.spans_hosts:
            raise ValueError("a timeline shows the stages of one host; here several hosts share the model")
        return Timeline([replica.pipeline for replica in self._loops])


def _end(replicas: Sequence[EngineLoop]) -> None:
    for replica in replicas:
        replica.ask_to_stop()
