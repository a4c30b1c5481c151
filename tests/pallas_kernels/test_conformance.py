"""Every backend against the float64 oracle, on fresh random inputs over a pool of NaN."""

from __future__ import annotations

import dataclasses
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.api import ONE_SLOT_PART, AttentionShape
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
    ("blocks", None, False, "float32", "float32", 2, 1, 64, True),
    ("within a block", None, True, "bfloat16", "int8", 6, 2, 96, False),
    ("alternating", 3.0, True, "float32", "bfloat16", 2, 2, 64, True),
    ("two sizes", 3.0, False, "bfloat16", "bfloat16", 4, 1, 80, False),
    ("none", 3.0, True, "float32", "int8", 3, 3, 64, True),
    ("one token", None, True, "float32", "float32", 4, 2, 64, True),
    ("beyond the context", None, False, "bfloat16", "float32", 2, 2, 64, True),
]
VARIATIONS = list(product(WINDOWS, (None, 3.0), (False, True)))


def named(names, *values):
    """The harness's arguments of these names."""
    return dict(zip(names.split(), values, strict=True))


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


@over_subjects(NAMES, CASES, interpreted=1)
def test_mixed_iterations(harness, subject, dtype, pool, heads, kv_heads, dim, alibi):
    harness(subject, **named(NAMES, dtype, pool, heads, kv_heads, dim, alibi)).check_mixed_iterations()


@pytest.mark.weekly
@over_subjects(NAMES, ALL)
def test_mixed_iterations_in_every_combination(harness, subject, dtype, pool, heads, kv_heads, dim, alibi):
    for block in SUBJECTS[subject].block_sizes:
        model = named(NAMES, dtype, pool, heads, kv_heads, dim, alibi)
        harness(subject, **model, block=block, bucket=8 * block + 8).check_mixed_iterations()


def check_varied(harness, subject, *values):
    model = named(VARIED_NAMES, *values)
    scale = (1 if model["soft_cap"] is None else 3) * model["dim"] ** -0.5  # scores of a size that the cap bends
    harness(subject, **model, scale=scale).check_mixed_iterations()


@over_subjects(VARIED_NAMES, VARIED, interpreted=1)
def test_windows_soft_caps_and_sinks(
    harness, subject, windows, soft_cap, sinks, dtype, pool, heads, kv_heads, dim, alibi
):
    check_varied(harness, subject, windows, soft_cap, sinks, dtype, pool, heads, kv_heads, dim, alibi)


SPLIT_NAMES = f"parts {VARIED_NAMES}"
SPLIT = [
    (2, "none", None, False, "float32", "float32", 2, 1, 64, True),
    (2, "blocks", None, True, "bfloat16", "int8", 6, 2, 96, False),
    (3, "alternating", 3.0, True, "float32", "bfloat16", 2, 2, 64, True),
    (2, "one token", None, True, "float32", "int8", 3, 3, 64, True),
]


@over_subjects(SPLIT_NAMES, SPLIT)
def test_slots_of_blocks_in_several_parts(
    harness, subject, parts, windows, soft_cap, sinks, dtype, pool, heads, kv_heads, dim, alibi
):
    if subject in ("cpu", "gpu"):
        assert backend(subject).supports(harness("xla", parts=parts).shape) == ONE_SLOT_PART
        return
    make = partial(harness, parts=parts)
    check_varied(make, subject, windows, soft_cap, sinks, dtype, pool, heads, kv_heads, dim, alibi)


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


@over_subjects("windows pool kv_heads", [((None,), "float32", 4), ((24, None), "int8", 2)])
def test_a_program_for_decodes_only(harness, seed, subject, windows, pool, kv_heads):
    """It serves decodes as the program that serves all chunks does, to the bit, and leaves the pool as that does."""
    model = {"windows": windows, "pool": pool, "kv_heads": kv_heads, "seed": seed}
    one, other = harness(subject, **model), harness(subject, **model)
    results = []
    for h, decodes_only in ((one, True), (other, False)):
        rows = [h.add_row() for _ in range(3)]
        h.step([(row, 2 * h.shape.block_size + row) for row in rows])
        for chunks in ([(2, 1), (0, 1)], [(0, 1), (1, 1), (2, 1)]):
            outputs, expected = h.step(chunks, decodes_only=decodes_only)
            for out, right in zip(outputs, expected, strict=True):
                h.compare(out, right, f"decodes only: {decodes_only}")
            results.append(np.concatenate(outputs))
    np.testing.assert_array_equal(np.concatenate(results[:2]), np.concatenate(results[2:]))
    np.testing.assert_array_equal(*(jax.tree.leaves(h.pool)[0] for h in (one, other)))


@over_subjects("drawn varied", [(1, False), (3, True)])
def test_random_histories(harness, seed, subject, drawn, varied):
    """Rows of random lengths in a random model, chunks in random order within their class, over the iterations of one
    program."""
    rng = np.random.default_rng([seed, drawn])
    drawn_model = ALL[rng.integers(len(ALL))]
    variation = VARIATIONS[rng.integers(len(VARIATIONS))] if varied else VARIATIONS[0]
    model = named(VARIED_NAMES, *variation, *drawn_model)
    scale = model["dim"] ** -0.5 * float(rng.choice([0.5, 1, 3]))
    h = harness(subject, **model, scale=scale, max_blocks=32, n_blocks=256)
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
    h = harness(subject, heads=1)  # the program of `test_mixed_iterations`
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
def test_sinks_far_above_and_below_all_scores(harness, subject):
    h = harness(subject, alibi=False, sinks=True)
    h.sinks = np.float32([-1e4, -100, 100, 1e4])
    a, b = h.add_row(), h.add_row()
    h.check([(a, 5), (b, 9)])
    h.check([(a, 1), (b, 1)])
