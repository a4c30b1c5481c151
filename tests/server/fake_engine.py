"""An engine whose answers can be worked out by hand, for tests of everything in front of the engine.

Its answers are those of `tests/server/fake_answers.py`: it says the prompt again and again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxserve.config import EngineConfig
from jaxserve.errors import EngineStopped, InvalidRequest, QueueFull
from jaxserve.iteration import Admission, Chunk, IterationPlan
from jaxserve.request import FinishReason, Request, TokenEvent
from jaxserve.scheduler.buckets import BucketCost
from jaxserve.scheduler.limits import Limits
from jaxserve.scheduler.prefix_changes import PrefixChange, PrefixChanges
from jaxserve.scheduler.slot_pool import SlotPool
from jaxserve.scheduler.state import allocation_of
from jaxserve.startup_report import StartupReport
from jaxserve.stats import IterationRecord, Load
from jaxserve.structured_output.compiler import GrammarCompiler
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.tokenizer import Tokenizer
from tests.server.fake_answers import EOS, VOCAB_SIZE, Running, Sink

WAIT_SECONDS = 120.0  # the bound of every wait in these tests; nothing takes this long, beside whatever else runs
POOL_BLOCKS, BLOCK_SIZE = 64, 4  # of the prefix cache that it keeps for those who follow it
DEVICE_SECONDS = 1e-4  # an iteration's, in which the interpreter is the event loop's, as beside a real engine


def byte_tokenizer(save_to: Path | None = None, chat_template: ChatTemplate | None = None) -> Tokenizer:
    """A tokenizer whose token ids are the bytes of UTF-8; its tokenizer.json is written to `save_to` if given."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    # GPT-2's byte alphabet: bytes without a glyph of their own stand at code points from 256 on.
    vocab = {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
    built = tokenizers.Tokenizer(models.BPE(vocab=vocab | {"<eos>": EOS}, merges=[]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens(["<eos>"])
    if save_to is not None:
        built.save(str(save_to))
    return Tokenizer(built, chat_template)


def made_up_record(
    sequence: int,
    chunks: Sequence[Chunk],
    *,
    waiting: int,
    finished_at: float,
    admissions: tuple[Admission, ...] = (),
    replica: int = 0,
) -> IterationRecord:
    """As if every iteration were of decodes, took 4 ms on the device, and half a millisecond each to schedule and to
    complete."""
    plan = IterationPlan(
        sequence=sequence,
        bucket=16,
        admissions=admissions,
        chunks=tuple(chunks),
        table_changes=(),
        sampler=None,
        scoring=False,
    )
    return IterationRecord(
        replica=replica,
        plan=plan,
        decodes=len(chunks),
        prompt_tokens=0,
        waiting=waiting,
        schedule_s=0.0005,
        pack_s=0.0,
        launch_s=0.0,
        wait_s=0.004,
        complete_s=0.0005,
        finished_at=finished_at,
    )


@dataclass
class FakeEngine:
    """Has the face of `jaxserve.engine.Engine`. While held it runs only the iterations that `step` asks for.

    Attributes:
      poison: a request whose prompt begins with one of these tokens fails in its first iteration.
      owed_elsewhere: tokens that it says to have promised to others, who take all of its rows.
    """

    tokenizer: Tokenizer | None
    config: EngineConfig = field(default_factory=lambda: EngineConfig(max_rows=4))
    max_context: int = 2048
    slots_total: int = 8192
    held: bool = False
    poison: frozenset[int] = frozenset()
    owed_elsewhere: int = 0
    request_defaults: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slots_total = max(self.slots_total, self.max_context)
        self.model_config = SimpleNamespace(vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,), bos_token_id=None)
        # Compiles grammars as an engine does; its answers pay no heed to them.
        self.grammars = None if self.tokenizer is None else GrammarCompiler(self.tokenizer, VOCAB_SIZE, (EOS,))
        self.limits = Limits(
            vocab_size=VOCAB_SIZE,
            max_context=self.max_context,
            slots=self.slots_total,
            endings=1,
            scoring=True,
            has_tokenizer=self.tokenizer is not None,
        )
        self.report = StartupReport(
            tensor=1,
            layers_per_stage=(1,),
            replicas=1,
            device="abacus",
            platform="cpu",
            family="fake",
            parameters=1_500_000,
            padding="",
            weight_bytes=6_000_000,
            pool_bytes=2**20,
            dtype="float32",
            attention="none",
            quantize=None,
            kv_cache_dtype="float32",
            attention_reason="it repeats what it hears",
            buckets_reason="as given",
            slots=self.slots_total,
            block_size=16,
            max_rows=self.config.max_rows,
            max_context=self.max_context,
            buckets=(BucketCost(size=16, compile_seconds=0.5, milliseconds=1e-4),),
            decode_buckets=(16,),
            slot_milliseconds=0.001,
            load_seconds=0.1,
            compile_seconds=0.5,
            measure_seconds=0.1,
            programs=3,
            programs_loaded=2,
        )
        self.iterations = 0
        self.aborted: list[str] = []
        self._changed = threading.Condition()
        self._waiting: deque[Running] = deque()
        self._running: list[Running] = []
        self._aborts: deque[str] = deque()
        self._permits = 0
        self._stopping = self._failed = self._silent = False
        self._told: set[tuple[str, tuple[int, ...]]] = set()
        self._counted = {"prompt": 0, "generated": 0, "cached": 0}
        self._recorders: list[Callable[[IterationRecord], None]] = []
        self._thread: threading.Thread | None = None
        self.pool: SlotPool | None = None  # has the prompts of all requests, once somebody follows it

    # What a test does

    def step(self, iterations: int = 1) -> None:
        """Runs iterations of a held engine and waits until their events are handed over."""
        for _ in range(iterations):
            with self._changed:
                before = self.iterations
                self._permits += 1
                self._changed.notify_all()
                assert self._changed.wait_for(lambda before=before: self.iterations > before, WAIT_SECONDS)

    def release(self) -> None:
        """Lets a held engine run."""
        with self._changed:
            self.held = False
            self._changed.notify_all()

    def fail(self, *, silently: bool = False) -> None:
        """Dies as an engine dies whose loop has raised: every request ends with an error, or nobody hears a thing."""
        with self._changed:
            self._failed, self._silent = True, silently
            self._changed.notify_all()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits until something is so that the engine's thread brings about."""
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_SECONDS)

    # What a server does

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        assert self._thread is not None
        self._thread.join(WAIT_SECONDS)

    def __enter__(self) -> FakeEngine:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def is_healthy(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and not (self._failed or self._stopping)

    @property
    def problem(self) -> str | None:
        return None if self.is_healthy else "the engine has failed"

    @property
    def takes_requests(self) -> bool:
        return self.is_healthy

    def check(self, request: Request) -> None:
        for name, tokens in (
            ("prompt_token_ids", request.prompt),
            ("stop_token_ids", request.sampling.stop_token_ids),
            ("logit_bias", [token for token, _ in request.sampling.logit_bias]),
        ):
            if any(not 0 <= token < VOCAB_SIZE for token in tokens):
                raise InvalidRequest(name, f"has a token id outside the vocabulary of {VOCAB_SIZE}")
        if request.max_length > self.max_context:
            raise InvalidRequest("max_tokens", f"prompt and max_tokens are {request.max_length} tokens together")

    def submit(self, request: Request, sink: Sink) -> None:
        self.check(request)
        self.submit_checked(request, sink)

    def submit_checked(self, request: Request, sink: Sink) -> None:
        with self._changed:
            if self._failed or self._stopping:
                raise EngineStopped("the engine takes no more requests")
            tokens = sum(len(each.request.prompt) for each in self._waiting)
            if len(self._waiting) >= self.config.max_queued_requests:
                raise QueueFull(f"{len(self._waiting)} requests are waiting")
            if self._waiting and tokens + len(request.prompt) > self.config.max_queued_tokens:
                raise QueueFull(f"{tokens} tokens are waiting")
            assert request.request_id not in [each.request.request_id for each in (*self._waiting, *self._running)]
            self._waiting.append(Running(request, sink))
            self._changed.notify_all()
        if self.pool is not None:
            self._cache(request)

    def abort(self, request_id: str) -> None:
        with self._changed:
            self._aborts.append(request_id)
            self._changed.notify_all()

    def load(self) -> Load:
        with self._changed:
            return Load(
                running=len(self._running) if not self.owed_elsewhere else self.config.max_rows,
                waiting=len(self._waiting),
                waiting_tokens=sum(len(each.request.prompt) for each in self._waiting),
                outstanding_tokens=sum(each.request.max_length - each.generated for each in self._all())
                + self.owed_elsewhere,
                slots_used=sum(len(each.request.prompt) + each.generated for each in self._running),
                slots_cached=0,
                slots_total=self.slots_total,
                iterations=self.iterations,
                prompt_tokens=self._counted["prompt"],
                generated_tokens=self._counted["generated"],
                cached_tokens=self._counted["cached"],
                preemptions=0,
                drafted_tokens=0,
                accepted_tokens=0,
                host_seconds=0.0,
                bucket_seconds=0.0,
                padding_seconds=0.0,
                compiled_after_ready=0,
            )

    def record(self, recorder: Callable[[IterationRecord], None]) -> None:
        self._recorders.append(recorder)

    def loads(self) -> list[Load]:
        return [self.load()]

    def follow_prefixes(self, wake: Callable[[], None]) -> Callable[[], list[PrefixChange]]:
        self.pool = SlotPool(POOL_BLOCKS, BLOCK_SIZE, policy="grow", prefix_cache=True)
        return PrefixChanges([self.pool], wake).take

    def tell_profile(self, running: bool) -> None:
        """There are no other hosts."""

    def _cache(self, request: Request) -> None:
        """Keeps the prompt in a prefix cache of its own, as an engine does that is done with it."""
        assert self.pool is not None
        allocation = allocation_of(request)
        self.pool.admit(allocation)
        self.pool.extend(allocation, len(request.prompt))
        self.pool.publish(allocation, len(request.prompt))
        self.pool.release(allocation)

    # The loop

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_turn)
                if self._stopping or self._failed:
                    reason = FinishReason.ABORTED if self._stopping else FinishReason.ERROR
                    if not self._silent:
                        self._hand_over([(each, each.ending(reason, "died")) for each in self._all()])
                    self._waiting.clear()
                    self._running.clear()
                    self._changed.notify_all()
                    return
                self._take_aborts()
                if self.held and not self._permits:
                    continue
                self._permits = max(0, self._permits - 1)
                while self._waiting and len(self._running) < self.config.max_rows:
                    self._admit(self._waiting.popleft())
                events = [(each, self._advance(each)) for each in self._running]
                self._running = [each for each, event in events if event.finish_reason is None]
            time.sleep(DEVICE_SECONDS)
            self._hand_over(events)
            for recorder in self._recorders:
                recorder(self._record(len(events)))
            with self._changed:
                self.iterations += 1
                self._changed.notify_all()

    def _record(self, tokens: int) -> IterationRecord:
        chunks = [Chunk(row, 1, 1, True) for row in range(tokens)]
        return made_up_record(self.iterations, chunks, waiting=len(self._waiting), finished_at=time.monotonic())

    def _has_turn(self) -> bool:
        may = not self.held or self._permits > 0
        return bool(self._stopping or self._failed or self._aborts or (may and (self._all() or self._permits)))

    def _all(self) -> list[Running]:
        return [*self._running, *self._waiting]

    def _take_aborts(self) -> None:
        while self._aborts:
            request_id = self._aborts.popleft()
            for each in self._all():
                if each.request.request_id == request_id:
                    (self._running if each in self._running else self._waiting).remove(each)
                    self.aborted.append(request_id)
                    self._hand_over([(each, each.ending(FinishReason.ABORTED, None))])
        self._changed.notify_all()

    def _admit(self, each: Running) -> None:
        request = each.request
        each.cached = len(request.prompt) - 1 if (request.cache_salt, request.prompt) in self._told else 0
        self._told.add((request.cache_salt, request.prompt))
        self._counted["prompt"] += len(request.prompt) - each.cached
        self._counted["cached"] += each.cached
        self._running.append(each)

    def _advance(self, each: Running) -> TokenEvent:
        if each.request.prompt[0] in self.poison:
            return each.ending(FinishReason.ERROR, "this prompt is poison")
        self._counted["generated"] += 1
        return each.advance()

    @staticmethod
    def _hand_over(events: list[tuple[Running, TokenEvent]]) -> None:
        by_sink: dict[Sink, list[TokenEvent]] = {}
        for each, event in events:
            by_sink.setdefault(each.sink, []).append(event)
        for sink, theirs in by_sink.items():
            sink(theirs)
