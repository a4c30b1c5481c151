"""Every backend against the float64 oracle, on fresh random inputs over a pool of NaN."""

from __future__ import annotations

import dataclasses
from itertools import product

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.api import AttentionShape
from pallas_kernels.xla import XlaBackend
from tests.pallas_kernels.conftest import WINDOWS
from tests.pallas_kernels.subjects import SUBJECTS, backend, over_subjects, thinned

HEADS = [(1, 1, 64), (7, 7, 64), (2, 1, 80), (6, 2, 96), (14, 14, 128), (3, 3, 256)]  # N, K, D
DTYPES, POOLS = ("float32", "bfloat16"), ("float32", "bfloat16", "int8")
NAMES = "dtype pool heads kv_heads dim alibi"
ALL = [(dtype, pool, *heads, alibi) for dtype, pool, heads, alibi in product(DTYPES, POOLS, HEADS, (True, False))]
# Every shape of heads, and every dtype of queries with every dtype of the pool; half of them with ALiBi.
CASES = [(DTYPES[i % 2], POOLS[i % 3], *heads, i % 4 < 2) for i, heads in enumerate(HEADS)]


# Windows of the layers (conftest.WINDOWS), soft cap, sinks, and of the above some that go with them.
VARIED_NAMES = f"windows soft_cap sinks {NAMES}"
VARIED = [
    ("blocks", None, False, "float32", "float32", 4, 4, 64, True),
    ("within a block", None, True, "bfloat16", "int8", 6, 2, 96, False),
    ("alternating", 3.0, True, "float32", "bfloat16", 2, 2, 64, True),
    ("two sizes", 3.0, False, "bfloat16", "bfloat16", 4, 1, 80, False),
    ("none", 3.0, True, "float32", "int8", 3, 3, 64, True),
    ("one token", None, True, "float32", "float32", 4, 2, 64, True),
    ("beyond the context", None, False, "bfloat16", "float32", 2, 2, 64, True),
]
VARIATIONS = list(product(WINDOWS, (None, 3.0), (False, True)))


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
        for each in (shape, dataclasses.replace(shape, windows=(None, 16), soft_cap=50.0, sinks=True)):
            assert backend(subject).supports(each.with_blocks(block, 32768)) is None


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


def check_varied(harness, subject, windows, soft_cap, sinks, dtype, pool, heads, kv_heads, dim, alibi):
    h = harness(
        subject,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        dtype=dtype,
        pool=pool,
        alibi=alibi,
        windows=windows,
        soft_cap=soft_cap,
        sinks=sinks,
        scale=(1 if soft_cap is None else 3) * dim**-0.5,  # scores of a size that the cap bends
    )
    mixed_iterations(h)


@over_subjects(VARIED_NAMES, VARIED, interpreted=1)
def test_windows_soft_caps_and_sinks(
    harness, subject, windows, soft_cap, sinks, dtype, pool, heads, kv_heads, dim, alibi
):
    check_varied(harness, subject, windows, soft_cap, sinks, dtype, pool, heads, kv_heads, dim, alibi)


@pytest.mark.weekly
@over_subjects("windows soft_cap sinks", VARIATIONS)
def test_variations_in_every_combination(harness, subject, windows, soft_cap, sinks):
    models = list(product(DTYPES, POOLS, [(2, 2, 64), (6, 2, 96)], (True, False)))
    for dtype, pool, heads, alibi in thinned(models) if SUBJECTS[subject].slow else models:
        check_varied(harness, subject, windows, soft_cap, sinks, dtype, pool, *heads, alibi)


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


@over_subjects("drawn varied", [(1, False), (3, True)])
def test_random_histories(harness, seed, subject, drawn, varied):
    """Rows of random lengths in a random model, chunks in random order within their class, over the iterations of one
    program."""
    rng = np.random.default_rng([seed, drawn])
    dtype, pool, heads, kv_heads, dim, alibi = ALL[rng.integers(len(ALL))]
    windows, soft_cap, sinks = VARIATIONS[rng.integers(len(VARIATIONS))] if varied else VARIATIONS[0]
    h = harness(
        subject,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        dtype=dtype,
        pool=pool,
        alibi=alibi,
        windows=windows,
        soft_cap=soft_cap,
        sinks=sinks,
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


@over_subjects("pool", [("int8",), ("float32",)])
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


@over_subjects("windows", [((129,),), ((None, 700),)])
def test_long_context_with_windows(harness, subject, windows):
    """Windows that are smaller and larger than a chunk, and begin in other blocks, tiles and steps than queries do."""
    chunk = 200 if SUBJECTS[subject].slow else 500
    block = max(SUBJECTS[subject].block_sizes)
    sizes = {"block": block, "max_blocks": 1600 // block, "n_blocks": 2 * 1600 // block, "bucket": 512}
    h = harness(subject, heads=2, kv_heads=1, windows=windows, sinks=True, **sizes)
    a, b = h.add_row(), h.add_row()
    for _ in range(3):
        h.check([(a, chunk)])
    h.check([(b, 1), (a, 50)])
    h.check([(a, 1), (b, 1)])


@over_subjects("pool", [("bfloat16",), ("float32",)])
def test_bfloat16_at_a_long_context(harness, subject, pool):
    """Scores so far apart that some keys among thousands decide a result: one that is lost shows.

    A tolerance of the size of a value would say nothing of averages of thousands, so each number has its own: bfloat16
    rounds by at most 2^-8 of what it rounds. That is done to the weights, 2^-8 of sum(weight * |value|) in all, and to
    the result. Sums are in float32, and what those round is less than the independent errors of weights leave over.
    """
    block, chunk = max(SUBJECTS[subject].block_sizes), 512 if SUBJECTS[subject].slow else 1024
    sizes = {"block": block, "max_blocks": 4 * chunk // block, "n_blocks": 4 * chunk // block + 4, "bucket": chunk}
    h = harness(subject, heads=1, dtype="bfloat16", pool=pool, alibi=False, scale=3 / 8, **sizes)
    a, b = h.add_row(), h.add_row()
    for chunks in ([(a, chunk)], [(a, chunk)], [(a, chunk)], [(b, 1), (a, chunk - 24)], [(b, 1), (a, 1)]):
        outputs, expected = h.step(chunks)
        queries, keys, values = h.given
        magnitudes = h.oracle(queries, keys, [np.abs(x) for x in values])
        for out, right, magnitude in zip(outputs, expected, magnitudes, strict=True):
            np.testing.assert_array_less(np.abs(out - right), 2**-8 * (magnitude + np.abs(right)), err_msg=h.again)


@pytest.mark.exhaustive
@pytest.mark.parametrize("subject", [name for name, how in SUBJECTS.items() if not how.slow])  # others: an hour
@pytest.mark.parametrize("pool", ["float32", "int8"])
def test_a_context_of_32k(harness, subject, pool):
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


@over_subjects()
def test_keys_behind_the_window_have_no_effect(harness, subject):
    """A row's own keys and values that are NaN, in a block that is partly behind the window; decodes and a prompt."""
    h = harness(subject, windows="within a block")
    (window,), size = h.shape.windows, h.shape.block_size
    a, b = h.add_row(), h.add_row()
    for r in (a, b):
        q, k, v = (h.draw(4, size + 2) for _ in range(3))
        for x in (q, k, v):
            x[: size + 1] = np.nan
        h.step([(r, size + 2)], (q, k, v))
    h.step([(a, window - 2), (b, window - 2)])
    h.check([(a, 1), (b, 3)])
    h.check([(a, 1), (b, 1)])


@over_subjects()
def test_sinks_far_above_and_below_all_scores(harness, subject):
    h = harness(subject, alibi=False, sinks=True)
    h.sinks = np.float32([-1e4, -100, 100, 1e4])
    a, b = h.add_row(), h.add_row()
    h.check([(a, 5), (b, 9)])
    h.check([(a, 1), (b, 1)])


@over_subjects(
    "kv_len pool windows",
    [(9, "float32", "none"), (70, "int8", "blocks"), (1, "float32", "none"), (8, "float32", "none")],
)
def test_a_row_does_not_depend_on_its_companions(harness, subject, kv_len, pool, windows):
    """Same bucket, same tokens: a decode's result is the same to the bit alone and in company, in any order."""

    def result(companions: list[int], place: int) -> np.ndarray:
        h = harness(subject, pool=pool, windows=windows, bucket=64)
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


class Farsighted(XlaBackend):
    """Sees one token more than its windows hold."""

    def attend(self, q, k, v, pool, meta, shape, *, window, **kw):
        wider = dataclasses.replace(shape, windows=tuple(each and each + 1 for each in shape.windows))
        return super().attend(q, k, v, pool, meta, wider, window=window and window + 1, **kw)


class Uncapped(XlaBackend):
    def attend(self, q, k, v, pool, meta, shape, **kw):
        return super().attend(q, k, v, pool, meta, dataclasses.replace(shape, soft_cap=None), **kw)


class Sinkless(XlaBackend):
    def attend(self, q, k, v, pool, meta, shape, *, sinks, **kw):
        return super().attend(q, k, v, pool, meta, shape, **kw)


class Unscaled(XlaBackend):
    """Forgets the scales of the keys it wrote."""

    def attend(self, q, k, v, pool, meta, shape, **kw):
        out, pool = super().attend(q, k, v, pool, meta, shape, **kw)
        return out, pool._replace(key_scales=jnp.ones_like(pool.key_scales))


@pytest.mark.parametrize(
    ("broken", "model"),
    [
        (Nearsighted(), {}),
        (Unscaled(), {"pool": "int8"}),
        (Farsighted(), {"windows": "blocks"}),
        (Uncapped(), {"soft_cap": 1.0}),
        (Sinkless(), {"sinks": True}),
    ],
)
def test_a_broken_backend_is_caught(harness, broken, model):
    h = harness(broken, **model)
    with pytest.raises(AssertionError, match="--seed"):
        mixed_iterations(h)
