"""A pipeline stage whose devices all belong to other hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxserve.iteration import IterationPlan
from jaxserve.models import Params
from jaxserve.runner.lowering import StagePrograms
from jaxserve.runner.programs import Forward
from jaxserve.runner.stage import Launched, Progress

_ELSEWHERE: Any = None


class RemoteStage:
    """Stands for a stage that other hosts run, and does nothing itself (see `pipeline.Stage`)."""

    def __init__(self, programs: StagePrograms, buckets: Sequence[int]) -> None:
        self.programs = programs
        self.params: Any = programs.params()  # shapes only
        self.pool: Any = None
        self.buckets = tuple(buckets)
        self.compile_seconds = dict.fromkeys(self.buckets, 0.0)
        self.num_programs = 0

    def compile(self, n_blocks: int, progress: Progress) -> None:
        """Record the shape of the pool that the other hosts allocate."""
        self.pool = self.programs.pool(n_blocks)

    def admit(self, admissions: Sequence[np.ndarray]) -> None:
        pass

    def draft(self, drafts: np.ndarray) -> None:
        pass

    def copy(self, copies: np.ndarray) -> None:
        pass

    def forward(self, plan: IterationPlan, packed: np.ndarray, x: jax.Array | None) -> Forward:
        return Forward(*[_ELSEWHERE] * 6)

    def sample(self, plan: IterationPlan, out: Forward, allowed: np.ndarray | None = None) -> Launched:
        return Launched()

    def feed_back_tokens(self, points: jax.Array | None, chosen: jax.Array | None) -> None:
        pass

    def replace_params(self, params: Params) -> None:
        raise AssertionError("the engine refuses to replace weights that several hosts share")
