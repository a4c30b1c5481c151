from __future__ import annotations

from dataclasses import replace

from benchmarks.device import tpu_tune
from pallas_kernels.tpu import costs

SHAPE = tpu_tune.shape_of(32, 8, 128, "bfloat16", "TPU v6 lite").with_blocks(128, 2048)
SLOT = 2 * 8 * 128 * 2  # bytes


def test_decodes_read_half_of_the_longest_context():
    cost = costs.of_decodes(SHAPE, 16, None)
    assert cost.flops == 4 * 16 * 32 * 128 * 1024
    assert cost.transcendentals == 16 * 32 * 1024
    assert cost.bytes_accessed == 16 * 1024 * SLOT + 2 * 16 * 32 * 128 * 4


def test_prompts_read_their_slots_once_a_tile():
    cost = costs.of_prompts(SHAPE, 512, 256, None)
    assert cost.flops == 4 * 512 * 32 * 128 * 1024
    assert cost.bytes_accessed == 2 * 1024 * SLOT + 2 * 512 * 32 * 128 * 4


def test_a_window_bounds_what_is_seen():
    assert costs.of_decodes(SHAPE, 16, 300).transcendentals == 16 * 32 * 300
    assert costs.of_decodes(SHAPE, 16, 3000) == costs.of_decodes(SHAPE, 16, None)


def test_devices_that_share_slots_share_the_work():
    shared = replace(SHAPE, slot_parts=2)
    assert 2 * costs.of_prompts(shared, 512, 256, None).flops == costs.of_prompts(SHAPE, 512, 256, None).flops
