"""A second, smaller model that drafts tokens for speculative decoding.

It has its own weights and pool, and uses the block tables of the target model. It runs only when drafts are wanted.
Then a row is written to it whole (tokens, block table, sampling parameters), and it first computes the tokens that it
lacks. So it does not follow admissions, prefix hits and preemptions of the target model. It samples with the same
random numbers as the target model, so that similar distributions give the same token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxserve import models, weights
from jaxserve.config import ENGINE_PARAMS, EngineConfig
from jaxserve.iteration import Chunk, IterationPlan, SamplerVariant
from jaxserve.runner.batch import pack, pack_admission
from jaxserve.runner.layout import bucket_sizes, lay_out
from jaxserve.runner.lowering import StagePrograms
from jaxserve.runner.program_cache import ProgramCache
from jaxserve.runner.sharded_parameters import placement
from jaxserve.runner.stage import Launched, Progress, StageRunner
from jaxserve.scheduler.buckets import BucketLadder
from jaxserve.scheduler.speculation import DraftRequest
from sharding import specs


class DraftModel:
    """Compiled programs, weights and pool of the draft model (see `speculation.Drafter`)."""

    def __init__(self, runner: StageRunner, ladder: BucketLadder, n_blocks: int) -> None:
        """Args:
        runner: the draft model's only stage, with as many blocks as the target model.
        ladder: the draft model's buckets, as measured.
        """
        self._runner = runner
        self._ladder = ladder
        self._n_blocks = n_blocks

    def cost_ms(self, rows: int) -> float:
        """Milliseconds to draft one token for each of `rows` rows."""
        return self._ladder.costs_ms[self._index(rows)]

    def draft(self, wanted: Sequence[DraftRequest]) -> list[list[int]]:
        """Draft tokens for rows; returns those of each row.

        Blocks until they are known. No iteration with these rows may be in flight.
        """
        layout = self._runner.programs.shape.layout(1)
        self._runner.admit(pack_admission(each.admission, layout) for each in wanted)
        variant = max(each.variant for each in wanted)
        computed = [each.computed for each in wanted]
        known = [len(each.admission.tokens) for each in wanted]
        launched: list[Launched] = []
        places: list[list[tuple[int, int]]] = [[] for _ in wanted]  # launch and entry of each drafted token
        while True:
            left, chunks = self._ladder.largest, []
            for index, each in enumerate(wanted):
                drafted = len(places[index])
                if drafted == each.length:
                    continue
                length = min(known[index] + drafted - computed[index], left)
                if length:
                    end = computed[index] + length
                    samples = int(end == known[index] + drafted)
                    chunks.append((Chunk(each.admission.row, computed[index], length, samples), index))
                    computed[index] = end
                    left -= length
            if not chunks:
                break
            chunks.sort(key=lambda pair: pair[0].length > 1)
            for entry, (chunk, index) in enumerate(chunks):
                if chunk.samples:
                    places[index].append((len(launched), entry))
            launched.append(self._launch([chunk for chunk, _ in chunks], variant))
        chosen = [[] if each.chosen is None else np.asarray(each.chosen)[0].tolist() for each in launched]
        return [[chosen[launch][entry] for launch, entry in each] for each in places]

    def _launch(self, chunks: list[Chunk], variant: SamplerVariant) -> Launched:
        tokens = sum(chunk.length for chunk in chunks)
        plan = IterationPlan(
            sequence=0,
            bucket=self._ladder.sizes[self._index(tokens)],
            admissions=(),
            chunks=tuple(chunks),
            table_changes=(),
            sampler=variant if any(chunk.samples for chunk in chunks) else None,
            scoring=False,
        )
        packed = pack(plan, self._runner.programs.shape.layout(plan.bucket), self._n_blocks)
        return self._runner.sample(plan, self._runner.forward(plan, packed.iteration, None))

    def _index(self, tokens: int) -> int:
        sizes = self._ladder.sizes
        return next((index for index, size in enumerate(sizes) if size >= tokens), len(sizes) - 1)


def check_draft_model(path: str, programs: StagePrograms) -> None:
    """Raises ValueError if the model there has another vocabulary or fewer positions."""
    theirs, ours = weights.read_config(path), programs.model.config
    if theirs.vocab_size != ours.vocab_size:
        raise ValueError(
            f"the model in {path} has a vocabulary of {theirs.vocab_size}; to draft for this one it must be "
            f"{ours.vocab_size}"
        )
    if (limit := theirs.max_position) is not None and limit < programs.shape.max_context:
        raise ValueError(
            f"the model in {path} has positions for {limit} tokens; to draft here max_context must be that"
        )


def draft_runner(
    config: EngineConfig, programs: StagePrograms, cache: ProgramCache | None, progress: Progress
) -> StageRunner:
    """The drafting model on the device of its target, in blocks of the same size."""
    path = config.draft_model
    assert path is not None
    shape, dtype = programs.shape, programs.shape.attention.dtype
    model = models.build(weights.read_config(path))
    own = dataclasses.replace(
        config,
        speculate=None,
        speculate_tokens=ENGINE_PARAMS["speculate_tokens"].default,
        scoring=False,
        sharding=None,
        layers_per_stage=None,
        block_size=shape.attention.block_size,
        max_context=shape.max_context,
    )
    spec, platform = specs.default(model.config.family), programs.mesh.devices.flat[0].platform
    (own_programs,), _ = lay_out(own, model, [programs.mesh], spec, dtype=dtype, platform=platform)
    own_shape = dataclasses.replace(own_programs.shape, groups=shape.groups)  # it reads the same block tables
    own_programs = dataclasses.replace(own_programs, shape=own_shape)
    params = weights.load(
        path,
        own_programs.model,
        dtype,
        place=placement([own_programs]),
        quantize=own_programs.quantize,
        progress=progress,
    )
    return StageRunner(own_programs, params, bucket_sizes(config), cache)
