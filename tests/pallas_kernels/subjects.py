"""The backends that the conformance suite runs, and how much of it each takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import api
from pallas_kernels.api import Backend
from pallas_kernels.cpu import build
from pallas_kernels.gpu import GpuBackend
from pallas_kernels.tpu import TpuBackend
from pallas_kernels.tpu.cuts import Cut


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A backend as it can be run here.

    Attributes:
      make: an instance, in its interpreter where there is no device.
      block_sizes: legal ones; the first serves wherever the size is not the question.
      slow: whether it takes `thinned` cases and shorter contexts, as interpreters do.
    """

    make: Callable[[], Backend]
    block_sizes: tuple[int, ...]
    slow: bool = False


def _native() -> Backend:
    if (refusal := build.refusal()) is not None:
        pytest.skip(f"no native attention: {refusal}")
    return api.load("cpu")


_ON_GPU = jax.default_backend() == "gpu"

SUBJECTS = {
    "xla": Subject(make=lambda: api.load("xla"), block_sizes=(8, 1, 2, 16, 32, 64)),
    "cpu": Subject(make=_native, block_sizes=(8, 1, 2, 16, 32, 64)),
    "gpu": Subject(make=lambda: GpuBackend(interpret=not _ON_GPU), block_sizes=(16, 1, 64), slow=not _ON_GPU),
    "tpu": Subject(
        make=lambda: TpuBackend(cut=Cut(2, 64, 64, 64, 32, 32, 2), interpret=pltpu.InterpretParams()),
        block_sizes=(32, 64),
        slow=True,
    ),
}


@cache
def backend(name: str) -> Backend:
    """One instance for all tests, so that its programs are traced once."""
    return SUBJECTS[name].make()


def thinned(cases: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The first cases in which every value of every parameter occurs."""
    seen: set[tuple[int, Any]] = set()
    kept = []
    for case in cases:
        values = set(enumerate(case))
        if not values <= seen:
            kept.append(case)
            seen |= values
    return kept


def over_subjects(
    names: str = "", cases: Sequence[tuple[Any, ...]] = ((),), *, interpreted: int = 0
) -> pytest.MarkDecorator:
    """Parametrizes a test over `subject` and, for each, over the cases: tuples of values for `names`, which
    spaces part.

    Args:
      interpreted: cases that a slow subject takes by default; its others are in the group `interpret`.
    """
    parameters = []
    for subject, how in SUBJECTS.items():
        kept = thinned(cases) if how.slow and names else cases
        for index, case in enumerate(kept):
            marks = pytest.mark.interpret if how.slow and index >= interpreted else ()
            parameters.append(pytest.param(subject, *case, marks=marks))
    return pytest.mark.parametrize(("subject", *names.split()), parameters)
