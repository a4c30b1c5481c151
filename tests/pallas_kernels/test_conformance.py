"""Every backend against the float64 oracle, on fresh random inputs over a pool of NaN."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_kernels import api

BACKENDS = [name for name in api.backend_names() if "cpu" in (api.load(name).platforms or {"cpu"})]
# Outputs are averages of values of order one: the bound is that of their rounding and of the scores' (float32), or
# of one rounding to bfloat16 at the end.
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


HEADS = [(1, 1, 8), (2, 2, 16), (7, 7, 32), (4, 4, 64), (14, 14, 64), (2, 1, 80), (6, 2, 96), (4, 2, 128), (3, 3, 256)]
CASES = [("float32", "float32", *heads, alibi) for heads in HEADS for alibi in (True, False)]
CASES += [("bfloat16", pool, *heads, True) for heads in HEADS[2:7:2] for pool in ("float32", "bfloat16")]
CASES += [("float32", "bfloat16", 3, 3, 32, True)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "pool", "heads", "kv_heads", "dim", "alibi"), CASES)
def test_mixed_iterations(harness, backend, dtype, pool, heads, kv_heads, dim, alibi):
    """Chunked prefill, decodes and both together, block edges included."""
    h = harness(backend, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, pool=pool, alibi=alibi)
    a, b, c, d = (h.add_row() for _ in range(4))
    for chunks in (
        [(a, 7), (b, 8), (c, 33)],  # a ends before an edge, b on it, c after it
        [(a, 1), (b, 1), (c, 1)],
        [
            (a, 1),
            (c, 1),
            (b, 20),
            (d, 41),
        ],  # a decode onto a block's first slot; a chunk in mid-row; bucket nearly full
        [(b, 1), (a, 1), (d, 1), (c, 30)],
    ):
        h.check(chunks, TOLERANCE[dtype])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block", [1, 2, 16, 32, 64])
@pytest.mark.parametrize("bucket", [5, 64])
def test_block_sizes_and_small_buckets(harness, backend, block, bucket):
    h = harness(backend, block=block, bucket=bucket, max_blocks=-(-100 // block), n_blocks=220)
    a, b = h.add_row(), h.add_row()
    h.check([(a, 5)], 2e-5)
    for _ in range(3):
        h.check([(a, 1), (b, 4)], 2e-5)
    h.check([(b, 1), (a, 1)], 2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(4))
def test_random_histories(harness, backend, seed):
    """Rows of random lengths, chunks in random order within their class, over twenty iterations of one program."""
    rng = np.random.default_rng(seed)
    h = harness(backend, heads=3, dim=8, block=4, max_blocks=64, n_blocks=256, seed=seed)
    rows = [h.add_row() for _ in range(8)]
    for _ in range(20):
        left, chunks = h.bucket, []
        for r in rng.permutation(rows)[: rng.integers(1, 9)]:
            length = int(min(left, rng.choice([1, 1, 1, 2, 3, 4, 5, 8, 17, 40])))
            if length and len(h.rows[r].keys) + length <= 256 and len(h.free) > 16:
                chunks.append((int(r), length))
                left -= length
        h.check(sorted(chunks, key=lambda c: c[1] > 1), 2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_length_one_prompt_pieces_among_longer_chunks(harness, backend):
    h = harness(backend)
    a, b, c = (h.add_row() for _ in range(3))
    h.check([(a, 1), (b, 9), (c, 1)], 2e-5)
    h.check([(b, 3), (a, 1), (c, 2)], 2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_iteration_and_full_bucket(harness, backend):
    h = harness(backend)
    assert h.step([]) == ([], [])
    a = h.add_row()
    h.check([(a, h.bucket)], 2e-5)
    assert h.step([]) == ([], [])
    h.check([(a, h.bucket)], 2e-5)  # the row's table is full to its last slot


@pytest.mark.parametrize("backend", BACKENDS)
def test_full_pool(harness, backend):
    h = harness(backend, n_blocks=9, block=8)
    rows = [h.add_row() for _ in range(4)]
    h.check([(r, 15) for r in rows], 2e-5)
    h.check([(r, 1) for r in rows], 2e-5)
    assert not h.free


@pytest.mark.parametrize("backend", BACKENDS)
def test_shared_prefix_blocks(harness, backend):
    h = harness(backend)
    a = h.add_row()
    h.check([(a, 20)], 2e-5)
    b, c = h.add_row(like=a, shared_blocks=2), h.add_row(like=a, shared_blocks=1)
    h.check([(a, 1), (b, 1), (c, 13)], 2e-5)
    h.check([(a, 1), (b, 1), (c, 1)], 2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_long_context_with_alibi(harness, backend):
    """Positions far beyond a tile, where the bias of the first keys is large."""
    h = harness(backend, dim=8, heads=2, block=32, max_blocks=100, n_blocks=120, bucket=1024)
    a, b = h.add_row(), h.add_row()
    for _ in range(3):
        h.check([(a, 1000)], 5e-5)
    h.check([(a, 1), (b, 1)], 5e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_rows_poison_nothing(harness, backend):
    """A row whose keys and values are NaN leaves every other row's result finite and right, before and after its
    blocks pass to somebody else."""
    h = harness(backend)
    a, sick, c = (h.add_row() for _ in range(3))
    q, k, v = (h.draw(4, 12) for _ in range(3))
    for x in (q, k, v):
        x[5:10] = np.nan
    outputs, expected = h.step([(a, 5), (sick, 5), (c, 2)], (q, k, v))
    for i in (0, 2):
        np.testing.assert_allclose(outputs[i], expected[i], rtol=2e-5, atol=2e-5)
    h.free += h.rows[sick].blocks
    d = h.add_row()
    h.check([(a, 1), (c, 1), (d, 3)], 2e-5)
    h.check([(a, 1), (c, 1), (d, 1)], 2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kv_len", [1, 8, 9, 70])
def test_a_row_does_not_depend_on_its_companions(harness, backend, kv_len):
    """Same bucket, same tokens: a decode's result is the same to the bit alone and in company, in any order."""

    def result(companions: list[int], place: int) -> np.ndarray:
        h = harness(backend, seed=7)
        mine = h.add_row()
        own = [tuple(h.draw(4, n) for _ in range(3)) for n in ([kv_len - 1] if kv_len > 1 else []) + [1]]
        if kv_len > 1:
            first, *rest = [kv_len - 1] if kv_len - 1 <= h.bucket else [h.bucket, kv_len - 1 - h.bucket]
            h.step([(mine, first)], tuple(x[:first] for x in own[0]))
            if rest:
                h.step([(mine, rest[0])], tuple(x[first:] for x in own[0]))
        others = [h.add_row() for _ in companions]
        for r, n in zip(others, companions, strict=True):
            h.step([(r, n)])
        chunks = [(r, 1) for r in others]
        chunks.insert(place, (mine, 1))
        qkv = tuple(np.concatenate([h.draw(4, place), own[-1][i], h.draw(4, len(others) - place)]) for i in range(3))
        return h.step(chunks, qkv)[0][place]

    alone = result([], 0)
    for companions, place in (([3], 0), ([60], 1), ([5, 40, 17], 2), ([1, 64, 30, 8, 9, 2, 11], 4)):
        np.testing.assert_array_equal(result(companions, place), alone)
