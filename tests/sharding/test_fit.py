"""Weights that do not fit a device."""

from typing import NamedTuple

import pytest

from sharding.fit import check_weights

MIB = 2**20


class Held(NamedTuple):
    name: str
    axes: tuple[str, ...]
    nbytes: int
    whole: bool


SPLIT = [
    Held("embed.tokens.table", ("vocab", "embed"), 8 * MIB, False),
    Held("layers.0.up.kernel", ("ffn", "embed"), 4 * MIB, False),
    Held("layers.1.up.kernel", ("ffn", "embed"), 4 * MIB, False),
    Held("head.norm.scale", ("embed",), MIB, True),
]


def test_weights_that_fit_are_let_through():
    check_weights(SPLIT, 17 * MIB, "chip")


def test_weights_that_do_not_fit_are_refused_in_words():
    with pytest.raises(ValueError, match=r"^the weights take 17.0 MiB of each chip, .* 16.0 MiB; use more devices"):
        check_weights(SPLIT, 16 * MIB, "chip")


def test_copies_are_named_where_they_are_what_does_not_fit():
    whole = [each._replace(whole=True) for each in SPLIT[1:]] + SPLIT[:1]
    with pytest.raises(
        ValueError,
        match=r"every device holds a copy of 9.0 MiB of them, above all "
        r"layers.\*.up.kernel \(8.0 MiB; axes ffn, embed\), head.norm.scale \(1.0 MiB; axes embed\): "
        r"split one of those axes, or use more stages",
    ):
        check_weights(whole, 16 * MIB, "chip")
