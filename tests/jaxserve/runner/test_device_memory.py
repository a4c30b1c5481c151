"""How much of a device keys and values may take."""

from types import SimpleNamespace

import pytest

from jaxserve.runner import kv_cache

GIB = 2**30


@pytest.mark.parametrize(
    ("platform", "gib"),
    [("tpu", 0.92 * 100 - 30), ("gpu", 0.99 * 100 - 30)],  # of a GPU jax reports what it has set aside, not the whole
)
def test_free_bytes_leave_the_runtime_its_part(platform, gib) -> None:
    stats = {"bytes_limit": 100 * GIB, "bytes_in_use": 30 * GIB}
    device = SimpleNamespace(platform=platform, memory_stats=lambda: stats)
    assert kv_cache.free_bytes(device) == pytest.approx(gib * GIB, abs=2)


def test_weights_share_the_memory_of_a_cpu() -> None:
    device = SimpleNamespace(platform="cpu")
    four, one = kv_cache.free_weight_bytes(device, 4), kv_cache.free_weight_bytes(device, 1)
    assert 0.9 < 4 * four / one < 1.1
