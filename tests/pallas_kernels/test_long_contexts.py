"""Every backend at contexts of many tiles and blocks, against the float64 oracle."""

from __future__ import annotations

import numpy as np
import pytest

from tests.pallas_kernels.subjects import SUBJECTS, over_subjects


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
@pytest.mark.parametrize(
    ("subject", "pool"),
    [
        pytest.param(name, pool, marks=() if (name, pool) == ("cpu", "int8") else pytest.mark.weekly)
        for name, how in SUBJECTS.items()
        if not how.slow  # others: an hour
        for pool in ("float32", "int8")
    ],
)
def test_a_context_of_32k(harness, subject, pool):
    h = harness(subject, heads=1, pool=pool, block=64, max_blocks=512, n_blocks=520, bucket=1024)
    a, b = h.add_row(), h.add_row()
    for _ in range(31):
        h.check([(a, 1024)])
    h.check([(b, 1), (a, 1022)])
    h.check([(a, 1), (b, 1)])
    h.check([(a, 1)])  # the table is full to its last slot
