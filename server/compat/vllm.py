"""`vllm.grpc.engine.VllmEngine`, the protocol of routers for vLLM workers."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from typing import Any

import grpc

from jaxserve.errors import InvalidRequest
from jaxserve.text.tokenizer_archive import tokenizer_archive
from server import auth, errors
from server.call import Call, Generation, new_id
from server.compat.vllm_kv_events import kv_event_batch
from server.compat.vllm_messages import VllmSample, adjusted, fields_of, samples_of
from server.grpc import calls
from server.handler import RequestHandler
from server.kv_events import Missed
from server.proto.vllm.grpc.engine import vllm_engine_pb2 as pb
from server.proto.vllm.grpc.engine import vllm_engine_pb2_grpc

MAX_ABORTS = 4096  # request ids of one Abort
_ARCHIVE_PART = 64 << 10  # bytes of a message of GetTokenizer


class VllmEngineService(vllm_engine_pb2_grpc.VllmEngineServicer):
    """The calls of `vllm.grpc.engine.VllmEngine` that routers need."""

    def __init__(self, handler: RequestHandler) -> None:
        self._handler, self._engine = handler, handler.engine
        self._started = time.monotonic()
        self._latest = 0.0  # Unix time of the last Generate
        self._archive: bytes | None = None  # the tokenizer's files, once somebody has asked
        self._archiving = asyncio.Lock()
        self._calls: dict[tuple[str, str], set[_Abortable]] = {}  # by tenant and request id

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        self._latest = time.time()
        call = Call(
            id=request.request_id or new_id(),
            protocol="vllm",
            deadline=calls.deadline(context),
            has_defaults=False,  # the router has set its own
        )
        params = request.sampling_params
        async with calls.answering(self._handler, context, call.id):
            fields, samples = fields_of(request), samples_of(params)
            with self._abortable(call) as abortable:
                async with self._handler.generate(
                    [fields],
                    call,
                    samples=samples,
                    adjust=lambda parsed: adjusted(self._handler, params, parsed),
                    is_cut=params.HasField("truncate_prompt_tokens"),
                ) as generation:
                    abortable.started(generation)
                    async for response in _responses(generation, stream=request.stream):
                        await context.write(response)

    @contextlib.contextmanager
    def _abortable(self, call: Call) -> Iterator[_Abortable]:
        key, abortable = (call.tenant.name, call.id), _Abortable()
        self._calls.setdefault(key, set()).add(abortable)
        try:
            yield abortable
        finally:
            self._calls[key].remove(abortable)
            if not self._calls[key]:
                del self._calls[key]

    @calls.answered
    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        if len(request.request_ids) > MAX_ABORTS:
            raise InvalidRequest("request_ids", f"has {len(request.request_ids)} ids; it may have {MAX_ABORTS}")
        for request_id in request.request_ids:
            for abortable in self._calls.get((auth.current.get().name, request_id), ()):
                abortable.abort()
        return pb.AbortResponse()

    @calls.answered
    async def HealthCheck(self, request: pb.HealthCheckRequest, context: Any) -> pb.HealthCheckResponse:
        # vLLM opens its port once it is ready. A router that is answered before asks for the model at once, and not
        # again: UNAVAILABLE makes it wait.
        _ = self._engine.report
        problem = self._handler.unhealthy_reason
        return pb.HealthCheckResponse(healthy=problem is None, message=problem or "serving")

    @calls.answered
    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        engine, config = self._engine, self._engine.model_config
        return pb.GetModelInfoResponse(
            model_path=self._handler.model_name,
            is_generation=True,
            max_context_length=engine.max_context,
            vocab_size=config.vocab_size,
            served_model_name=self._handler.model_name,
            model_type=engine.report.family,
            eos_token_ids=config.eos_token_ids,
            bos_token_id=config.bos_token_id or 0,
            max_req_input_len=engine.max_context - 1,
        )

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(
            active_requests=self._handler.calls.num_requests,
            is_paused=self._handler.unhealthy_reason is not None,
            last_receive_timestamp=self._latest,
            uptime_seconds=time.monotonic() - self._started,
            server_type="jaxserve",
            data_parallel_size=1,
        )

    @calls.answered
    async def GetLoads(self, request: pb.GetLoadsRequest, context: Any) -> pb.GetLoadsResponse:
        if request.dp_rank:
            raise InvalidRequest("dp_rank", f"is {request.dp_rank}; there is one rank, 0")
        load, config = self._engine.load(), self._engine.config
        rows = config.max_rows * config.replicas
        load_message = pb.SchedulerLoad(
            num_running_reqs=load.running,
            num_waiting_reqs=load.waiting,
            num_total_reqs=load.running + load.waiting,
            num_used_tokens=load.slots_used,
            max_total_num_tokens=load.slots_total,
            token_usage=load.slots_used / max(1, load.slots_total),
            cache_hit_rate=load.cached_tokens / max(1, load.cached_tokens + load.prompt_tokens),
            utilization=min(1.0, load.running / rows),
            max_running_requests=rows,
            num_waiting_uncached_tokens=load.waiting_tokens,
            outstanding_tokens=load.outstanding_tokens,
            prefill_tokens=load.prefill_tokens,
        )
        now, version = datetime.now(UTC).isoformat(), self._handler.version
        return pb.GetLoadsResponse(timestamp=now, version=version, dp_rank_count=1, loads=[load_message])

    async def GetTokenizer(self, request: pb.GetTokenizerRequest, context: Any) -> None:
        async with calls.answering(self._handler, context, new_id()):
            tokenizer = self._engine.tokenizer
            if tokenizer is None or tokenizer.directory is None:
                raise errors.ApiError(
                    errors.ErrorKind.UNSUPPORTED, "this checkpoint has no tokenizer files; send token ids"
                )
            async with self._archiving:  # compressing takes a second, and many routers may ask
                if self._archive is None:
                    self._archive = await asyncio.to_thread(tokenizer_archive, tokenizer.directory)
            archive, sha256 = self._archive, hashlib.sha256(self._archive).hexdigest()
            for start in range(0, len(archive), _ARCHIVE_PART):
                digest = sha256 if start + _ARCHIVE_PART >= len(archive) else ""
                await context.write(pb.GetTokenizerChunk(data=archive[start : start + _ARCHIVE_PART], sha256=digest))

    async def SubscribeKvEvents(self, request: pb.SubscribeKvEventsRequest, context: Any) -> None:
        tenant, log = auth.current.get(), self._handler.kv_events
        if tenant.name and not tenant.operator:  # events tell of other tenants' prompts
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "KV events are for operators")
        if log is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "start the server with --kv-events grpc")
            return
        await context.send_initial_metadata(())  # the subscriber need not wait for the first event
        try:
            async for batch in log.follow(request.start_sequence_number):
                await context.write(kv_event_batch(batch))
        except Missed as problem:
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, str(problem))
        except grpc.aio.InternalError:  # a write that was blocked when the subscriber left
            raise asyncio.CancelledError from None


class _Aborted(errors.ApiError):
    """The caller aborted its own call; never sent as an error."""

    def __init__(self) -> None:
        super().__init__(errors.ErrorKind.UNAVAILABLE, "the caller has aborted the call")


class _Abortable:
    """A call that Abort can end, even before its prompt is tokenized."""

    def __init__(self) -> None:
        self._generation: Generation | None = None
        self._is_aborted = False

    def started(self, generation: Generation) -> None:
        self._generation = generation
        if self._is_aborted:
            self.abort()

    def abort(self) -> None:
        """Aborts the requests in the engine now, and ends the call."""
        self._is_aborted = True
        if self._generation is not None:
            self._generation.fail(_Aborted())
            self._generation.abort_all()


async def _responses(generation: Generation, *, stream: bool) -> AsyncIterator[pb.GenerateResponse]:
    """Yields the messages of a call, each as soon as it can be sent."""
    samples = [VllmSample(index, generation) for index in range(len(generation.requests))]
    try:
        async for deltas in generation:
            for index, delta in deltas:
                if stream and delta.token_ids:
                    yield samples[index].chunk(delta)
                if delta.finish_reason is not None:
                    yield samples[index].complete()
    except _Aborted:
        for sample in samples:
            if not sample.is_whole:
                yield sample.complete()
