"""Parameters laid over devices that need not exist."""

from dataclasses import replace

import pytest
from jax.sharding import AbstractMesh, AxisType

from sharding.layout import Array, check_fits, lay
from sharding.spec import ShardingSpec

SPEC = ShardingSpec({"vocab": "tensor", "heads": "tensor", "ffn": "tensor", "embed": None})
MESH = AbstractMesh((4,), ("tensor",), axis_types=(AxisType.Auto,))
ARRAYS = [
    Array("embed.tokens.table", ("vocab", "embed"), (64, 8), 4),
    Array("layers.0.up.kernel", ("ffn", "embed"), (32, 8), 2),
    Array("layers.1.up.kernel", ("ffn", "embed"), (32, 8), 2),
    Array("layers.0.norm.scale", ("embed",), (8,), 4),
]


def test_each_device_holds_its_part():
    laid = lay(SPEC, ARRAYS, MESH)
    assert [each.local for each in laid] == [(16, 8), (8, 8), (8, 8), (8,)]
    assert [each.nbytes for each in laid] == [512, 128, 128, 32]
    assert [each.whole for each in laid] == [False, False, False, True]


def test_names_and_sizes_are_checked():
    with pytest.raises(ValueError, match=r"matches no parameter; did you mean 'layers.\*.up.kernel'"):
        lay(replace(SPEC, parameters={"layers.*.ip.kernel": {"ffn": None}}), ARRAYS, MESH)
    with pytest.raises(ValueError, match=r"embed.tokens.table: axis 'vocab' of size 61 .* padded to 64, 4.9% more"):
        lay(SPEC, ARRAYS, MESH, {"vocab": 61})


def test_weights_that_do_not_fit_are_refused_in_words():
    laid = lay(SPEC, ARRAYS, MESH)
    check_fits(laid, 800, "chip")
    with pytest.raises(ValueError, match=r"^the weights take 0.0 MiB of each chip.*; use more devices"):
        check_fits(laid, 799, "chip")
    whole = lay(replace(SPEC, rules=dict.fromkeys(SPEC.rules)), ARRAYS, MESH)
    with pytest.raises(
        ValueError,
        match=r"every device holds a copy of 0.0 MiB of them, above all embed.tokens.table "
        r"\(0.0 MiB; axes vocab, embed\), "
        r"layers.\*.up.kernel .*: split one of those axes, or use more stages",
    ):
        check_fits(whole, 800, "chip")
