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
from sharding.spec import Target, partition
from tests.jaxserve.runner.test_matmul import draw_int4

BLOOM = specs.default("bloom")


def described(matrix: Quantized, on: jax.sharding.Mesh, *targets: Target) -> Quantized:
    """The shapes and shardings of a matrix that is divided like this."""
    held = jax.sharding.NamedSharding(on, partition(*targets))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=held), matrix)


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
    on = meshes.make_mesh({"x": 2, "y": 3})
    x, matrix = jax.random.normal(jax.random.key(0), (5, 192)), draw_int4(24, 192, 32, "float32", zeros=zeros)
    bound = bind({"kernel": matrix, "bias": jnp.zeros(24)}, matmul.DeviceProducts(native=None))
    shapes = {"kernel": described(matrix, on, *targets), "bias": jnp.zeros(24)}
    weight = weight_parts.divided(bound, shapes, on, BLOOM, "gpu")["kernel"]
    seen = []

    def product(x: jax.Array, matrix: Quantized) -> jax.Array:
        seen.append((x.shape, matrix.shape, matrix.scales.shape))
        return cpu_products.multiply_tiles(x, matrix)

    found = jax.jit(lambda x: weight.matmul.parts(product, x, weight.matrix, jnp.float32))(x)
    exact = np.asarray(x, np.float64) @ np.asarray(widened(matrix, jnp.float32), np.float64).T
    np.testing.assert_allclose(found, exact, atol=1e-5 * np.abs(exact).max())
    assert seen == [((5, part[1]), part, (part[0], part[1] // 32))]


@pytest.mark.parametrize(
    ("platform", "spec"),
    [
        ("tpu", BLOOM),
        ("gpu", dataclasses.replace(BLOOM, activations={"tokens": "y"})),
        ("gpu", dataclasses.replace(BLOOM, gather=("y",))),
    ],
)
def test_other_products_are_left_to_the_compiler(platform, spec):
    on, matrix = meshes.make_mesh({"y": 2}), draw_int4(24, 192, 32, "float32", zeros=False)
    bound = bind({"kernel": matrix}, matmul.DeviceProducts(native=None))
    shapes = {"kernel": described(matrix, on, "y", None)}
    assert weight_parts.divided(bound, shapes, on, spec, platform)["kernel"].matmul.parts is None
