from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from benchmarks.device import tpu_tune
from pallas_kernels.tpu import cuts
from pallas_kernels.tpu.cuts import Cut
from pallas_kernels.tpu.decode_steps import DecodeSteps


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


def test_known_devices_are_cut_as_measured(monkeypatch):
    measured = Cut(units=2, unit_slots=256, tile=512, tile_slots=512, part_rows=256, part_slots=512, joint_parts=2)
    monkeypatch.setattr(cuts, "MEASURED", {cuts.key(shape()): measured})
    assert cuts.cut(shape(), 4096) == measured
    assert cuts.cut(shape(), 100).tile == 112


UNITS = [
    ("TPU v4", 1, (4, 512)),
    ("TPU v4", 7, (2, 512)),
    ("TPU v4", 8, (3, 256)),
    ("TPU v4", 16, (3, 128)),
    ("TPU v4", 32, (1, 128)),
    ("TPU v6 lite", 8, (4, 512)),
    ("TPU v6 lite", 32, (2, 256)),
]


@pytest.mark.parametrize(("device", "heads", "units"), UNITS)
def test_units_of_decodes_are_large_where_no_less_is_copied(device, heads, units):
    assert cuts.cut(shape(heads, "bfloat16", device), 16)[:2] == units


def test_decodes_ask_for_the_memory_of_their_buffers():
    one = shape(8, "bfloat16", "TPU v6 lite")
    assert cuts.memory_of_decodes(4, 512, one) == (16 + 9) * 2**20
    assert cuts.memory_of_decodes(1, 128, one) == 16 * 2**20  # what a kernel gets without asking


@pytest.mark.parametrize(("pool", "slots"), [("float32", 48), ("bfloat16", 48), ("int8", 64)])
def test_of_a_rows_last_block_what_is_used_is_copied(pool, slots):
    one = shape(7, pool).with_blocks(128, 2048)
    bare = dict.fromkeys(DecodeSteps._fields)
    steps = DecodeSteps(**bare | {"shape": one, "kv_lens": np.array([300])})
    assert [int(steps.used(0, column)) for column in range(3)] == [128, 128, slots]
    assert steps._replace(shape=dataclasses.replace(one, slot_parts=2)).used(0, 2) == 64
