"""What tests of the engine share: the weights of its smallest model."""

from typing import Any

import pytest


@pytest.fixture(scope="module")
def params() -> Any:
    """Random weights of `tiny.BLOOM`."""
    from tests.fixtures.tiny import opinionated  # which most tests below do without

    return opinionated(0)
