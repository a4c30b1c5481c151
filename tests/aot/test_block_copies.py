"""The programs that copy blocks in the pool and to host memory, compiled for accelerators that are not there."""

from __future__ import annotations

import importlib.util
import math

import jax
import pytest

from jaxserve.config import EngineConfig
from jaxserve.planning import hlo, model_catalog, targets
from jaxserve.planning.deployment import Deployment, programs
from jaxserve.runner import block_copies, compiler_options
from sharding import devices, specs

TOPOLOGIES = [
    pytest.param("tpu", "v5e:2x2", id="v5e"),
    pytest.param("tpu", "v6e:2x2", id="v6e"),
    pytest.param("gpu", "h200:4", id="h200"),
]
NEEDED = {"tpu": "libtpu", "gpu": "jax_cuda12_plugin"}
BLOCKS = 1031  # of the pool; a number that no other dimension has

pytestmark = pytest.mark.aot


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize(("platform", "topology"), TOPOLOGIES)
def test_blocks_are_copied_where_they_are(platform: str, topology: str, kv_cache_dtype: str) -> None:
    """No device reads another's part, and nothing as large as the pool is made."""
    if importlib.util.find_spec(NEEDED[platform]) is None:
        pytest.skip(f"{NEEDED[platform]} is not installed (make test-aot)")
    name, config = model_catalog.find("llama-3-8b")
    deployment = Deployment(
        name=name,
        config=config,
        topology=devices.parse(topology),
        engine=EngineConfig(tensor=4, kv_cache_dtype=kv_cache_dtype, buckets=(256,), max_rows=16, max_context=2048),
        spec=specs.default(config.family),
    )
    (stage,) = programs(deployment, targets.devices_of(deployment.topology))
    pool = sum(map(on_device, jax.tree.leaves(stage.pool(BLOCKS))))
    block = sum(map(on_device, jax.tree.leaves(stage.host_block(0, BLOCKS).data)))
    with targets.lowering(stage.mesh):
        lowered = stage.lower_store(0, BLOCKS), stage.lower_load(0, BLOCKS), stage.lower_copy(BLOCKS)
    store, load, copy = (each.compile(compiler_options.of(platform, absent=True)) for each in lowered)

    copies = block_copies.COUNT * block
    for program in (store, load, copy):
        memory = program.memory_analysis()
        # On GPUs the checksum's words are in memory: four bytes for each value, twice.
        assert memory.temp_size_in_bytes <= 8 * copies + 2**16 < pool
        # The sums of the devices' parts meet; nothing else does.
        found = hlo.collectives(program.as_text())
        assert all(each.kind == "all-reduce" and each.nbytes <= 1024 for each in found), found
    assert min(each.memory_analysis().alias_size_in_bytes for each in (load, copy)) >= pool
    assert store.memory_analysis().output_size_in_bytes == pytest.approx(copies, rel=0.01)


def on_device(leaf: jax.ShapeDtypeStruct) -> int:
    """Bytes of an array on one device."""
    assert leaf.sharding is not None
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
