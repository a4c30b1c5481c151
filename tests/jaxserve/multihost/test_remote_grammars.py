"""Texts held to grammars by several hosts: whatever is quicker where, all come to the same masks, and no request is let
in whose grammar one of them has not compiled."""

import queue
import random
import threading
from collections.abc import Callable

import numpy as np
import pytest

from jaxserve.errors import InvalidRequest
from jaxserve.iteration import Admission, Chunk, IterationPlan, IterationResult, SamplerVariant
from jaxserve.multihost import control_pb2 as pb
from jaxserve.multihost import remote_grammars as texts
from jaxserve.multihost import wire
from jaxserve.multihost.remote_grammars import GrammarCompileRequests, WorkerGrammars
from jaxserve.sampling_params import Grammar, SamplingParams
from jaxserve.structured_output.compiler import GrammarCompiler
from jaxserve.structured_output.grammar import read
from jaxserve.structured_output.masks import GrammarMasks
from tests.fixtures.texts import CASES, printable_tokenizer
from tests.fixtures.tiny import VOCAB

REGEX = read("grammar", CASES["regex"].given)
WORDS = -(-VOCAB // 32)
ROWS, TURN = 4, 12  # after so many iterations, other requests take the rows
WAIT_SECONDS = 120.0


def grammars(compile_on_workers: Callable | None = None) -> GrammarCompiler:
    tokenizer = printable_tokenizer()
    return GrammarCompiler(tokenizer, VOCAB, (2,), compile_on_workers=compile_on_workers or (lambda _: lambda: None))


def prepared(number: int, problem: str = "") -> pb.Prepared:
    return pb.Prepared(number=number, problem=problem)


def test_a_grammar_is_let_in_once_all_have_compiled_it() -> None:
    sent: list[pb.FromMaster] = []
    asking = GrammarCompileRequests(sent.append, (2, 3))
    wait, done = asking.ask(REGEX), queue.SimpleQueue()
    assert wire.decode_grammar(sent[0].prepare.grammar) == REGEX
    threading.Thread(target=lambda: done.put(wait()), daemon=True).start()
    asking.answered(2, prepared(0))
    asking.answered(2, prepared(9))  # of which nobody waits
    with pytest.raises(queue.Empty):
        done.get(timeout=0.05)
    asking.answered(3, prepared(0))
    assert done.get(timeout=WAIT_SECONDS) is None
    assert not asking._awaited


def test_who_cannot_compile_it_is_named(monkeypatch) -> None:
    asking = GrammarCompileRequests(lambda _: None, (2, 3))
    first, second = asking.ask(REGEX), asking.ask(REGEX)
    for host in (2, 3):
        asking.answered(host, prepared(0, "cannot be compiled: no" if host == 3 else ""))
    assert first() == "cannot be compiled: no (on host 3)"
    asking.answered(2, prepared(1))
    monkeypatch.setattr(texts, "_WAIT_SECONDS", 0.01)
    assert second() == "was not compiled on host 3 within 0.01 seconds"
    asking.answered(3, prepared(1))
    assert not asking._awaited
    assert not asking._problems


def test_a_problem_elsewhere_refuses_the_request() -> None:
    with pytest.raises(InvalidRequest, match=r"^grammar: was not compiled on host 1"):
        grammars(lambda _: lambda: "was not compiled on host 1").compile(REGEX)
    grammars(lambda _: lambda: None).compile(REGEX)


def test_uncompilable_grammar_is_not_kept() -> None:
    asking = GrammarCompileRequests(lambda _: None, (1,))

    def compile_on_workers(grammar: Grammar) -> Callable[[], str | None]:
        wait = asking.ask(grammar)
        asking.answered(1, prepared(0, "cannot be compiled: there neither"))
        return wait

    with pytest.raises(InvalidRequest, match="unclosed group"):
        grammars(compile_on_workers).compile(Grammar(kind="regex", text="(a"))
    assert not asking._awaited
    assert not asking._problems


def test_a_worker_answers_with_what_became_of_a_grammar() -> None:
    answers: queue.SimpleQueue[pb.FromWorker] = queue.SimpleQueue()
    host = WorkerGrammars(grammars(), lambda bucket: (ROWS, WORDS))
    wrong = Grammar(kind="regex", text="(a", field="response_format")
    for number, grammar in enumerate((REGEX, wrong, REGEX, wrong)):  # the second time it is known
        host.prepare(pb.Prepare(number=number, grammar=wire.encode_grammar(grammar)), answers.put)
        found = answers.get(timeout=WAIT_SECONDS).prepared
        assert found.number == number
        assert found.problem.startswith("cannot be compiled: unclosed group") == (grammar is wrong)


class Traffic:
    """Plans of rows that are held to grammars, two in flight, and the results of a device that draws by the masks."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.plans: list[IterationPlan] = []
        for sequence in range(60):
            rows = range(ROWS - 1) if sequence % TURN == 0 else ()  # the last one has no grammar
            self.plans.append(
                IterationPlan(
                    sequence=sequence,
                    bucket=ROWS,
                    admissions=tuple(self._admission(sequence, row) for row in rows),
                    chunks=tuple(Chunk(row, sequence, 1, 1) for row in range(ROWS)),
                    table_changes=(),
                    sampler=SamplerVariant.CONSTRAINED,
                    scoring=False,
                )
            )

    def _admission(self, sequence: int, row: int) -> Admission:
        grammar = read("grammar", CASES[self.draw.choice(sorted(CASES))].given)
        return Admission(
            row=row,
            request_id=f"{sequence // TURN} {row}",
            tokens=(5,),
            prompt_length=1,
            blocks=(),
            sampling=SamplingParams(grammar=grammar, max_tokens=99),
        )


def choose(allowed: np.ndarray, draw: random.Random) -> IterationResult:
    bits = np.unpackbits(allowed.view(np.uint8), bitorder="little").reshape(ROWS, -1)[:, :VOCAB]
    tokens = np.array([draw.choice(np.flatnonzero(row).tolist()) for row in bits], np.int32)
    return IterationResult(tokens=tokens, logprobs=np.zeros(ROWS, np.float32))


@pytest.mark.parametrize("seed", range(4))
def test_hosts_come_to_the_same_masks_whatever_is_quicker_where(seed) -> None:
    """One hears of ends early and of tokens late, the other the other way round."""
    traffic, made = Traffic(seed), grammars()
    everything = np.full((ROWS, WORDS), 0xFFFFFFFF, np.uint32)
    master, worker = GrammarMasks(multihost=True), WorkerGrammars(made, lambda bucket: (ROWS, WORDS))
    results: dict[int, IterationResult] = {}
    for index, plan in enumerate(traffic.plans):
        for admission in plan.admissions:
            sampling = admission.sampling
            assert sampling.grammar is not None
            master.begin(admission.request_id, sampling, made.compile(sampling.grammar))
            worker.hold(pb.Hold(request_id=admission.request_id, sampling=wire.encode_sampling(sampling)))
        late = traffic.draw.random() < 0.5
        if index and not late:
            worker.landed(traffic.plans[index - 1], results[index - 1])
        waits = master.launched(plan)
        theirs = worker.launched(plan)
        if index:
            found = master.landed(traffic.plans[index - 1], results[index - 1])
            for entry in found.grammar_ends or ():
                name = f"{(index - 1) // TURN} {entry}"
                master.end(name)
                if traffic.draw.random() < 0.5:
                    worker.release(pb.Release(request_id=name))
        if index and late:
            worker.landed(traffic.plans[index - 1], results[index - 1])
        ours = everything
        if waits:
            assert master.is_known
            assert not master.wait(lambda _: False)
            ours = master.fill(ROWS, WORDS)
        other = theirs()
        np.testing.assert_array_equal(everything if other is None else other, ours)
        results[index] = choose(ours, traffic.draw)


def test_aborted_request_masked_in_flight() -> None:
    """Some hosts hear of it before they come to the iteration, others after."""
    made, found = grammars(), []
    for early in (True, False):
        host = WorkerGrammars(made, lambda bucket: (ROWS, WORDS))
        plan = Traffic(0).plans[0]
        for admission in plan.admissions:
            host.hold(pb.Hold(request_id=admission.request_id, sampling=wire.encode_sampling(admission.sampling)))
        allowed = host.launched(plan)
        if early:
            host.release(pb.Release(request_id="0 1"))
        found.append(allowed())
        host.release(pb.Release(request_id="0 1"))
    np.testing.assert_array_equal(*found)
    assert (found[0][1] != 0xFFFFFFFF).any()
