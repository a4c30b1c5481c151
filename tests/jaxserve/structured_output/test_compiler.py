"""Grammars compiled on threads: the cache, its bounds, slow ones, and those that wait."""

import asyncio
import threading

import pytest

from jaxserve.errors import InvalidRequest, QueueFull
from jaxserve.structured_output import compiler
from tests.jaxserve.structured_output.demo_grammars import DEMO, new_compiler, regex


def test_what_is_kept_has_a_bound(monkeypatch) -> None:
    monkeypatch.setattr(compiler, "MAX_CACHED", 3)
    grammars = new_compiler()
    first = grammars.compile(regex("a0"))
    for count in range(1, 6):
        grammars.compile(regex(f"a{count}"))
        with pytest.raises(InvalidRequest):
            grammars.compile(regex(f"(a{count}"))
        assert grammars.cached[0] <= 3
    assert grammars.compile(regex("a0")) is first, "somebody holds it"
    monkeypatch.setattr(compiler, "MAX_CACHED_BYTES", 20)
    grammars.compile(regex("b" * 19))
    assert grammars.cached == (1, 19)
    grammars.compile(regex("b" * 30))
    assert grammars.cached == (1, 30), "one is always kept"


def test_the_least_recently_used_goes_first(monkeypatch) -> None:
    monkeypatch.setattr(compiler, "MAX_CACHED", 2)
    grammars, made, compile_ = new_compiler(), [], compiler.compile_grammar

    def noted(grammar, *rest):
        made.append(grammar.text)
        return compile_(grammar, *rest)

    monkeypatch.setattr(compiler, "compile_grammar", noted)
    for text in ("a", "b", "a", "c", "a", "b"):
        grammars.compile(regex(text))
    assert made == ["a", "b", "c", "b"]


WAIT_SECONDS = 120.0


class Slow:
    """A grammar compiler that takes as long as a test wants."""

    def __init__(self, monkeypatch) -> None:
        self.grammars = new_compiler()
        self.grammars.compile(regex("warm"))  # the vocabulary is read
        self.begun, self.may_end = threading.Semaphore(0), threading.Event()
        compile_ = compiler.compile_grammar

        def slowly(grammar, *rest):
            if grammar.text.startswith("slow"):
                self.begun.release()
                assert self.may_end.wait(WAIT_SECONDS)
            return compile_(grammar, *rest)

        monkeypatch.setattr(compiler, "compile_grammar", slowly)
        monkeypatch.setattr(compiler, "COMPILE_SECONDS", 0.05)
        self._monkeypatch = monkeypatch

    def be_patient(self) -> None:
        """Lets others take as long as a busy machine may need."""
        self._monkeypatch.setattr(compiler, "COMPILE_SECONDS", WAIT_SECONDS)


def test_slow_grammar_is_refused_once(monkeypatch) -> None:
    slow = Slow(monkeypatch)
    try:
        for _ in range(2):
            with pytest.raises(InvalidRequest, match=r"^grammar: takes longer than 0.05 seconds to compile$"):
                slow.grammars.compile(regex("slow"))
        assert slow.begun.acquire(timeout=WAIT_SECONDS)
        assert not slow.begun.acquire(blocking=False), "it was tried twice"
        slow.be_patient()
        slow.grammars.compile(regex("quick"))
    finally:
        slow.may_end.set()


def test_event_loops_do_not_wait_for_others(monkeypatch) -> None:
    slow = Slow(monkeypatch)

    async def scenario() -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            for count in range(2):  # as many threads as there are
                with pytest.raises(InvalidRequest, match="takes longer"):
                    await slow.grammars.compile_async(regex(f"slow{count}"))
            with pytest.raises(QueueFull, match="other grammars"):
                await slow.grammars.compile_async(regex("quick"))
            slow.be_patient()
            slow.may_end.set()
            compiled = None
            while compiled is None:
                try:
                    compiled = await slow.grammars.compile_async(regex("quick"))
                except QueueFull:
                    await asyncio.sleep(0)
            assert slow.grammars.compile(regex("quick")) is compiled

    try:
        asyncio.run(scenario())
    finally:
        slow.may_end.set()


def test_so_many_wait_and_no_more(monkeypatch) -> None:
    slow = Slow(monkeypatch)
    monkeypatch.setattr(compiler, "MAX_COMPILING", 2)
    try:
        jobs = [slow.grammars._find_or_start(regex(f"slow{count}")) for count in range(2)]
        assert slow.grammars._find_or_start(regex("slow1")) is jobs[1], "asked for twice, compiled once"
        with pytest.raises(QueueFull, match="2 grammars are being compiled"):
            slow.grammars.compile(regex("quick"))
    finally:
        slow.may_end.set()


def test_a_library_that_breaks_down_breaks_nothing_else(monkeypatch, grammars) -> None:
    class Panic(BaseException):
        pass

    def panics(*_):
        raise Panic

    with monkeypatch.context() as patched:
        patched.setattr(compiler, "compile_grammar", panics)
        with pytest.raises(InvalidRequest, match=r"cannot be compiled \(Panic\)"):
            grammars.compile(regex("unheard of"))
    grammars.compile(regex("heard of"))


def test_a_tokenizer_that_the_library_cannot_read_is_told(monkeypatch) -> None:
    monkeypatch.setattr(DEMO, "to_json", lambda: '{"version": "1.0"}')
    with pytest.raises(InvalidRequest, match=r"^grammar: is not served with this tokenizer: "):
        new_compiler().compile(regex("a"))
