"""Converts plans and results to and from the messages of control.proto. No jax.

A decode row takes about ten bytes, because tokens stay on the devices. Of a request's parameters, only those of the
sampler are sent, once, when the request takes its row. The functions `write_...` fill an empty message, which may be
part of another one, and return it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxserve.iteration import (
    Admission,
    BlockCopy,
    Chunk,
    IterationPlan,
    IterationResult,
    PooledRange,
    SamplerVariant,
    TableChange,
)
from jaxserve.multihost import control_pb2 as pb
from jaxserve.sampling_params import SAMPLING_PARAMS, Grammar, SamplingParams

_MOST = 2**31 - 1
_FLOATS = tuple(name for name, param in SAMPLING_PARAMS.items() if param.kind is float)
_OPTIONAL = {field.name for field in pb.Sampling.DESCRIPTOR.fields if field.has_presence}


def write_plan(message: pb.Plan, plan: IterationPlan, feeds: int) -> pb.Plan:
    """Write a plan into an empty message.

    Args:
      feeds: number of earlier plans whose tokens go back to the first stage before this one.
    """
    message.sequence, message.bucket, message.scoring, message.feeds = plan.sequence, plan.bucket, plan.scoring, feeds
    if plan.sampler is not None:
        message.sampler = plan.sampler
    if plan.admissions:
        message.admissions.extend(map(encode_admission, plan.admissions))
    if plan.drafts:
        message.drafts.extend(plan.drafts)
    if plan.chunks:
        write_chunks(message.chunks, plan.chunks)
    if plan.table_changes:
        row, column, block = zip(*plan.table_changes, strict=True)
        changes = message.table_changes
        changes.row.extend(row)
        changes.column.extend(column)
        changes.block.extend(block)
    for copy in plan.block_copies:
        message.block_copies.add(source=copy.source, target=copy.target)
    if plan.pooled:
        first, end = zip(*plan.pooled, strict=True)
        message.pooled.first.extend(first)
        message.pooled.end.extend(end)
    return message


def decode_plan(message: pb.Plan) -> IterationPlan:
    """The plan that `write_plan` was given."""
    changes = message.table_changes
    return IterationPlan(
        sequence=message.sequence,
        bucket=message.bucket,
        admissions=tuple(map(decode_admission, message.admissions)),
        chunks=read_chunks(message.chunks),
        table_changes=tuple(map(TableChange._make, zip(changes.row, changes.column, changes.block, strict=True))),
        sampler=SamplerVariant(message.sampler) if message.HasField("sampler") else None,
        scoring=message.scoring,
        drafts=tuple(message.drafts),
        block_copies=tuple(BlockCopy(copy.source, copy.target) for copy in message.block_copies),
        pooled=tuple(map(PooledRange._make, zip(message.pooled.first, message.pooled.end, strict=True))),
    )


def write_chunks(message: pb.Chunks, chunks: Sequence[Chunk]) -> None:
    """Write at least one chunk into an empty message."""
    row, start, length, samples = zip(*chunks, strict=True)
    message.row.extend(row)
    message.start.extend(start)
    message.length.extend(length)
    message.samples.extend(map(int, samples))  # may be bools


def read_chunks(message: pb.Chunks) -> tuple[Chunk, ...]:
    """The chunks in a message. Raises ValueError if its columns differ in length."""
    return tuple(map(Chunk._make, zip(message.row, message.start, message.length, message.samples, strict=True)))


def encode_admission(admission: Admission) -> pb.Admission:
    """Encode a request that takes a row."""
    return pb.Admission(
        row=admission.row,
        request_id=admission.request_id,
        tokens=admission.tokens,
        prompt_length=admission.prompt_length,
        blocks=admission.blocks,
        endings=admission.endings,
        sampling=encode_sampling(admission.sampling),
    )


def decode_admission(message: pb.Admission) -> Admission:
    """The admission that `encode_admission` was given, with only the sampler's parameters."""
    return Admission(
        row=message.row,
        request_id=message.request_id,
        tokens=tuple(message.tokens),
        prompt_length=message.prompt_length,
        blocks=tuple(message.blocks),
        sampling=decode_sampling(message.sampling),
        endings=tuple(message.endings),
    )


def encode_sampling(sampling: SamplingParams) -> pb.Sampling:
    """Encode the parameters that the sampler needs."""
    bias_tokens, biases = zip(*sampling.logit_bias, strict=True) if sampling.logit_bias else ((), ())
    return pb.Sampling(
        **{name: getattr(sampling, name) for name in _FLOATS},
        top_k=min(sampling.top_k, _MOST),
        seed=sampling.seed % 2**64,
        sample_index=sampling.sample_index,
        bias_token=bias_tokens,
        bias=biases,
        min_tokens=sampling.min_tokens,
        bad_words=[pb.Run(tokens=run) for run in sampling.bad_word_tokens],
        grammar=None if sampling.grammar is None else encode_grammar(sampling.grammar),
        ignore_eos=sampling.ignore_eos and sampling.grammar is not None,
    )


def decode_sampling(message: pb.Sampling) -> SamplingParams:
    """The parameters that `encode_sampling` was given, without those that end a request."""
    return SamplingParams(
        **{name: getattr(message, name) for name in _FLOATS if name not in _OPTIONAL or message.HasField(name)},
        top_k=message.top_k,
        seed=message.seed,
        sample_index=message.sample_index,
        logit_bias=tuple(zip(message.bias_token, message.bias, strict=True)),
        min_tokens=message.min_tokens,
        max_tokens=max(1, message.min_tokens),
        bad_word_tokens=tuple(tuple(run.tokens) for run in message.bad_words),
        grammar=decode_grammar(message.grammar) if message.HasField("grammar") else None,
        ignore_eos=message.ignore_eos,
    )


def encode_grammar(grammar: Grammar) -> pb.Grammar:
    return pb.Grammar(kind=grammar.kind, text=grammar.text, field=grammar.field)


def decode_grammar(message: pb.Grammar) -> Grammar:
    kind: Any = message.kind  # Grammar checks it
    return Grammar(kind=kind, text=message.text, field=message.field)


def write_result(message: pb.Result, result: IterationResult, plan: IterationPlan) -> pb.Result:
    """Write what a plan asked for of its result into an empty message."""
    count = plan.num_points
    message.tokens.extend(result.tokens[:count].tolist())
    message.logprobs.extend(result.logprobs[:count].tolist())
    if result.top_ids is not None and result.top_logprobs is not None:
        _encode_table(message.top, result.top_ids[:count], result.top_logprobs[:count])
    if result.score_logprobs is not None:
        assert result.score_top_ids is not None
        assert result.score_top_logprobs is not None
        message.score_logprobs.extend(result.score_logprobs.tolist())
        _encode_table(message.score_top, result.score_top_ids, result.score_top_logprobs)
    if result.pooled is not None:
        message.pooled_width = result.pooled.shape[1]
        message.pooled.extend(result.pooled[: len(plan.pooled)].reshape(-1).tolist())
    return message


def decode_result(message: pb.Result) -> IterationResult:
    """The result that `write_result` was given."""
    top = _decode_table(message.top) if message.HasField("top") else (None, None)
    score_top, scores = (None, None), None
    if message.HasField("score_top"):
        score_top = _decode_table(message.score_top)
        scores = np.array(message.score_logprobs, np.float32)
    return IterationResult(
        tokens=np.array(message.tokens, np.int32),
        logprobs=np.array(message.logprobs, np.float32),
        top_ids=top[0],
        top_logprobs=top[1],
        score_logprobs=scores,
        score_top_ids=score_top[0],
        score_top_logprobs=score_top[1],
        pooled=np.array(message.pooled, np.float32).reshape(-1, message.pooled_width) if message.pooled else None,
    )


def _encode_table(message: pb.Table, ids: np.ndarray, logprobs: np.ndarray) -> None:
    message.width = ids.shape[1]
    message.ids.extend(ids.reshape(-1).tolist())
    message.logprobs.extend(logprobs.reshape(-1).tolist())


def _decode_table(message: pb.Table) -> tuple[np.ndarray, np.ndarray]:
    ids, logprobs = np.array(message.ids, np.int32), np.array(message.logprobs, np.float32)
    return ids.reshape(-1, message.width), logprobs.reshape(-1, message.width)
