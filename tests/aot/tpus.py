"""What tests that compile for TPUs share: the mark that they need, and a topology of each generation."""

from __future__ import annotations

import importlib.util
import math

import jax
import pytest

from jaxserve.planning import hlo

MARKS = [
    pytest.mark.aot,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason=f"libtpu is not installed; pip install 'jax[tpu]=={jax.__version__}' brings it (make test-aot does)",
    ),
]

# Instructions that make no array.
_REFERENCES = {"parameter", "bitcast", "tuple", "get-tuple-element"}
_FETCHES = ("-start(", "-done(", "ConcatBitcast")

GENERATIONS = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}


def large_arrays(text: str, least: int) -> list[tuple[str, str]]:
    """The instructions of a program that make arrays of so many elements, and those.

    Fetches of arguments ahead are left out.
    """
    return [
        (op, array)
        for op, arrays, line in hlo.instructions(text)
        if not any(word in line for word in _FETCHES)
        for array, _ in arrays
        if op not in _REFERENCES and math.prod(hlo.sizes_of(array)) >= least
    ]
