"""Specs as values: what they resolve to, and what is said of those that cannot."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from sharding import mesh, specs
from sharding.spec import ShardingSpec

SPEC = ShardingSpec({"vocab": "tensor", "heads": "tensor", "ffn": "tensor", "embed": None})


def devices(tensor: int):
    """A mesh of devices that need not exist."""
    return AbstractMesh((tensor,), ("tensor",), axis_types=(AxisType.Auto,))


def test_axes_become_what_their_rules_say():
    assert SPEC.resolve(("heads", "embed"), (24, 16), devices(4)) == PartitionSpec("tensor", None)
    assert SPEC.resolve(("embed", "ffn"), (16, 24), devices(4)) == PartitionSpec(None, "tensor")
    assert SPEC.resolve((None, "ffn"), (3, 24), devices(4)) == PartitionSpec(None, "tensor")
    assert SPEC.resolve((), (), devices(4)) == PartitionSpec()


@pytest.mark.parametrize(
    ("spec", "axes", "shape", "message"),
    [
        (SPEC, ("hedas", "embed"), (24, 16), r"qkv: logical axis 'hedas' has no rule; did you mean 'heads'\?"),
        (SPEC, ("batch",), (24,), r"qkv: logical axis 'batch' has no rule; there are 'vocab', 'heads', 'ffn', 'embed'"),
        (
            ShardingSpec({"heads": "tensr"}),
            ("heads",),
            (24,),
            r"qkv: logical axis 'heads' goes to 'tensr', .*'tensor'\?",
        ),
        (SPEC, ("heads", "ffn"), (24, 24), r"qkv: logical axes 'heads' and 'ffn' are both on mesh axis 'tensor'"),
        (
            SPEC,
            ("ffn", "embed"),
            (26, 16),
            r"qkv: axis 'ffn' of size 26 does not divide over mesh axis 'tensor' of size 4",
        ),
    ],
)
def test_a_spec_that_cannot_be_is_refused_in_words(spec, axes, shape, message):
    with pytest.raises(ValueError, match=message):
        spec.resolve(axes, shape, devices(4), name="qkv")


def test_things_that_take_several_columns_are_not_cut():
    # 6 heads of 3 x 8 columns: 144 divides by 4, but 6 heads do not.
    with pytest.raises(ValueError, match=r"axis 'heads' of size 6 does not divide over mesh axis 'tensor' of size 4"):
        SPEC.resolve(("heads", "embed"), (144, 48), devices(4), counts={"heads": 6})
    assert SPEC.resolve(("heads", "embed"), (144, 48), devices(3), counts={"heads": 6}) == PartitionSpec("tensor", None)


def test_an_axis_of_the_mesh_that_no_rule_names_holds_copies():
    wide = AbstractMesh((2, 4), ("replica", "tensor"), axis_types=(AxisType.Auto,) * 2)
    assert SPEC.resolve(("heads", "embed"), (24, 16), wide) == PartitionSpec("tensor", None)


def test_a_mesh_has_the_first_devices_and_lets_the_compiler_choose():
    made = mesh.make_mesh()
    assert isinstance(made, Mesh)
    assert made.axis_names == ("tensor",)
    assert made.axis_types == (AxisType.Auto,)
    assert made.devices.tolist() == jax.devices()[:1]
    many = np.repeat(jax.devices()[0], 3).tolist()
    with pytest.raises(ValueError, match=r"tensor is 4; it must be at least 1 and at most 3, the number of devices"):
        mesh.make_mesh(4, many)
    with pytest.raises(ValueError, match=r"tensor is 0"):
        mesh.make_mesh(0)


def test_a_family_without_a_default_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'llama' has no sharding; there are bloom, gpt2"):
        specs.default("llama")
