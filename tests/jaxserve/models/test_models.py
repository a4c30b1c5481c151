"""The families: tables that match the parameters, initial weights, scanned layers, gradients."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import models
from jaxserve.models.model import is_tuple
from jaxserve.weights import naming
from sharding import specs
from tests.fixtures import dense
from tests.jaxserve.models.configs import CONFIGS


@pytest.fixture(params=CONFIGS)
def model(request) -> models.Model:
    return models.build(models.parse_config(CONFIGS[request.param]))


# Of these in every run, of the other families in the groups.
FEW = ("bloom", "falcon", "gemma2", "gpt_oss", "qwen3_moe")
FAMILIES = [name if name in FEW else pytest.param(name, marks=pytest.mark.long) for name in models.families()]


@pytest.fixture(params=FAMILIES)
def plain_model(request) -> models.Model:
    return models.build(models.parse_config(CONFIGS[request.param]))


def test_every_family_has_a_config_and_a_sharding():
    assert {config["model_type"] for config in CONFIGS.values()} == set(models.families())
    for name in models.families():
        assert specs.default(name).rules


def test_a_family_is_a_short_file():
    for name in models.families():
        path = Path(models.__file__).with_name(f"{name}.py")
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 131, path


def test_tables_of_a_family_match_its_parameters(model):
    shapes = model.shapes(jnp.float32)
    axes = model.axes()
    stored = model.stored()
    structure = jax.tree.structure(shapes)
    assert jax.tree.structure(axes, is_leaf=is_tuple) == structure
    assert jax.tree.structure(stored, is_leaf=is_tuple) == structure
    places = [(leaf.name, leaf.share, leaf.every) for leaf in jax.tree.leaves(stored, is_leaf=is_tuple)]
    assert len(set(places)) == len(places)
    sizes, config = model.axis_sizes(), model.config
    assert (sizes["vocab"], sizes["embed"]) == (config.vocab_size, config.hidden_size)
    assert (sizes["heads"], sizes["ffn"]) == (config.num_heads, config.ffn_size)
    rules = specs.default(config.family).rules
    for parameter in naming.parameters(model, jnp.float32):
        name, logical, shape = parameter.name, parameter.axes, parameter.shape.shape
        assert len(shape) == len(logical), f"{name} has axes {logical} and shape {shape}"
        wrong = [axis for size, axis in zip(shape, logical, strict=True) if size % sizes[axis]]
        assert not wrong, f"{name} of shape {shape}: {wrong} of axes {logical}, which count {sizes}"
        assert set(logical) <= {*rules, "kv_heads"}, (
            f"{name} has axes {logical}; the family's sharding has rules for {list(rules)}"
        )


def test_init_shapes_and_seed(plain_model):
    first, other = (plain_model.init(seed, jnp.bfloat16) for seed in (0, 1))
    announced = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), plain_model.shapes(jnp.bfloat16))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), first) == announced
    for path, leaf in jax.tree.leaves_with_path(first):
        assert leaf.dtype == (jnp.float32 if leaf.ndim == 1 or path[-1].key == "bias" else jnp.bfloat16), path
    kernels = [tree["layers"][i]["out"]["kernel"] for tree in (first, other) for i in range(2)]
    assert all(bool((a != b).any()) for i, a in enumerate(kernels) for b in kernels[:i])


def test_one_seed_draws_one_model():
    model = models.build(models.parse_config(CONFIGS["bloom"]))
    first, again = (model.init(0, jnp.bfloat16) for _ in range(2))
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, first, again)))


def test_a_config_survives_being_written(model):
    family = models.family(model.config.family)
    assert models.parse_config(family.hf_config(model.config)) == model.config


def test_layers_scanned_equal_layers_unrolled(plain_model):
    params, positions = plain_model.init(0, jnp.float32), jnp.arange(5)
    attend = dense.attend(plain_model.config, 0)

    @jax.jit
    def unrolled(params, x):
        for i in range(plain_model.config.num_layers):
            x, _ = plain_model.layer(params, i, x, positions, attend, None)
        return x

    @jax.jit
    def scanned(params, x):
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["layers"])
        return jax.lax.scan(lambda x, weights: plain_model.block(0, weights, x, positions, attend, None), x, stacked)[0]

    x = jax.random.normal(jax.random.key(1), (5, 24))
    np.testing.assert_allclose(scanned(params, x), unrolled(params, x), atol=1e-5)


@pytest.mark.parametrize(
    "plain_model",
    [
        name if name in ("bloom", "gpt_oss") else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in models.families()
    ],
    indirect=True,
)
def test_gradients_flow_to_every_parameter(plain_model):
    params = plain_model.init(0, jnp.float32)
    tokens = jnp.arange(6)

    def loss(params):
        return -dense.logprobs(plain_model, params, tokens)[:-1, 3].mean()

    sizes = jax.tree.map(lambda leaf: np.abs(leaf).max(), jax.jit(jax.grad(loss))(params))
    assert all(size > 0 for size in jax.tree.leaves(sizes))
