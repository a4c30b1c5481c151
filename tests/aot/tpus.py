"""What tests that compile for TPUs share: the mark that they need, and a topology of each generation."""

from __future__ import annotations

import importlib.util

import jax
import pytest

MARKS = [
    pytest.mark.aot,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason=f"libtpu is not installed; pip install 'jax[tpu]=={jax.__version__}' brings it (make test-aot does)",
    ),
]

GENERATIONS = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
