"""The assembly in the Triton kernels, which no interpreter of Triton runs, on every byte."""

import re

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.gpu import kernels, product_kernels


def run(assembly: str, word: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """$0 and $1 of PTX with the operand $2, uint32[n]."""
    values = {"$2": word}

    def value(operand: str) -> np.ndarray:
        return np.full_like(word, int(operand, 0)) if operand[0].isdigit() else values[operand]

    for name, line in re.findall(r"^\s*([a-z][\w.]+) (.*);", assembly, re.M):
        result, *operands = line.split(", ")
        found = [value(x) for x in operands]
        if name == "mov.b32":
            values[result] = found[0]
        elif name == "shr.u32":
            values[result] = found[0] >> found[1]
        elif name == "lop3.b32":  # a bit of the table for each value of the three bits
            table = int(operands.pop(), 0)
            values[result] = np.zeros_like(word)
            for bits in (bits for bits in range(8) if table >> bits & 1):
                a, b, c = (x if bits >> place & 1 else ~x for place, x in zip((2, 1, 0), found, strict=False))
                values[result] = values[result] | a & b & c
        elif name == "prmt.b32":
            taken = np.stack([*found[0][:, None].view(np.uint8).T, *found[1][:, None].view(np.uint8).T])
            places = [found[2][0] >> 4 * i & 7 for i in range(4)]
            values[result] = np.ascontiguousarray(taken[places].T).view(np.uint32)[:, 0]
        else:
            assert name == "fma.rn.bf16x2"
            a, b, c = (x[:, None].view(ml_dtypes.bfloat16).astype(np.float32) for x in found)
            values[result] = (a * b + c).astype(ml_dtypes.bfloat16).view(np.uint32)[:, 0]
    return values["$0"], values["$1"]


def bfloat16s(words: np.ndarray) -> np.ndarray:
    return words[:, None].view(ml_dtypes.bfloat16).astype(int)


def test_words_of_two_bytes() -> None:
    both = np.arange(2**16, dtype=np.uint16)
    words = np.stack([both, both[::-1]], 1)
    low, high = (bfloat16s(x) for x in run(kernels._BYTES_TO_BFLOAT16.value, words.view(np.uint32)[:, 0]))
    np.testing.assert_array_equal(low, (words & 0xFF).astype(np.uint8).view(np.int8))
    np.testing.assert_array_equal(high, (words >> 8).astype(np.uint8).view(np.int8))


@pytest.mark.parametrize("half", ["low", "high"])
def test_half_bytes(half: str) -> None:
    held = np.random.default_rng(0).integers(0, 256, (4096, 4), np.uint8)
    assembly = {"low": product_kernels._LOW, "high": product_kernels._HIGH}[half].value
    numbers = np.concatenate([bfloat16s(x) for x in run(assembly, held.view(np.uint32)[:, 0])], axis=1)
    unsigned = (held >> 4 if half == "high" else held & 15).astype(int)
    np.testing.assert_array_equal(numbers, np.where(unsigned > 7, unsigned - 16, unsigned))
