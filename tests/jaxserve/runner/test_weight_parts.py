"""Products of int4 matrices whose parts lie on several devices: the same numbers as on one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.products import Quantized, bind, widened
from jaxserve.runner import cpu_products, matmul, weight_parts
from sharding import mesh as meshes
from sharding import specs
from sharding.spec import ShardingSpec, Target, partition
from tests.jaxserve.runner.test_matmul import draw_int4

BLOOM = specs.default("bloom")


def described(matrix: Quantized, on: jax.sharding.Mesh, *targets: Target) -> Quantized:
    """The shapes and shardings of a matrix that is divided like this."""
    held = jax.sharding.NamedSharding(on, partition(*targets))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=held), matrix)


def multiplied(x: jax.Array, matrix: Quantized, spec: ShardingSpec, *targets: Target) -> tuple[jax.Array, list]:
    """The product over six devices, and the shapes of what each multiplies: x, values and scales."""
    on = meshes.make_mesh({"x": 2, "y": 3})
    bias = jnp.zeros(matrix.shape[0])
    bound = bind({"kernel": matrix, "bias": bias}, matmul.DeviceProducts(native=None))
    shapes = {"kernel": described(matrix, on, *targets), "bias": bias}
    weight = weight_parts.divided(bound, shapes, on, spec, "gpu")["kernel"]
    seen = []

    def product(x: jax.Array, matrix: Quantized) -> jax.Array:
        seen.append((x.shape, matrix.shape, matrix.scales.shape))
        return cpu_products.multiply_tiles(x, matrix)

    found = jax.jit(lambda x: weight.matmul.parts(product, x, weight.matrix, jnp.float32))(x)
    exact = np.asarray(x, np.float64) @ np.asarray(widened(matrix, jnp.float32), np.float64).T
    np.testing.assert_allclose(found, exact, atol=1e-5 * np.abs(exact).max())
    return found, seen


@pytest.mark.parametrize("zeros", [pytest.param(False, marks=pytest.mark.exhaustive), True])
@pytest.mark.parametrize(
    ("targets", "part"),
    [
        (("y", None), (8, 192)),
        ((None, "y"), (24, 64)),
        ((None, None), (24, 192)),
        ((("x", "y"), None), (4, 192)),
        (("x", "y"), (12, 64)),
    ],
    ids=str,
)
def test_parts_multiply_as_one_device(targets, part, zeros):
    x, matrix = jax.random.normal(jax.random.key(0), (5, 192)), draw_int4(24, 192, 32, "float32", zeros=zeros)
    _, seen = multiplied(x, matrix, BLOOM, *targets)
    assert seen == [((5, part[1]), part, (part[0], part[1] // 32))]


@pytest.mark.parametrize(
    ("changes", "targets", "tokens", "part", "made"),
    [
        ({"activations": {"tokens": "x"}}, ("y", None), 3, (8, 192), (3, 8)),
        ({"activations": {"tokens": "x"}}, (None, "y"), 3, (24, 64), (3, 24)),
        ({"activations": {"tokens": "y"}}, ("y", None), 6, (8, 192), (6, 8)),
        ({"activations": {"tokens": "y"}}, (None, "y"), 6, (24, 64), (2, 24)),
        ({"activations": {"tokens": "y"}}, ("x", "y"), 6, (12, 64), (2, 12)),
        ({"activations": {"embed": "y"}}, ("y", None), 6, (8, 192), (6, 8)),
        ({"activations": {"embed": "y"}}, (None, "y"), 6, (24, 64), (6, 8)),
        ({"activations": {"tokens": "x", "embed": "y"}}, (None, "y"), 3, (24, 64), (3, 8)),
        ({"activations": {"embed": ("x", "y")}}, (None, ("x", "y")), 6, (24, 32), (6, 4)),
        ({"gather": ("y",)}, ("x", "y"), 6, (12, 192), (6, 12)),
    ],
    ids=str,
)
def test_parts_follow_how_hidden_states_are_split(changes, targets, tokens, part, made):
    x, matrix = jax.random.normal(jax.random.key(0), (6, 192)), draw_int4(24, 192, 32, "float32", zeros=True)
    found, seen = multiplied(x, matrix, dataclasses.replace(BLOOM, **changes), *targets)
    assert seen == [((tokens, part[1]), part, (part[0], part[1] // 32))]
    assert found.sharding.shard_shape(found.shape) == made


def test_outputs_that_do_not_divide_stay_whole():
    x, matrix = jax.random.normal(jax.random.key(0), (6, 192)), draw_int4(25, 192, 32, "float32", zeros=True)
    found, _ = multiplied(x, matrix, dataclasses.replace(BLOOM, activations={"embed": "y"}), None, "y")
    assert found.sharding.is_fully_replicated


def test_other_products_are_left_to_the_compiler():
    on, matrix = meshes.make_mesh({"y": 2}), draw_int4(24, 192, 32, "float32", zeros=False)
    by_row = Quantized(matrix.values.astype(jnp.int8), matrix.scales[:, 0])
    bound = bind({"groups": matrix, "rows": by_row}, matmul.DeviceProducts(native=None))
    shapes = {"groups": described(matrix, on, "y", None), "rows": described(by_row, on, "y")}

    def divided(platform: str) -> set[str]:
        found = weight_parts.divided(bound, shapes, on, BLOOM, platform)
        assert weight_parts.needed(shapes, platform) == any(each.matmul.parts for each in found.values())
        return {name for name, each in found.items() if each.matmul.parts is not None}

    assert divided("cpu") == set()
    assert divided("tpu") == {"groups"}
    assert divided("gpu") == {"groups", "rows"}
    assert not weight_parts.needed({"rows": by_row}, "tpu")
