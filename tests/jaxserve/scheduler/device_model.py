"""A model of a device, and of whoever waits for its answers.

Rows have a token history and a block table, and every slot of the pool remembers which token history its keys and
values were computed from. A plan runs at launch, in order, as on a device; its answer reaches the scheduler later.
Every chunk checks that it reads its own history and nothing else.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Set
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

import numpy as np

from jaxserve.iteration import IterationPlan, IterationResult, SamplerVariant
from jaxserve.request import FinishReason, Request, TokenEvent
from jaxserve.sampling_params import MAX_LOGPROBS
from jaxserve.scheduler.host_cache import HostCopies

VOCABULARY = 11
EOS = frozenset({0})
MAX_CONTEXT = 24


def extend_history(fingerprint: int, token: int) -> int:
    """What the keys and values of a position depend on: its token and all before it."""
    return hash((fingerprint, token))


def next_token(fingerprint: int, sample: int = 0) -> int:
    return ((fingerprint >> 7) + sample) % VOCABULARY


def logprob_of(token: int, position: int) -> float:
    return -float(token) - position / 64  # exact in float32


def fingerprints(tokens: list[int]) -> list[int]:
    return list(itertools.accumulate(tokens, extend_history, initial=0))[1:]


class Answer(NamedTuple):
    tokens: list[int]
    reason: FinishReason


def solo(request: Request) -> Answer:
    """What the request generates with the machine to itself."""
    sampling, tokens = request.sampling, list(request.prompt)
    while True:
        token = next_token(fingerprints(tokens)[-1], sampling.sample_index)
        tokens.append(token)
        reason = None
        if token in EOS and not sampling.ignore_eos:
            reason = FinishReason.EOS
        elif token in sampling.stop_token_ids:
            reason = FinishReason.STOP
        elif len(tokens) == request.max_length:
            reason = FinishReason.LENGTH
        if reason is not None:
            return Answer(tokens[len(request.prompt) :], reason)


@dataclass
class Row:
    history: list[int]
    table: list[int]
    sample: int


class Slot(NamedTuple):
    fingerprint: int
    sequence: int  # of the plan that wrote it


class Device:
    """Runs plans at once and in order, and checks everything it reads."""

    def __init__(self, block_size: int, windows: tuple[int | None, ...] = (None,)) -> None:
        self.block_size = block_size
        self.windows = [window or MAX_CONTEXT for window in windows]  # of each cache group
        self.rows: dict[int, Row] = {}
        self.slots: dict[tuple[int, int, int], Slot] = {}  # by group, block and offset
        self.host: dict[int, list[Slot | None]] = {}  # blocks in host memory, by key

    def copy(self, copies: HostCopies) -> list[bool]:
        """Copies blocks to the host and back; whether each that comes back is what had been stored."""
        for key, group, block in copies.stores:
            assert key not in self.host
            self.host[key] = [self.slots[group, block, offset] for offset in range(self.block_size)]
        for key, group, block, *_ in copies.loads:
            for offset, slot in enumerate(self.host[key]):
                self.slots[group, block, offset] = slot or Slot(0, 0)
        intact = [None not in self.host[load.key] for load in copies.loads]
        for key in copies.drops:
            del self.host[key]
        return intact

    def run(self, plan: IterationPlan, completed: int, forks: Set[str]) -> IterationResult:
        """`completed`: plans before this sequence number have been completed."""
        size = self.block_size
        groups = len(self.windows)
        assert len(plan.block_copies) % groups == 0
        for index, (source, target) in enumerate(plan.block_copies):
            group = index % groups
            for offset in range(size):
                self.slots.pop((group, target, offset), None)
                if (group, source, offset) in self.slots:
                    self.slots[group, target, offset] = self.slots[group, source, offset]
        for admission in plan.admissions:
            tokens, blocks = list(admission.tokens), list(admission.blocks)
            self.rows[admission.row] = Row(tokens, blocks, admission.sampling.sample_index)
            assert len(blocks) % groups == 0
            for group, window in enumerate(self.windows):
                found = blocks[group::groups]
                behind = max(len(found) * size - window + 1, 0) // size  # blocks that no token attends to
                # One behind the window of its owner may be found when it is given back.
                before = completed if window == MAX_CONTEXT else plan.sequence
                assert admission.request_id in forks or all(
                    self.slots[group, block, offset].sequence < before
                    for block in found[behind:]
                    for offset in range(size)
                ), "a hit on a block whose content has not landed"
        for row, index, block in plan.table_changes:
            assert index == len(self.rows[row].table)
            self.rows[row].table.append(block)
        drafts = deque(plan.drafts)
        for row, start, length, samples in plan.chunks:
            if samples > 1:
                self.rows[row].history[start + 1 :] = [drafts.popleft() for _ in range(length - 1)]
        assert not drafts
        # As a layer does: all chunks write, then all attend.
        for row, start, length, _ in plan.chunks:
            history, table = self.rows[row].history, self.rows[row].table
            assert start + length <= len(history)
            marks = fingerprints(history)
            for position in range(start, start + length):
                for group in range(groups):
                    block = table[position // size * groups + group]
                    self.slots[group, block, position % size] = Slot(marks[position], plan.sequence)
        tokens, logprobs, scores, after = [], [], [], []
        for row, start, length, samples in plan.chunks:
            history, table = self.rows[row].history, self.rows[row].table
            marks = fingerprints(history)
            for group, window in enumerate(self.windows):
                for position in range(max(start - window + 1, 0), start + length):
                    slot = self.slots[group, table[position // size * groups + group], position % size]
                    assert slot.fingerprint == marks[position], f"row {row} reads somebody else's slot at {position}"
            for position in range(start, start + length):
                known = history[position + 1] if position + 1 < len(history) else 0
                after.append(known)
                scores.append(logprob_of(known, position + 1))
            end = start + length
            sample = self.rows[row].sample
            chosen = [next_token(mark, sample) for mark in marks[end - samples : end]] or [-1]
            tokens += chosen
            logprobs += [logprob_of(token, end + 1 - len(chosen) + at) for at, token in enumerate(chosen)]
            if samples:  # what is chosen after a draft that was not is written all the same
                history[end + 1 - samples :] = chosen
        flat = np.full(plan.bucket, np.nan, np.float32)
        flat[: len(scores)] = scores
        ids = np.zeros((plan.bucket, MAX_LOGPROBS), np.int32)
        ids[: len(after)] = np.array(after, np.int32)[:, None] + np.arange(MAX_LOGPROBS)
        full = plan.sampler is not None and plan.sampler >= SamplerVariant.FULL
        top = np.array(tokens, np.int32)[:, None] + np.arange(MAX_LOGPROBS, dtype=np.int32)
        return IterationResult(
            tokens=np.array(tokens, np.int32),
            logprobs=np.array(logprobs, np.float32),
            top_ids=top if full else None,
            top_logprobs=-top.astype(np.float32) if full else None,
            score_logprobs=flat if plan.scoring else None,
            score_top_ids=ids if plan.scoring else None,
            score_top_logprobs=-ids.astype(np.float32) if plan.scoring else None,
        )


@dataclass
class Client:
    """What one request has received."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    prompt_scores: list[float] = field(default_factory=list)
    cached: int | None = None

    @functools.cached_property
    def expected(self) -> Answer:
        return solo(self.request)

    def take(self, event: TokenEvent) -> None:
        sampling, position = self.request.sampling, len(self.request.prompt) + len(self.tokens)
        self.tokens += event.token_ids
        expected = self.expected
        assert self.tokens == expected.tokens[: len(self.tokens)]
        assert event.logprobs == tuple(logprob_of(token, position + at) for at, token in enumerate(event.token_ids))
        if sampling.logprobs and event.token_ids:
            ids = [tuple(range(token, token + sampling.logprobs)) for token in event.token_ids]
            assert event.top_logprobs == tuple((each, tuple(-float(i) for i in each)) for each in ids)
        else:
            assert event.top_logprobs == ()
        for logprob, alternatives in event.prompt_logprobs:
            self.prompt_scores.append(logprob)
            token = self.request.prompt[len(self.prompt_scores)]
            most = sampling.prompt_logprobs
            assert most is not None
            assert alternatives == (
                (tuple(range(token, token + most)), tuple(-float(i) for i in range(token, token + most)))
                if most
                else None
            )
        if event.finish_reason != FinishReason.ABORTED or self.cached is not None:
            assert self.cached in (None, event.cached_tokens)
            self.cached = event.cached_tokens
            assert self.cached < len(self.request.prompt)
        if event.finish_reason not in (None, FinishReason.ABORTED):
            assert Answer(self.tokens, event.finish_reason) == expected
            prompt = self.request.prompt
            assert self.prompt_scores == [
                logprob_of(token, position)
                for position, token in enumerate(prompt)
                if position and sampling.prompt_logprobs is not None
            ]
            if sampling.prompt_logprobs is not None:
                assert self.cached == 0


class Prophet:
    """Drafts what will come, but for a token now and then."""

    def __init__(self, tokens: list[int], errs: float) -> None:
        self.tokens = tokens
        self.errs = errs

    def propose(self, most: int) -> list[int]:
        draw, tokens = Random(str(self.tokens)), list(self.tokens)
        for _ in range(draw.randint(0, most)):
            token = next_token(fingerprints(tokens)[-1])
            tokens.append(draw.randrange(VOCABULARY) if draw.random() < self.errs else token)
        return tokens[len(self.tokens) :]
