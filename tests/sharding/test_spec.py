"""Specs as values: what they resolve to, and what is said of those that cannot."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from sharding import mesh, specs
from sharding.spec import ShardingSpec, read

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
            r"qkv: axis 'ffn' of size 26 does not divide over mesh axis 'tensor' of size 4; "
            r"it does for tensor = 1, 2, 13, 26, or padded to 28, 7.7% more \(\[pad\] ffn = true\)$",
        ),
        (
            ShardingSpec({"embed": "tensor"}),
            ("embed",),
            (26,),
            r"axis 'embed' of size 26 does not divide .* it does for tensor = 1, 2, 13, 26$",
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


def test_padding_rounds_up_to_what_every_rule_divides():
    counts = {"vocab": 50257, "heads": 112, "ffn": 26, "embed": 14}
    assert SPEC.padded(counts, {"tensor": 32}) == counts | {"vocab": 50272}
    spec = replace(SPEC, pad=frozenset({"vocab", "heads"}))
    assert spec.padded(counts, {"tensor": 32}) == {"vocab": 50272, "heads": 128, "ffn": 26, "embed": 14}
    two = replace(spec, pool={"heads": "other"})
    assert two.padded(counts, {"tensor": 32, "other": 3})["heads"] == 192
    assert replace(spec, rules={**SPEC.rules, "vocab": None}).padded(counts, {"tensor": 32})["vocab"] == 50257
    with pytest.raises(
        ValueError, match=r"of size 50257 .* for tensor = 1, 29$"
    ):  # padding is on: the caller forgot it
        spec.resolve(("vocab",), (50257,), devices(32))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tensor", "pad", "held"),
    [
        (8, 2, 2, (), (8, 2)),
        (8, 2, 4, (), (8, 4)),  # each KV head twice, with half of its queries
        (14, 2, 4, (), (16, 4)),  # seven queries in two halves of four
        (71, 1, 8, (), (72, 8)),
        (8, 8, 16, (), (16, 16)),
        (9, 3, 4, (), (9, 3)),  # refused where parameters are placed
        (9, 3, 4, ("heads",), (12, 4)),
        (9, 3, 4, ("kv_heads",), (12, 4)),
        (12, 6, 4, ("heads",), (16, 8)),
    ],
)
def test_key_heads_are_repeated_or_padded(heads, kv_heads, tensor, pad, held):
    spec = ShardingSpec({"heads": "tensor"}, pad=frozenset(pad))
    padded = spec.padded({"heads": heads, "kv_heads": kv_heads}, {"tensor": tensor})
    assert (padded["heads"], padded["kv_heads"]) == held


def test_key_heads_follow_heads():
    spec = ShardingSpec({"heads": "tensor", "embed": None})
    assert spec.resolve(("kv_heads", "embed"), (8, 8), devices(4)) == PartitionSpec("tensor", None)
    apart = replace(spec, rules={**spec.rules, "kv_heads": None})
    assert apart.resolve(("kv_heads", "embed"), (8, 8), devices(4)) == PartitionSpec(None, None)
    with pytest.raises(ValueError, match=r"'kv_heads' of size 3 .* tensor = 1, 3 and multiples of 3, or padded to 4"):
        spec.resolve(("kv_heads",), (3,), devices(4))


def test_sections_have_rules_of_their_own():
    spec = ShardingSpec(
        {"heads": "tensor", "embed": None},
        parameters={"layers.*": {"heads": None}, "layers.3.out.*": {"heads": "tensor"}},
        activations={"tokens": "tensor"},
        pool={"heads": None},
    )
    axes, shape = ("heads", "embed"), (8, 8)
    assert spec.resolve(axes, shape, devices(4), name="other.kernel") == PartitionSpec("tensor", None)
    assert spec.resolve(axes, shape, devices(4), name="layers.3.qkv.kernel") == PartitionSpec(None, None)
    assert spec.resolve(axes, shape, devices(4), name="layers.3.out.kernel") == PartitionSpec("tensor", None)
    assert spec.resolve((None, "heads"), shape, devices(4), section="pool") == PartitionSpec(None, None)
    assert spec.resolve(("tokens", "embed"), shape, devices(4), section="activations") == PartitionSpec("tensor", None)
    follows = ShardingSpec({"heads": "tensor"})
    assert follows.resolve((None, "heads"), shape, devices(4), section="pool") == PartitionSpec(None, "tensor")


@pytest.mark.parametrize(
    ("glob", "layers"),
    [
        ("layers.0-9.up.*", range(10)),
        ("layers.8-11.*", range(8, 12)),
        ("layers.3,10-11.up.kernel", (3, 10, 11)),
        ("layers.*.up.kernel", range(12)),
        ("*.1?.up.*", (10, 11)),
        ("layers.[0-3].up.*", range(4)),
        ("layers.0-3.up", ()),
    ],
)
def test_a_glob_may_name_layers(glob, layers):
    spec = replace(SPEC, parameters={glob: {"ffn": None}})
    split = [spec.resolve(("ffn",), (8,), devices(4), name=f"layers.{i}.up.kernel") for i in range(12)]
    assert [i for i, each in enumerate(split) if each == PartitionSpec(None)] == list(layers)
    assert spec.resolve(("ffn",), (8,), devices(4), name="embed.up.kernel") == PartitionSpec("tensor")


OVERRIDES = """
[axes]
vocab = "none"
[parameters."layers.*.qkv.bias"]
heads = "none"
[activations]
tokens = "tensor"
[pool]
heads = "none"
[pad]
heads = true
vocab = false
"""


def test_a_file_changes_what_it_names(tmp_path):
    path = tmp_path / "my.toml"
    path.write_text(OVERRIDES)
    base = replace(SPEC, pad=frozenset({"vocab", "ffn"}))
    assert read(path, base) == ShardingSpec(
        {**SPEC.rules, "vocab": None},
        parameters={"layers.*.qkv.bias": {"heads": None}},
        activations={"tokens": "tensor"},
        pool={"heads": None},
        pad=frozenset({"heads", "ffn"}),
    )
    path.write_text("")
    assert read(path, base) == base


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[axis]\nvocab = 'none'", r"my.toml: there is no section \[axis\]; did you mean 'axes'\?"),
        ("[axes]\nhedas = 'none'", r"my.toml: \[axes\] names unknown logical axis 'hedas'; did you mean 'heads'\?"),
        (
            "[axes]\nheads = 1",
            r"my.toml: \[axes\] heads is 1; it must be the name of a mesh axis, a list of names, or \"none\"",
        ),
        ("axes = 3", r"my.toml: axes is 3; write a section \[axes\]"),
        ("[parameters.'a*']\nhead = 'none'", r"\[parameters.\"a\*\"\] names unknown logical axis 'head'.*'heads'\?"),
        ("parameters = 3", r"my.toml: parameters is 3; write a section \[parameters"),
        ("[activations]\ntoken = 'none'", r"my.toml: \[activations\] names .*; did you mean 'tokens'\?"),
        ("[pool]\nffn = 'none'", r"my.toml: \[pool\] names unknown logical axis 'ffn'; there are 'heads'"),
        (
            "[pad]\nembed = true",
            r"my.toml: \[pad\] names unknown logical axis 'embed'.*; there are 'heads', 'kv_heads', 'vocab', 'ffn'",
        ),
        ("[pad]\nheads = 128", r"my.toml: \[pad\] heads is 128; it must be true or false"),
        ("[axes", r"my.toml is not TOML: Expected '\]'"),
    ],
)
def test_a_file_that_means_nothing_is_refused_in_words(tmp_path, text, message):
    path = tmp_path / "my.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read(path, SPEC)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none.toml cannot be read: No such file"):
        read(tmp_path / "none.toml", SPEC)


PARAMETERS = {"layers.0.qkv.bias": ("heads",), "layers.1.qkv.bias": ("heads",), "head.tokens.table": ("vocab", "embed")}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (ShardingSpec({"heads": "tensro"}), r"\[axes\]: logical axis 'heads' goes to 'tensro', .*'tensor'\?"),
        (
            replace(SPEC, activations={"tokens": "data"}),
            r"\[activations\]: .* 'tokens' goes to 'data'.*; there are 'tensor'",
        ),
        (replace(SPEC, pool={"heads": "model"}), r"\[pool\]: logical axis 'heads' goes to 'model'"),
        (
            replace(SPEC, parameters={"layer.*.qkv.bias": {"heads": None}}),
            r"\[parameters.\"layer.\*.qkv.bias\"\] matches no parameter; did you mean 'layers.\*.qkv.bias'\?",
        ),
        (
            replace(SPEC, parameters={"layers.*.qkv.bias": {"embed": None}}),
            r"layers.0.qkv.bias has no logical axis 'embed'; there are 'heads'",
        ),
        (
            replace(SPEC, parameters={"layers.0,1-2.*": {"heads": None}}),
            r"\[parameters.\"layers.0,1-2.\*\"\]: there are no layers 1-2; the model has 0-1$",
        ),
        (
            replace(SPEC, parameters={"layers.1-0.*": {"heads": None}}),
            r"\[parameters.\"layers.1-0.\*\"\]: 1-0 has no layers; write 0-1$",
        ),
        (
            replace(SPEC, parameters={"layers.0-99999999999.*": {"heads": None}}),
            r"there are no layers 0-99999999999; the model has 0-1$",
        ),
        (
            replace(SPEC, parameters={"layer.0-1.qkv.bias": {"heads": None}}),
            r"\[parameters.\"layer.0-1.qkv.bias\"\] matches no parameter; did you mean 'layers.\*.qkv.bias'\?",
        ),
    ],
)
def test_names_are_checked_in_every_section(spec, message):
    SPEC.check_names(devices(4), PARAMETERS)
    with pytest.raises(ValueError, match=message):
        spec.check_names(devices(4), PARAMETERS)


def test_an_axis_of_the_mesh_that_no_rule_names_holds_copies():
    wide = AbstractMesh((2, 4), ("replica", "tensor"), axis_types=(AxisType.Auto,) * 2)
    assert SPEC.resolve(("heads", "embed"), (24, 16), wide) == PartitionSpec("tensor", None)


def test_an_axis_is_split_over_several_mesh_axes(tmp_path):
    wide = AbstractMesh((2, 4), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    (tmp_path / "my.toml").write_text('[axes]\nffn = ["fsdp", "tensor"]\nembed = ["fsdp"]\n')
    spec = read(tmp_path / "my.toml", SPEC)
    assert spec.resolve(("heads", "embed"), (24, 16), wide) == PartitionSpec("tensor", "fsdp")
    assert spec.resolve(("ffn",), (24,), wide) == PartitionSpec(("fsdp", "tensor"))
    assert spec.padded({"ffn": 24, "vocab": 30, "heads": 4}, wide.shape)["vocab"] == 32
    assert replace(spec, pad=frozenset({"ffn"})).padded({"ffn": 26, "heads": 4}, wide.shape)["ffn"] == 32
    with pytest.raises(ValueError, match=r"up: logical axes 'ffn' and 'embed' are both on mesh axis 'fsdp'"):
        spec.resolve(("ffn", "embed"), (24, 16), wide, name="up")
    message = (
        r"axis 'ffn' of size 20 does not divide over mesh axes 'fsdp', 'tensor' of size 2 x 4; it does for fsdp x "
    )
    with pytest.raises(ValueError, match=message + r"tensor = 1, 2, 4, 5, 10, 20"):
        spec.resolve(("ffn",), (20,), wide)
    with pytest.raises(ValueError, match=r"\[axes\]: logical axis 'ffn' goes to 'fsdp', which is not an axis"):
        spec.check_names(devices(4), {})


def test_weights_are_gathered_over_the_axes_that_a_file_names(tmp_path):
    (tmp_path / "my.toml").write_text('[gather]\nweights = ["fsdp", "other"]\n')
    spec = read(tmp_path / "my.toml", SPEC)
    assert spec.gathered(PartitionSpec(("fsdp", "tensor"), "other", None)) == PartitionSpec(("tensor",), None, None)
    with pytest.raises(ValueError, match=r"\[gather\]: logical axis 'weights' goes to 'fsdp', which is not an axis"):
        spec.check_names(devices(4), {})


def test_mesh_devices_and_axis_types():
    made = mesh.make_mesh({"tensor": 1})
    assert isinstance(made, Mesh)
    assert made.axis_names == ("tensor",)
    assert made.axis_types == (AxisType.Auto,)
    assert made.devices.tolist() == jax.devices()[:1]
    many = np.repeat(jax.devices()[0], 3).tolist()
    with pytest.raises(ValueError, match=r"data 2 times tensor 2 is 4, which must be .* at most the 3 devices"):
        mesh.make_mesh({"data": 2, "tensor": 2}, many)
    wide = mesh.make_mesh({"data": 2, "one": 1, "tensor": 4})
    assert wide.devices[1, 0].tolist() == jax.devices()[4:8]


def test_a_family_without_a_default_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'mamba' has no sharding; there are bloom, "):
        specs.default("mamba")
