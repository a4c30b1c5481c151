"""What stands behind every protocol: several requests of one call, and what observers are told."""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from jaxserve.generation.beam_search import BeamParams
from jaxserve.generation.completion import Completion
from jaxserve.request import FinishReason, Request
from server.call import Call, Observer, RequestTiming
from server.errors import ApiError, ErrorKind
from tests.server.conftest import Served

Serve = Callable[..., None]
LONG = 1500  # tokens: more than any test waits for


def call(**fields: Any) -> Call:
    return Call(protocol="test", **fields)


async def answer(it: Served, *prompts: dict[str, Any], **fields: Any) -> None:
    """Hears a call out."""
    asked = call(**fields)
    with it.app.handler.answering(asked.id):
        async with it.app.handler.generate(prompts, asked) as generation:
            async for _ in generation:
                pass


class Listener(Observer):
    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def started(self, timing: RequestTiming) -> None:
        self.told.append(("started", timing.call.id, bytes(timing.request.prompt)))

    def tokens(self, timing: RequestTiming, count: int, gap: float | None) -> None:
        self.told.append(("tokens", bytes(timing.request.prompt), count, gap is None))

    def ended(self, timing: RequestTiming, completion: Completion) -> None:
        self.told.append(("ended", bytes(timing.request.prompt), completion.finish_reason))

    def refused(self, call_id: str, refusal: ApiError) -> None:
        self.told.append(("refused", call_id, refusal.field))


def test_several_prompts_and_samples(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        prompts = [{"prompt": "ab", "max_tokens": 3}, {"prompt": "xyz", "max_tokens": LONG, "stop": "zx"}]
        texts = [""] * 4
        async with it.app.handler.generate(prompts, call(), samples=2) as generation:
            assert [request.sampling.sample_index for request in generation.requests] == [0, 1, 0, 1]
            async for deltas in generation:
                for index, delta in deltas:
                    texts[index] += delta.text
            assert texts == ["aba", "aba", "xy", "xy"]
            reasons = [generation.completion(index).finish_reason for index in range(4)]
            assert reasons == [FinishReason.LENGTH] * 2 + [FinishReason.STOP] * 2
        await it.until(lambda: it.engine.load().slots_used == 0)
        assert len(it.engine.aborted) == 2  # those that a stop string ended, which the engine does not know of

    serve(scenario)


def test_left_call_aborts_its_requests(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        prompts = [{"prompt": "ab", "max_tokens": LONG}, {"prompt": "cd", "max_tokens": 1}]
        async with it.app.handler.generate(prompts, call()) as generation:
            await it.step(2)
            assert dict(await anext(generation))[1].finish_reason is FinishReason.LENGTH
            assert it.app.handler.calls.num_requests == 2
        assert it.app.handler.calls.num_requests == 0
        await it.until(lambda: it.engine.load().slots_used == 0)
        assert len(it.engine.aborted) == 1

    serve(scenario, held=True)


def test_samples_fork_the_first(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        seen, submit = [], it.engine.submit
        it.engine.submit = lambda request, sink: (seen.append(request), submit(request, sink))[1]  # type: ignore
        prompts = [{"prompt": text, "max_tokens": 2, "prompt_logprobs": 0} for text in ("abc", "de")]
        async with it.app.handler.generate(prompts, call(), samples=3) as generation:
            async for _ in generation:
                pass
            scores = [generation.completion(index).prompt_logprobs for index in range(6)]
        assert scores == [(None, -0.25, -0.5)] * 3 + [(None, -0.25)] * 3
        first, other = seen[0].request_id, seen[3].request_id
        assert [request.fork_of for request in seen] == [None, first, first, None, other, other]
        assert [request.sampling.prompt_logprobs for request in seen] == [0, None, None] * 2
        assert [request.sampling.sample_index for request in seen] == [0, 1, 2] * 2

    serve(scenario)


def test_deadline(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        # Of calls that are let in, as they would be done in time; but the engine does not move.
        async def found(asked: Call) -> None:
            with it.app.handler.answering(asked.id):
                await it.app.handler.search({"prompt": "ab", "max_tokens": 2}, asked, BeamParams(width=2, n=2))

        def drawn(asked: Call) -> Coroutine[Any, Any, None]:
            return answer(it, {"prompt": "ab", "max_tokens": 2}, deadline=asked.deadline)

        for ask in (found, drawn):
            with pytest.raises(ApiError, match="deadline has passed") as refused:
                await ask(call(deadline=time.monotonic() + 0.05))
            assert refused.value.kind is ErrorKind.TOO_LATE
            assert it.app.handler.calls.num_requests == 0
        await it.until(lambda: len(it.engine.aborted) == 2)
        assert it.engine.load().waiting == 0

    serve(scenario, held=True)


def test_beam_search_is_one_request_to_observers(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        handler, listener = it.app.handler, Listener()
        handler.observers.append(listener)
        fields, asked = {"prompt": "ab", "max_tokens": 2}, call(id="mine")
        searching = asyncio.create_task(handler.search(fields, asked, BeamParams(width=3, n=2)))
        await it.until(lambda: it.engine.load().waiting == 1)  # the prompt, once
        assert (handler.admission.kept_requests, handler.admission.kept_tokens) == (3, 3 * 4)
        assert (handler.admission.reserved_requests, handler.calls.num_requests) == (0, 1)
        await it.step()
        await it.until(lambda: it.engine.load().waiting == 3)  # a token each
        it.engine.release()
        request, answers = await searching
        assert (bytes(request.prompt), [one.token_ids for one in answers]) == (b"ab", [(0, 0), (0, 1)])
        assert listener.told == [
            ("started", "mine", b"ab"),
            ("tokens", b"ab", 1, True),
            ("tokens", b"ab", 1, False),
            ("ended", b"ab", FinishReason.LENGTH),
        ]
        assert handler.calls.num_requests == handler.admission.kept_requests == handler.admission.kept_tokens == 0

    serve(scenario, held=True)


def test_left_or_failed_beam_search(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        handler = it.app.handler
        left = asyncio.create_task(handler.search({"prompt": "ab", "max_tokens": 9}, call(), BeamParams(width=3, n=1)))
        await it.until(lambda: it.engine.load().waiting == 1)
        await it.step()
        await it.until(lambda: it.engine.load().waiting == 3)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        await it.until(lambda: len(it.engine.aborted) == 3)
        it.engine.release()
        asked = call(id="mine")
        with pytest.raises(ApiError, match="under mine"), handler.answering("mine"):
            await handler.search({"prompt": "!", "max_tokens": 9}, asked, BeamParams(width=3, n=1))
        await it.until(lambda: it.engine.load().slots_used == 0)
        await asyncio.wait_for(handler.calls.wait_until_none(), 1)
        assert handler.admission.kept_requests == handler.calls.num_requests == 0

    serve(scenario, held=True, poison=frozenset(b"!"))


def test_one_wrong_prompt_refuses_the_call(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        for field, wrong in (("prompt", {"prompt": ""}), ("prompt_token_ids", {"prompt_token_ids": [999]})):
            with pytest.raises(ApiError, match=field) as refused:
                await answer(it, {"prompt": "ab"}, wrong)
            assert (refused.value.kind, refused.value.field) == (ErrorKind.INVALID, field)
        await it.until(lambda: it.engine.load().waiting == 0)
        assert it.app.handler.calls.num_requests == 0

    serve(scenario, held=True)


def test_adjust_after_tokenizing(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        def last_two(request: Request) -> Request:
            return dataclasses.replace(request, prompt=request.prompt[-2:])

        async with it.app.handler.generate([{"prompt": "abcd", "max_tokens": 3}], call(), adjust=last_two) as one:
            async for _ in one:
                pass
        assert one.completion().text == "cdc"

    serve(scenario)


def test_observers(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        handler, listener = it.app.handler, Listener()
        handler.observers.append(listener)
        await answer(it, {"prompt": "ab", "max_tokens": 2}, id="mine")
        async with handler.generate([{"prompt": "cd", "max_tokens": LONG}], call(id="yours")):
            pass
        with pytest.raises(ApiError):
            await answer(it, {"prompt_token_ids": [999]}, id="wrong")
        assert listener.told[:5] == [
            ("started", "mine", b"ab"),
            ("tokens", b"ab", 1, True),
            ("tokens", b"ab", 1, False),
            ("ended", b"ab", FinishReason.LENGTH),
            ("started", "yours", b"cd"),
        ]
        told = [each for each in listener.told[5:] if each[0] != "tokens"]  # as much as it did before it was left
        assert told == [("ended", b"cd", None), ("refused", "wrong", "prompt_token_ids")]

    serve(scenario)


def test_failure_hides_its_cause(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(it: Served) -> None:
        with pytest.raises(ApiError, match="under mine") as refused:
            await answer(it, {"prompt": "!", "max_tokens": 2}, id="mine")
        assert refused.value.kind is ErrorKind.FAILED
        assert "poison" not in str(refused.value)
        await asyncio.wait_for(it.app.handler.calls.wait_until_none(), 1)

    serve(scenario, poison=frozenset(b"!"))
    assert "this prompt is poison" in caplog.text
