"""What callers see when a node or the driver dies; other parts are in test_deployment.py and test_group.py."""

import pytest

from tests.ray.failures import STREAMS, measure

pytestmark = pytest.mark.scale


@pytest.mark.parametrize("case", ["driver", "node"])
def test_the_rest_serves_on(case: str) -> None:
    it = measure(case)
    assert sum(it.streams.values()) == STREAMS
    assert it.streams["silent"] == 0
    if case == "driver":
        assert it.streams["whole"] == STREAMS
        assert it.lost == 0
