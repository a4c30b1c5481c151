"""Every backend reads a row's own keys in its window, and nothing else changes the row's result."""

from __future__ import annotations

import numpy as np

from tests.pallas_kernels.subjects import over_subjects


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
