"""Times tile sizes of the TPU kernels on this TPU and prints the table `cuts.TABLE`.

python -m benchmarks.device.tpu_tune [--heads 7 --kv-heads 7 --head-dim 128 --pool bfloat16]
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.api import AttentionBatch, AttentionShape
from pallas_kernels.tpu import BACKEND, TpuBackend, cuts
from pallas_kernels.tpu.cuts import Cut

# heads, KV heads, head_dim, pool: those of the served models, whole and split over devices.
SHAPES = [
    (heads, heads, dim, pool)
    for heads, dim in ((7, 128), (14, 128), (32, 128), (16, 64), (32, 80), (16, 96), (16, 256))
    for pool in ("bfloat16", "int8")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningLoad:
    """An iteration to time: rows that decode at some context, and prompts that begin.

    Attributes:
      weight: weight of its seconds in the sum to be minimised.
    """

    decodes: int
    context: int
    prompts: int
    length: int
    weight: float


# Which sizes a load measures: those of decodes, or those of prompts.
DECODING = (
    TuningLoad(decodes=64, context=128, prompts=0, length=0, weight=1.0),
    TuningLoad(decodes=16, context=2048, prompts=0, length=0, weight=1.0),
)
PROMPTING = (
    TuningLoad(decodes=0, context=0, prompts=1, length=1024, weight=1.0),
    TuningLoad(decodes=0, context=0, prompts=8, length=120, weight=0.5),
)

Timer = Callable[[AttentionShape, Cut, TuningLoad], float]


def candidates(shape: AttentionShape) -> Iterator[Cut]:
    """The cuts to time; some may need more memory than the device has, and do not compile."""
    sizes = itertools.product((1, 2, 4, 8), (64, 128, 256, 512), (64, 128, 256, 512, 1024), (128, 256, 512, 1024, 2048))
    rule = cuts.by_rule(shape)
    seen: set[Cut] = set()
    for units, slots, tile, tile_slots in sizes:
        one = rule._replace(units=units, unit_slots=slots, tile=tile, tile_slots=tile_slots)
        one = cuts.fitted(one, shape, tile)
        if one not in seen and 2 * one.units * one.unit_slots * cuts.slot_bytes(shape) <= 2 * cuts.buffer_bytes(shape):
            seen.add(one)
            yield one


def best(shape: AttentionShape, timer: Timer) -> Cut:
    """The cut of a shape with the least weighted seconds.

    The sizes for decodes and for prompts are independent, so they are chosen one after the other. Cuts for which the
    timer raises RuntimeError (they do not compile) are left out. Raises ValueError if none is left.
    """
    found = cuts.cut(shape, 2**20)
    for loads, names in ((DECODING, ("units", "unit_slots")), (PROMPTING, ("tile", "tile_slots"))):
        varied = {tuple(getattr(cut, name) for name in names) for cut in candidates(shape)}
        ways = [found._replace(**dict(zip(names, values, strict=True))) for values in sorted(varied)]
        ways = [cuts.fitted(way, shape, 2**20) for way in ways]
        timed = list(_timed(shape, ways, loads, timer))
        if not timed:
            raise ValueError(f"no cut of {shape} compiles")
        found = min(timed)[1]
    return found


def _timed(
    shape: AttentionShape, ways: Iterable[Cut], loads: Sequence[TuningLoad], timer: Timer
) -> Iterator[tuple[float, Cut]]:
    for cut in ways:
        try:
            yield sum(load.weight * timer(shape, cut, load) for load in loads), cut
        except RuntimeError:
            continue


def seconds(shape: AttentionShape, cut: Cut, load: TuningLoad, backend: TpuBackend = BACKEND) -> float:
    """Seconds of an iteration's attention on the default device: the least of five runs of ten."""
    backend, (batch, n_blocks) = replace(backend, cut=cut), _batch(shape, load)
    n_tokens = len(batch.positions)
    key = jax.random.key(0)
    q, k, v = (
        jax.random.normal(key, (n_tokens, heads, shape.head_dim), shape.dtype)
        for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    )
    pool = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), backend.pool(shape, n_blocks))
    slopes = jnp.ones(shape.num_heads) if shape.alibi else None

    @partial(jax.jit, donate_argnums=0)
    def turns(pool):
        meta = backend.prepare(batch, shape)

        def turn(_, carry):
            out, pool = carry
            return backend.attend(out, k, v, pool, meta, shape, slopes=slopes, scale=1.0)

        return jax.lax.fori_loop(0, 10, turn, (q, pool))

    taken = []
    for _ in range(6):  # the first one compiles
        started = time.perf_counter()
        out, pool = jax.block_until_ready(turns(pool))
        del out
        taken.append((time.perf_counter() - started) / 10)
    return min(taken[1:])


def _batch(shape: AttentionShape, load: TuningLoad) -> tuple[AttentionBatch, int]:
    lengths = np.array([1] * load.decodes + [load.length] * load.prompts, np.int32)
    kv_lens = np.array([load.context] * load.decodes + [load.length] * load.prompts, np.int32)
    columns = -(-kv_lens // shape.block_size)
    firsts = np.cumsum(columns) - columns
    tables = firsts[:, None] + np.minimum(np.arange(shape.max_blocks), columns[:, None] - 1)
    starts = np.repeat(kv_lens - lengths - (np.cumsum(lengths) - lengths), lengths)
    arrays = (
        np.concatenate([[0], np.cumsum(lengths)]),
        kv_lens,
        tables,
        np.repeat(np.arange(len(lengths)), lengths),
        np.arange(lengths.sum()) + starts,
    )
    return AttentionBatch(*(jnp.asarray(array, jnp.int32) for array in arrays)), int(columns.sum())


def shape_of(heads: int, kv_heads: int, head_dim: int, pool: str, device_kind: str) -> AttentionShape:
    shape = AttentionShape(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=jnp.dtype(jnp.bfloat16),
        pool_dtype=jnp.dtype(pool),
        alibi=True,
        device_kind=device_kind,
    )
    return shape.with_blocks(BACKEND.default_block_size(shape), 2048)


def main(arguments: Sequence[str] | None = None, timer: Timer = seconds) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device.tpu_tune", description=__doc__)
    parser.add_argument("--heads", type=int, help="query heads on a device; all shapes of the table if not given")
    parser.add_argument("--kv-heads", type=int, help="KV heads; as many as query heads if not given")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--pool", default="bfloat16")
    asked = parser.parse_args(arguments)
    device = jax.devices()[0]
    if timer is seconds and device.platform != "tpu":
        parser.error(f"there is no TPU here to time on; the first device is {device.device_kind}")
    shapes = SHAPES
    if asked.heads is not None:
        shapes = [(asked.heads, asked.kv_heads or asked.heads, asked.head_dim, asked.pool)]
    for each in shapes:
        shape = shape_of(*each, device.device_kind)
        print(f"    {cuts.entry(shape, best(shape, timer))}", flush=True)


if __name__ == "__main__":
    main()
