"""Devices and sets of them by name."""

import pytest

from sharding import devices

GB = 10**9


@pytest.mark.parametrize(
    ("text", "shape", "count"),
    [
        ("v5p:2x2x4", (2, 2, 4), 16),
        ("v5e:4x8", (4, 8), 32),
        ("tpu7x:2x2x1", (2, 2, 1), 8),  # two devices a chip
        ("a100-80g:2x8", (2, 8), 16),
        ("H200:8", (1, 8), 8),
    ],
)
def test_a_topology_is_read(text, shape, count):
    topology = devices.parse(text)
    assert topology.shape == shape
    assert topology.num_devices == count


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v5q:2x2x4", r"topology 'v5q:2x2x4': device 'v5q' is not known; did you mean v5"),
        ("potato", r"device 'potato' is not known; there are v4, v5e, v5p, v6e, tpu7x, a100-40g"),
        ("v5p", r"topology 'v5p': write v5p:2x2x4"),
        ("v5p:2xx4", r"write v5p:2x2x4"),
        ("v5p:2x0x4", r"write v5p:2x2x4"),
        ("v5e:2x2x4", r"v5e comes in chips along 2 axes, such as v5e:2x2"),
        ("h200:1x2x4", r"h200 comes in machines x GPUs, such as h200:2x8 or 8"),
    ],
)
def test_a_topology_that_there_is_not_is_refused_in_words(text, message):
    with pytest.raises(ValueError, match=message):
        devices.parse(text)


@pytest.mark.parametrize("device", devices.DEVICES.values(), ids=devices.DEVICES.keys())
def test_every_device_can_be_reckoned_with(device):
    assert device.flops["int8"] >= device.flops["bfloat16"] > device.flops["float32"] > 1e12
    assert 15 * 2**30 < device.memory < 200 * 2**30
    assert device.bandwidth > device.link > device.network >= 0


def test_groups_are_as_fast_as_the_links_that_they_span():
    machines = devices.parse("a100-40g:2x8")
    assert machines.group_bandwidth(range(8)) == 300 * GB  # NVLink
    assert machines.group_bandwidth(range(16)) == 200 * GB  # eight network cards a machine
    assert machines.hop_bandwidth(4) == 300 * GB
    assert machines.hop_bandwidth(8) == 25 * GB
    torus = devices.parse("v5p:2x4x4")
    assert torus.group_bandwidth(range(2)) == 100 * GB  # one link
    assert torus.group_bandwidth(range(8)) == 300 * GB  # one along 2, two around the ring of 4
    assert torus.group_bandwidth(range(32)) == 500 * GB
    assert torus.group_bandwidth(range(0, 32, 8)) == 200 * GB  # around the other ring
    assert torus.ring_bandwidth(range(32)) == 200 * GB  # one link each way
    assert torus.ring_bandwidth(range(2)) == 100 * GB
    assert machines.ring_bandwidth(range(8)) == 300 * GB
    assert machines.group_bandwidth(range(0, 16, 8)) == 25 * GB  # a card of each machine
    halves = devices.parse("tpu7x:2x2x1")
    assert halves.group_bandwidth(range(2)) == 600 * GB  # within a chip
    assert halves.group_bandwidth(range(4)) == 50 * GB  # half of a chip's link


@pytest.mark.parametrize(
    ("kind", "topology"),
    [
        ("NVIDIA H200", "h200:8"),
        ("NVIDIA H100 80GB HBM3", "h100:8"),
        ("NVIDIA A100-SXM4-40GB", "a100-40g:8"),
        ("TPU v5 lite", "v5e:8x1"),
        ("TPU v5p", "v5p:8x1x1"),
        ("TPU v6 lite", "v6e:8x1"),
        ("TPU7x", "tpu7x:4x1x1"),
        ("cpu", None),
        ("NVIDIA L4", None),
    ],
)
def test_devices_are_found_by_the_name_that_jax_has_for_them(kind, topology):
    found = devices.of_kind(kind, 8)
    assert found == (None if topology is None else devices.parse(topology))
    assert found is None or found.num_devices == 8
