from __future__ import annotations

import dataclasses

import pytest

from benchmarks.device import tpu_tune
from pallas_kernels.tpu import chips, cuts
from pallas_kernels.tpu.cuts import Cut
from pallas_kernels.tpu.decode_steps import DecodeSteps
from sharding import devices


def shape(heads=7, pool="bfloat16", device="TPU v9"):
    return tpu_tune.shape_of(heads, heads, 128, pool, device)


@pytest.mark.parametrize("heads", [1, 7, 32])
@pytest.mark.parametrize("pool", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(("device", "mib"), [("TPU v4", 7), ("TPU v6 lite", 16)])
def test_cuts_are_whole_blocks_and_fit(heads, pool, device, mib):
    for n_tokens in (1, 16, 300, 4096):
        cut = cuts.cut(shape(heads, pool, device), n_tokens)
        size = shape(heads, pool).block_size
        assert cut.unit_slots % size == 0
        assert cut.tile_slots % size == 0
        assert cut.tile % 16 == 0
        assert 2 * cut.units * cut.unit_slots * cuts.slot_bytes(shape(heads, pool)) <= mib * 2**20


def test_shapes_of_the_table_are_cut_by_it(monkeypatch):
    measured = Cut(units=2, unit_slots=256, tile=512, tile_slots=1024, part_rows=256, part_slots=512, joint_parts=2)
    monkeypatch.setattr(cuts, "TABLE", {cuts.key(shape()): measured})
    assert cuts.cut(shape(), 4096) == measured
    assert cuts.cut(shape(), 100).tile == 112


def test_the_table_holds_sizes_that_fit():
    for key, cut in cuts.TABLE.items():
        heads = key.lanes // key.head_dim
        kind = devices.kind_of(devices.DEVICES[key.chip])
        known = tpu_tune.shape_of(heads * key.group, heads, key.head_dim, key.pool_dtype, kind)
        assert cuts.key(known) == key
        assert cuts.fitted(cut, known, 4096) == cut != cuts.fitted(cuts.by_rule(known), known, 4096)
        assert 2 * cut.units * cut.unit_slots * cuts.slot_bytes(known) <= cuts.buffer_bytes(known)


NAMES = ["TPU v4", "TPU v5 lite", "TPU v5e", "TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e", "TPU7x"]


@pytest.mark.parametrize("kind", NAMES)
def test_every_name_of_a_device_is_a_chip(kind):
    topology = devices.of_kind(kind, 1)
    assert topology is not None
    assert chips.of_kind(kind).name == topology.device.name


UNITS = [
    ("TPU v4", 1, (8, 256)),
    ("TPU v4", 7, (4, 256)),
    ("TPU v4", 8, (3, 256)),
    ("TPU v4", 16, (3, 128)),
    ("TPU v4", 32, (1, 128)),
    ("TPU v6 lite", 8, (4, 256)),
    ("TPU v6 lite", 32, (1, 256)),
]


@pytest.mark.parametrize(("device", "heads", "units"), UNITS)
def test_units_of_decodes_are_small_and_enough_to_copy(device, heads, units):
    assert cuts.cut(shape(heads, "bfloat16", device), 16)[:2] == units


def test_decodes_ask_for_the_memory_of_their_buffers():
    one = shape(8, "bfloat16", "TPU v6 lite")
    assert cuts.memory_of_decodes(4, 512, one) == (16 + 9) * 2**20
    assert cuts.memory_of_decodes(1, 128, one) == 16 * 2**20  # what a kernel gets without asking


@pytest.mark.parametrize(("pool", "slots"), [("float32", 48), ("bfloat16", 48), ("int8", 64)])
def test_of_a_rows_last_block_what_is_used_is_copied(pool, slots):
    one = shape(7, pool).with_blocks(128, 2048)
    bare = dict.fromkeys(DecodeSteps._fields)
    steps = DecodeSteps(**bare | {"shape": one})
    assert [int(steps.used(300 - first, 1)) for first in (0, 128, 256)] == [128, 128, slots]
    assert [int(steps.used(300, blocks)) for blocks in (1, 2, 4)] == [128, 256, 256 + slots]
    steps = steps._replace(shape=dataclasses.replace(one, slot_parts=2))
    assert [int(steps.used(300, blocks)) for blocks in (1, 2, 4)] == [64, 128, 192]
