"""The cost model: no jax, and close to what was published."""

import subprocess
import sys

import pytest

from jaxserve.plan import cost
from jaxserve.plan.predict import predict
from sharding import devices
from tests.jaxserve.plan.questions import GPT2, question

ORCA_101B = cost.ModelSizes(
    num_layers=80, hidden_size=10240, num_heads=80, num_kv_heads=80, head_dim=128, ffn_size=40960, vocab_size=51200
)


def test_work_counts_what_chunks_read():
    assert cost.work([(100, 1), (0, 3), (10, 2)]) == cost.Work(6, 3, 101 + 3 + 12, 101 + 6 + 11 + 12)
    assert cost.work([(7, 1)], bucket=16).tokens == 16


# OSDI'22: total ms of 32 tokens after prompts of 128, by batch; read off a figure.
@pytest.mark.parametrize(
    ("batch", "milliseconds"), [(1, 1050), (2, 1130), (4, 1210), (8, 1320), (16, 1500), (32, 1950)]
)
def test_orcas_microbenchmark_is_met_within_4_percent(batch, milliseconds):
    (load,) = cost.loads(ORCA_101B, 8, [80])
    topology = devices.parse("a100-40g:8")
    iterations = [[(0, 128)] * batch, *([(128 + step, 1)] * batch for step in range(31))]
    seconds = sum(cost.stage_seconds(load, topology, cost.work(chunks)).total for chunks in iterations)
    assert 1e3 * seconds == pytest.approx(milliseconds, rel=0.04)


@pytest.mark.parametrize(("tensor", "stages"), [(1, 1), (4, 1), (2, 2)])
def test_the_default_loads_are_those_of_the_default_specs(tensor, stages):
    deployment = question(GPT2, tensor=tensor, stages=stages, dtype="bfloat16")
    sizes = cost.ModelSizes(
        num_layers=2, hidden_size=128, num_heads=8, num_kv_heads=8, head_dim=16, ffn_size=512, vocab_size=1024
    )
    for load, stage in zip(cost.loads(sizes, tensor, [2 // stages] * stages), predict(deployment).stages, strict=True):
        exact = stage.load
        for name in ("layers", "token_ops", "row_ops", "slot_ops", "slot_bytes", "hop_bytes", "tensor"):
            assert getattr(load, name) == getattr(exact, name), name
        assert load.weight_bytes == pytest.approx(exact.weight_bytes, rel=0.02)  # norms and biases
        assert load.collectives == exact.collectives


def test_the_time_of_a_stage_is_split():
    (load,) = cost.loads(ORCA_101B, 8, [80])
    topology = devices.parse("a100-40g:8")
    one, full = (cost.stage_seconds(load, topology, cost.work(chunks)) for chunks in ([(512, 1)], [(0, 4096)]))
    assert one.bottleneck == "memory"
    assert full.bottleneck == "compute"
    assert full.total == pytest.approx(sum(full))
    assert full.overhead == one.overhead == pytest.approx(80 * 55e-6)
    assert full.links == pytest.approx(4096 * one.links, rel=0.05)  # the logits are gathered by row


def test_no_jax_is_needed():
    program = "import sys, jaxserve.plan.cost; print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "False"
