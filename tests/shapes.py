"""Annotated dtypes and shapes are checked at run time; tests/test_shapes.py runs this file where they are."""

import importlib

import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from jaxserve.models import products
from jaxserve.runner import batch
from jaxserve.sampling import sampler
from tests.conftest import SHAPE_CHECKED


@pytest.mark.parametrize("name", SHAPE_CHECKED)
def test_every_module_named_is_there(name) -> None:
    importlib.import_module(name)


@pytest.mark.parametrize(
    ("kernel", "is_right"), [((5, 4), True), ((4, 5), False), ((4,), False)], ids=["right", "turned", "flat"]
)
def test_a_wrong_shape_is_caught(kernel, is_right) -> None:
    if is_right:
        assert products.project(jnp.ones((3, 4)), jnp.ones(kernel)).shape == (3, 5)
        return
    with pytest.raises(TypeCheckError):
        products.project(jnp.ones((3, 4)), jnp.ones(kernel))


def test_sizes_of_one_letter_must_agree() -> None:
    history, tokens = jnp.zeros((2, 8), jnp.int32), jnp.zeros(3, jnp.int32)
    batch.write_tokens(history, jnp.zeros((3, 3), jnp.int32), tokens)
    with pytest.raises(TypeCheckError):
        batch.write_tokens(history, jnp.zeros((2, 3), jnp.int32), tokens)


def test_a_wrong_dtype_is_caught() -> None:
    seed, index = jnp.zeros((2, 2), jnp.uint32), jnp.zeros(2, jnp.int32)
    sampler.uniform(seed, index, index)
    with pytest.raises(TypeCheckError):
        sampler.uniform(seed.astype(jnp.int32), index, index)
