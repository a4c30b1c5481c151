"""A second, smaller model that drafts: its own weights and keys, in the blocks and by the random numbers of the first.

It runs only when drafts are wanted. A row is then written to it whole (tokens, block table, sampling parameters), and
what it has not computed of the row's tokens comes first, so it needs to follow neither admissions nor prefix hits nor
preemptions of the model it drafts for. Its tokens are chosen with the very random numbers that will choose that
model's, so that two alike distributions give the same token also where it is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxserve.iteration import Chunk, IterationPlan, SamplerVariant
from jaxserve.runner.batch import pack, pack_admission
from jaxserve.runner.stage import Launched, StageRunner
from jaxserve.scheduler.buckets import BucketLadder
from jaxserve.scheduler.speculation import DraftRequest


class DraftModel:
    """Compiled programs, weights and pool of the model that drafts (see `speculation.Drafter`)."""

    def __init__(self, runner: StageRunner, ladder: BucketLadder, n_blocks: int) -> None:
        """Args:
        runner: of the whole model, with blocks as those of the model it drafts for.
        ladder: its buckets, as measured.
        """
        self._runner = runner
        self._ladder = ladder
        self._n_blocks = n_blocks

    def cost_ms(self, rows: int) -> float:
        """Milliseconds to draft one token for each of so many rows."""
        return self._ladder.costs_ms[self._index(rows)]

    def draft(self, wanted: Sequence[DraftRequest]) -> list[list[int]]:
        """The drafted tokens of each row.

        Blocks until they are known; no iteration may be in flight that has them.
        """
        layout = self._runner.programs.shape.layout(1)
        self._runner.admit(pack_admission(each.admission, layout) for each in wanted)
        variant = max(each.variant for each in wanted)
        computed = [each.computed for each in wanted]
        known = [len(each.admission.tokens) for each in wanted]
        launched: list[Launched] = []
        places: list[list[tuple[int, int]]] = [[] for _ in wanted]  # of each row's drafts: launch and entry
        while True:
            room, chunks = self._ladder.largest, []
            for index, each in enumerate(wanted):
                drafted = len(places[index])
                if drafted == each.length:
                    continue
                length = min(known[index] + drafted - computed[index], room)
                if length:
                    end = computed[index] + length
                    samples = int(end == known[index] + drafted)
                    chunks.append((Chunk(each.admission.row, computed[index], length, samples), index))
                    computed[index] = end
                    room -= length
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
        return self._runner.sample(plan, self._runner.forward(plan.bucket, packed.iteration, None))

    def _index(self, tokens: int) -> int:
        sizes = self._ladder.sizes
        return next((index for index, size in enumerate(sizes) if size >= tokens), len(sizes) - 1)
