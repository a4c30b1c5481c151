"""Replays a flight record on one machine and compares the tokens.

The replay runs the same iterations in the same order. It computes keys and values from before the record again from
the tokens: those of live rows at the start, and those of a cached prefix when a request reuses it. These may be rounded
differently than in the recorded run. So may all others if the recorded engine had another number of devices. All layers
use the blocks of the first cache group, which a request holds longest. Where that group has a window, positions behind
it are computed into spare blocks: a request's own are another's by then.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxserve import models, startup, weights
from jaxserve.config import EngineConfig
from jaxserve.iteration import Admission, Chunk, IterationPlan, IterationResult
from jaxserve.multihost import control_pb2 as pb
from jaxserve.multihost import wire
from jaxserve.multihost.flight_recorder import RowRecords
from jaxserve.runner.batch import pack
from jaxserve.runner.layout import bucket_sizes, lay_out
from jaxserve.runner.pipeline import Pipeline
from jaxserve.runner.sharded_parameters import placement
from jaxserve.runner.stage import Progress, StageRunner
from jaxserve.scheduler.cache_groups import CacheGroups
from jaxserve.scheduler.window_pool import blocks_behind
from jaxserve.structured_output.compiler import GrammarCompiler
from jaxserve.text.tokenizer import Tokenizer
from sharding import mesh, specs


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDifference:
    """The first token of a request that differs.

    Attributes:
      replica: of several; None if there was one.
      recorded / replayed: (token, its logprob).
    """

    replica: int | None
    request_id: str
    sequence: int
    position: int
    recorded: tuple[int, float]
    replayed: tuple[int, float]

    def __str__(self) -> str:
        (token, logprob), (other, its) = self.recorded, self.replayed
        replica = "" if self.replica is None else f"replica {self.replica}, "
        return (
            f"{replica}iteration {self.sequence}, request {self.request_id}, position {self.position}: recorded "
            f"{token} (logprob {logprob:.4f}), replayed {other} ({its:.4f})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """The outcome of a replay.

    Attributes:
      iterations: replayed iterations, and how many of them have no recorded result.
      tokens: compared tokens, up to a request's first difference.
      requests: compared requests.
    """

    iterations: int
    unanswered: int
    tokens: int
    requests: int
    differences: tuple[TokenDifference, ...]


def replay(recording: pb.Recording, path: str | Path, *, cache: str | None, progress: Progress) -> ReplayResult:
    """Run a record's iterations again with the checkpoint that it was made with.

    Args:
      cache: folder of compiled programs, if there is one.

    Raises:
      ValueError: the checkpoint is another one, or this machine cannot run the record's settings.
    """
    if (found := weights.fingerprint(path)) != recording.fingerprint:
        raise ValueError(
            f"the record was made with a checkpoint of fingerprint {recording.fingerprint[:16]}...; {path} has "
            f"{found[:16]}..."
        )
    settings = json.loads(recording.settings)
    if unknown := settings.keys() - {field.name for field in dataclasses.fields(EngineConfig)}:
        names = ", ".join(sorted(unknown))
        raise ValueError(f"the record was made by another version of jaxserve; this one has no setting {names}")
    settings |= {"buckets": tuple(settings["buckets"]), "compilation_cache": cache}
    config = EngineConfig(**settings)
    pipeline, groups = _compile(config, path, recording.n_blocks, recording.n_rows, progress)
    if groups.count > 1:
        recording = _of_first_group(recording, groups.count)
    grammars, tokenizer, model = None, Tokenizer.from_directory(path), pipeline.model.config
    if tokenizer is not None:
        grammars = GrammarCompiler(tokenizer, model.vocab_size, model.eos_token_ids)
    return _Replay(pipeline, recording, grammars).run(progress)


def _of_first_group(recording: pb.Recording, groups: int) -> pb.Recording:
    """The record with the block tables of the first of its cache groups."""
    found = pb.Recording()
    found.CopyFrom(recording)
    for admission in [row.admission for row in found.rows] + [
        admission for entry in found.entries for admission in entry.plan.admissions
    ]:
        admission.blocks[:] = admission.blocks[::groups]
    for plan in (entry.plan for entry in found.entries):
        kept = zip(plan.table_changes.row, plan.table_changes.column, plan.table_changes.block, strict=True)
        changes = [(row, column // groups, block) for row, column, block in kept if column % groups == 0]
        plan.ClearField("table_changes")
        for row, column, block in changes:
            plan.table_changes.row.append(row)
            plan.table_changes.column.append(column)
            plan.table_changes.block.append(block)
        copies = [pb.Copy(source=copy.source, target=copy.target) for copy in plan.block_copies[::groups]]
        plan.ClearField("block_copies")
        plan.block_copies.extend(copies)
    return found


def _compile(
    config: EngineConfig, path: str | Path, n_blocks: int, n_rows: int, progress: Progress
) -> tuple[Pipeline, CacheGroups]:
    """A pipeline whose layers are one cache group, and the groups of the recorded engine."""
    model = models.build(weights.read_config(path))
    meshes, dtype = [mesh.make_mesh({"tensor": 1})], startup.compute_dtype(config)
    spec, platform = specs.default(model.config.family), meshes[0].devices.flat[0].platform
    (programs,), _ = lay_out(config, model, meshes, spec, dtype=dtype, platform=platform)
    groups = programs.shape.groups
    first = dataclasses.replace(groups, windows=groups.windows[:1])
    programs = dataclasses.replace(programs, shape=dataclasses.replace(programs.shape, n_rows=n_rows, groups=first))
    params = weights.load(
        path,
        programs.model,
        dtype,
        place=placement([programs]),
        quantize=programs.quantize,
        progress=progress,
    )
    runner = StageRunner(programs, params, bucket_sizes(config), startup.program_cache(config))
    runner.compile(n_blocks + _spare_blocks(first), progress)
    return Pipeline([runner]), groups


def _spare_blocks(group: CacheGroups) -> int:
    return 0 if group.windows[0] is None else -(-group.max_context // group.block_size)


class _Replay:
    """A replay of a recording through a pipeline of one stage."""

    def __init__(self, pipeline: Pipeline, recording: pb.Recording, grammars: GrammarCompiler | None) -> None:
        self._pipeline, self._recording, self._grammars = pipeline, recording, grammars
        self._held_to: set[str] = set()  # requests whose grammar state is tracked
        groups = pipeline.shape.groups
        self._block_size, self._window = groups.block_size, groups.windows[0]
        self._n_blocks = recording.n_blocks + _spare_blocks(groups)
        self._rows = RowRecords(self._block_size)
        self._held: dict[int, int] = {}  # block -> hash of all tokens up to its end

    def run(self, progress: Progress) -> ReplayResult:
        for row in self._recording.rows:
            admission = wire.decode_admission(row.admission)
            self._rows.prepare(pb.Plan(admissions=[row.admission]))
            self._rows.rows[admission.row].computed = row.computed
            self._hold(admission, row.computed + 1)
            # One position less: the last token may be computed again.
            self._compute(admission, row.computed, self._behind(row.computed - 1))
        entries = self._recording.entries
        tokens, compared, differences = 0, set(), {}
        for done, entry in enumerate(entries, start=1):
            plan = wire.decode_plan(entry.plan)
            for admission in plan.admissions:
                end = len(admission.blocks) * self._block_size
                behind = self._behind(end)
                if self._misses(admission, behind):
                    self._compute(admission, end, behind)
            self._rows.prepare(entry.plan)
            result = self._launch(plan)
            for name, at, position in self._chosen(plan):
                if not entry.landed or name in differences:
                    continue
                tokens += 1
                compared.add(name)
                recorded = entry.tokens[at], entry.logprobs[at]
                replayed = int(result.tokens[at]), float(result.logprobs[at])
                if recorded[0] != replayed[0]:
                    differences[name] = TokenDifference(
                        replica=self._recording.replica if self._recording.HasField("replica") else None,
                        request_id=name,
                        sequence=plan.sequence,
                        position=position,
                        recorded=recorded,
                        replayed=replayed,
                    )
            chosen = result.tokens[: plan.num_points].tolist()
            self._rows.finish(entry.plan, entry.tokens if entry.landed else chosen)
            for chunk in plan.chunks:
                self._note(chunk.row, chunk.start, chunk.start + chunk.length)
            progress("replaying", done, len(entries))
        return ReplayResult(
            iterations=len(entries),
            unanswered=sum(not entry.landed for entry in entries),
            tokens=tokens,
            requests=len(compared),
            differences=tuple(differences.values()),
        )

    def _launch(self, plan: IterationPlan) -> IterationResult:
        for admission in plan.admissions:
            self._hold(admission)
        packed = pack(plan, self._pipeline.shape.layout(plan.bucket), self._n_blocks)
        self._pipeline.launch(plan, packed)
        return self._pipeline.wait()[1]

    def _hold(self, admission: Admission, known: int | None = None) -> None:
        """Track the grammar state of a request from here on, if it has a grammar.

        Args:
          known: how many of its tokens count; None for all.
        """
        grammar, name = admission.sampling.grammar, admission.request_id
        if grammar is None or name in self._held_to:
            return
        assert self._grammars is not None  # otherwise the request was refused
        generated = admission.tokens[admission.prompt_length : known]
        self._pipeline.add_grammar(name, admission.sampling, self._grammars.compile(grammar), generated)
        self._held_to.add(name)

    def _chosen(self, plan: IterationPlan) -> Iterator[tuple[str, int, int]]:
        """(request, entry of the result, position) of every token that a plan samples.

        With drafts it is only the first, because it decides which of the others count.
        """
        at = 0
        for chunk in plan.chunks:
            if chunk.samples:
                name = self._rows.rows[chunk.row].admission.request_id
                yield name, at, chunk.start + chunk.length - chunk.samples + 1
            at += max(chunk.samples, 1)

    def _behind(self, start: int) -> int:
        """Leading blocks of a row that no position from `start` on attends to."""
        return 0 if self._window is None else blocks_behind(start, self._window, self._block_size)

    def _misses(self, admission: Admission, behind: int) -> bool:
        """Whether the prefix that a request reuses is still uncomputed, after `behind` blocks."""
        size = self._block_size
        return any(
            self._held.get(block) != hash(admission.tokens[: (column + 1) * size])
            for column, block in enumerate(admission.blocks[behind:], start=behind)
        )

    def _compute(self, admission: Admission, end: int, behind: int) -> None:
        """Computes a row's first keys and values into its blocks, after `behind` spare ones."""
        buckets = self._pipeline.stages[0].buckets
        spare = range(self._recording.n_blocks, self._recording.n_blocks + behind)
        admission = dataclasses.replace(admission, blocks=(*spare, *admission.blocks[behind:]))
        for start in range(0, end, buckets[-1]):
            length = min(buckets[-1], end - start)
            plan = IterationPlan(
                sequence=0,
                bucket=next(bucket for bucket in buckets if bucket >= length),
                admissions=(admission,),
                chunks=(Chunk(admission.row, start, length, 0),),
                table_changes=(),
                sampler=None,
                scoring=False,
            )
            self._launch(plan)
        for column, block in enumerate(admission.blocks[: end // self._block_size]):
            self._held[block] = hash(admission.tokens[: (column + 1) * self._block_size])

    def _note(self, row: int, start: int, end: int) -> None:
        """Record what the blocks of a row hold, once these positions are computed."""
        record, size = self._rows.rows[row], self._block_size
        for column in range(start // size, -(-end // size)):
            full = (column + 1) * size <= end
            key = hash(tuple(record.tokens[: (column + 1) * size])) if full else None
            if key is None:
                self._held.pop(record.table[column], None)
            else:
                self._held[record.table[column]] = key
