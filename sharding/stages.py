"""Splits the layers of a model over pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise


def split(num_layers: int, stages: int = 1, layers_per_stage: Sequence[int] | None = None) -> tuple[range, ...]:
    """The layers of each stage, in order.

    Args:
      layers_per_stage: layers of each stage; None splits as evenly as possible, with the remainder in the first
        stages, because the last one has the head.

    Raises:
      ValueError: a stage would have no layer, or the counts do not add up.
    """
    if layers_per_stage is None:
        if not 1 <= stages <= num_layers:
            raise ValueError(
                f"stages is {stages}; it must be at least 1 and at most {num_layers}, the number of layers, so that "
                "each stage has one"
            )
        each, more = divmod(num_layers, stages)
        counts = [each + (stage < more) for stage in range(stages)]
    else:
        counts = list(layers_per_stage)
        listed = ",".join(map(str, counts))
        if len(counts) != stages:
            raise ValueError(f"layers_per_stage is {listed}, which is {len(counts)} stages; stages is {stages}")
        if min(counts) < 1:
            raise ValueError(f"layers_per_stage is {listed}; stage {counts.index(min(counts))} has no layer")
        if sum(counts) != num_layers:
            raise ValueError(f"layers_per_stage is {listed}, which is {sum(counts)} layers; the model has {num_layers}")
    return tuple(range(start, stop) for start, stop in pairwise(accumulate(counts, initial=0)))
