"""Every backend against the float64 oracle, on fresh random inputs over a pool of NaN."""

from __future__ import annotations

from itertools import product

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.api import AttentionShape
from pallas_kernels.xla import XlaBackend
from tests.pallas_kernels.subjects import SUBJECTS, backend, over_subjects

HEADS = [(1, 1, 64), (7, 7, 64), (2, 1, 80), (6, 2, 96), (14, 14, 128), (3, 3, 256)]  # N, K, D
DTYPES, POOLS = ("float32", "bfloat16"), ("float32", "bfloat16", "int8")
NAMES = "dtype pool heads kv_heads dim alibi"
ALL = [(dtype, pool, *heads, alibi) for dtype, pool, heads, alibi in product(DTYPES, POOLS, HEADS, (True, False))]
# Every shape of heads, and every dtype of queries with every dtype of the pool; half of them with ALiBi.
CASES = [(DTYPES[i % 2], POOLS[i % 3], *heads, i % 4 < 2) for i, heads in enumerate(HEADS)]


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pool", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_serves_what_the_contract_promises(subject, dtype, pool, dim):
    for heads, block in product((1, 7, 14), SUBJECTS[subject].block_sizes):
        shape = AttentionShape(
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=dim,
            dtype=jnp.dtype(dtype),
            pool_dtype=jnp.dtype(pool),
            alibi=True,
        )
        assert backend(subject).supports(shape.with_blocks(block, 32768)) is None


def mixed_iterations(h):
    """Chunked prefill, decodes and both together, block edges included."""
    size = h.shape.block_size
    a, b, c, d = (h.add_row() for _ in range(4))
    h.check([(a, size - 1), (b, size), (c, 4 * size + 1)])  # a ends before an edge, b on it, c after it
    h.check([(a, 1), (b, 1), (c, 1)])
    # A decode onto a block's first slot, a chunk in mid-row, the bucket nearly full.
    h.check([(a, 1), (c, 1), (b, 2 * size + 4), (d, 5 * size + 1)])
    h.check([(b, 1), (a, 1), (d, 1), (c, 4 * size - 2)])


@over_subjects(NAMES, CASES, interpreted=1)
def test_mixed_iterations(harness, subject, dtype, pool, heads, kv_heads, dim, alibi):
    mixed_iterations(harness(subject, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, pool=pool, alibi=alibi))


@pytest.mark.weekly
@over_subjects(NAMES, ALL)
def test_mixed_iterations_in_every_combination(harness, subject, dtype, pool, heads, kv_heads, dim, alibi):
    for block in SUBJECTS[subject].block_sizes:
        h = harness(
            subject,
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            dtype=dtype,
            pool=pool,
            alibi=alibi,
            block=block,
            bucket=8 * block + 8,
        )
        mixed_iterations(h)


@pytest.mark.parametrize(
    ("subject", "block"),
    [
        pytest.param(name, block, marks=pytest.mark.interpret if each.slow else ())
        for name, each in SUBJECTS.items()
        for block in each.block_sizes
    ],
)
def test_block_sizes_in_a_small_bucket(harness, subject, block):
    h = harness(subject, block=block, bucket=5, max_blocks=-(-100 // block), n_blocks=220)
    a, b = h.add_row(), h.add_row()
    h.check([(a, 5)])
    for _ in range(3):
        h.check([(a, 1), (b, 4)])
    h.check([(b, 1), (a, 1)])


@over_subjects("drawn", [(1,), (2,), (3,)])
def test_random_histories(harness, seed, subject, drawn):
    """Rows of random lengths in a random model, chunks in random order within their class, over the iterations of one
    program."""
    rng = np.random.default_rng([seed, drawn])
    dtype, pool, heads, kv_heads, dim, alibi = ALL[rng.integers(len(ALL))]
    h = harness(
        subject,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        dtype=dtype,
        pool=pool,
        alibi=alibi,
        scale=dim**-0.5 * float(rng.choice([0.5, 1, 3])),
        max_blocks=32,
        n_blocks=256,
    )
    limit = 32 * h.shape.block_size
    rows = [h.add_row() for _ in range(8)]
    for _ in range(5 if SUBJECTS[subject].slow else 20):
        left, chunks = h.bucket, []
        for r in rng.permutation(rows)[: rng.integers(1, 9)]:
            length = int(min(left, rng.choice([1, 1, 1, 2, 3, 4, 5, 8, 17, 40])))
            if length and len(h.rows[r].keys) + length <= limit and len(h.free) > 16:
                chunks.append((int(r), length))
                left -= length
        h.check(sorted(chunks, key=lambda c: c[1] > 1))


@over_subjects(interpreted=1)
def test_length_one_prompt_pieces_among_longer_chunks(harness, subject):
    h = harness(subject)
    a, b, c = (h.add_row() for _ in range(3))
    h.check([(a, 1), (b, 9), (c, 1)])
    h.check([(b, 3), (a, 1), (c, 2)])


@over_subjects()
def test_as_many_chunks_as_there_may_be(harness, subject):
    h = harness(subject)
    rows = [h.add_row() for _ in range(h.most_chunks)]
    h.check([(r, 3) for r in rows])
    h.check([(r, 1) for r in rows])


@over_subjects()
def test_empty_iteration_and_full_bucket(harness, subject):
    h = harness(subject)
    assert h.step([]) == ([], [])
    a = h.add_row()
    h.check([(a, h.bucket)])
    assert h.step([]) == ([], [])
    h.check([(a, h.bucket)])  # the row's table is full to its last slot


@over_subjects("pool", [("float32",), ("int8",)])
def test_full_pool(harness, subject, pool):
    h = harness(subject, n_blocks=9, pool=pool)
    rows = [h.add_row() for _ in range(4)]
    h.check([(r, 2 * h.shape.block_size - 1) for r in rows])
    h.check([(r, 1) for r in rows])
    assert not h.free


@over_subjects("pool", [("int8",), ("float32",)], interpreted=1)
def test_shared_prefix_blocks(harness, subject, pool):
    h = harness(subject, pool=pool)
    size = h.shape.block_size
    a = h.add_row()
    h.check([(a, 2 * size + size // 2)])
    b, c = h.add_row(like=a, shared_blocks=2), h.add_row(like=a, shared_blocks=1)
    h.check([(a, 1), (b, 1), (c, size + 5)])
    h.check([(a, 1), (b, 1), (c, 1)])


@over_subjects()
def test_as_many_rows_as_a_batch_may_have(harness, subject):
    n_rows = 32 if SUBJECTS[subject].slow else 512
    h = harness(subject, heads=2, bucket=n_rows, most_chunks=n_rows, n_blocks=n_rows + 1, max_blocks=2)
    rows = [h.add_row() for _ in range(n_rows)]
    for _ in range(3):
        h.check([(r, 1) for r in rows])


@over_subjects()
def test_long_context_with_alibi(harness, subject):
    """Positions far beyond a tile, where the bias of the first keys is large."""
    chunk = 200 if SUBJECTS[subject].slow else 500
    block = max(SUBJECTS[subject].block_sizes)
    h = harness(subject, heads=2, block=block, max_blocks=1600 // block, n_blocks=1600 // block + 2, bucket=512)
    a, b = h.add_row(), h.add_row()
    for _ in range(3):
        h.check([(a, chunk)])
    h.check([(a, 1), (b, 1)])


@pytest.mark.exhaustive
@over_subjects("pool", [("float32",), ("int8",)])
def test_a_context_of_32k(harness, subject, pool):
    if SUBJECTS[subject].slow:
        pytest.skip(f"{subject} runs in an interpreter: an hour")
    h = harness(subject, heads=1, pool=pool, block=64, max_blocks=512, n_blocks=520, bucket=1024)
    a, b = h.add_row(), h.add_row()
    for _ in range(31):
        h.check([(a, 1024)])
    h.check([(b, 1), (a, 1022)])
    h.check([(a, 1), (b, 1)])
    h.check([(a, 1)])  # the table is full to its last slot


@over_subjects("pool", [("float32",), ("bfloat16",), ("int8",)])
def test_other_rows_poison_nothing(harness, subject, pool):
    """A row whose keys and values are NaN leaves every other row's result finite and right, before and after its
    blocks pass to somebody else."""
    h = harness(subject, pool=pool)
    a, sick, c = (h.add_row() for _ in range(3))
    q, k, v = (h.draw(4, 12) for _ in range(3))
    for x in (q, k, v):
        x[5:10] = np.nan
    outputs, expected = h.step([(a, 5), (sick, 5), (c, 2)], (q, k, v))
    for i in (0, 2):
        h.compare(outputs[i], expected[i], f"chunk {i}")
    h.free += h.rows[sick].blocks
    d = h.add_row()
    h.check([(a, 1), (c, 1), (d, 3)])
    h.check([(a, 1), (c, 1), (d, 1)])


@over_subjects("kv_len pool", [(9, "float32"), (70, "int8"), (1, "float32"), (8, "float32")], interpreted=1)
def test_a_row_does_not_depend_on_its_companions(harness, subject, kv_len, pool):
    """Same bucket, same tokens: a decode's result is the same to the bit alone and in company, in any order."""

    def result(companions: list[int], place: int) -> np.ndarray:
        h = harness(subject, pool=pool, bucket=64)
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


class Nearsighted(XlaBackend):
    """Attends as if each row were one token shorter."""

    def prepare(self, batch, shape):
        meta = super().prepare(batch, shape)
        return meta._replace(decodes=meta.decodes._replace(kv_len=meta.decodes.kv_len - 1))


class Unscaled(XlaBackend):
    """Forgets the scales of the keys it wrote."""

    def attend(self, q, k, v, pool, meta, shape, **kw):
        out, pool = super().attend(q, k, v, pool, meta, shape, **kw)
        return out, pool._replace(key_scales=jnp.ones_like(pool.key_scales))


@pytest.mark.parametrize(("broken", "pool"), [(Nearsighted(), "float32"), (Unscaled(), "int8")])
def test_a_broken_backend_is_caught(harness, broken, pool):
    h = harness(broken, pool=pool)
    with pytest.raises(AssertionError, match="--seed"):
        mixed_iterations(h)
