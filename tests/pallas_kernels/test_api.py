from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import api
from pallas_kernels.cpu import build


def shape(**kw):
    base = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 16, "dtype": jnp.float32, "pool_dtype": jnp.float32}
    return api.AttentionShape(**(base | {"alibi": True} | kw))


def test_auto_says_what_it_picked_and_why():
    selection = api.select("auto", shape(), "tpu")
    assert selection.backend.name == "tpu"
    assert "tpu is the first that serves tpu" in selection.reason
    selection = api.select("auto", shape(), "cpu")
    assert selection.backend.name == ("xla" if build.refusal() else "cpu")
    assert f"{selection.backend.name} is the first that serves cpu" in selection.reason


def test_named_backend_is_taken_at_its_word():
    assert api.select("xla", shape(), "tpu").backend.name == "xla"


def test_unknown_backend_names_the_known_ones():
    with pytest.raises(ValueError, match=r"'cudnn' is not known.*auto.*xla"):
        api.select("cudnn", shape(), "cpu")


def test_refusals_carry_the_reason():
    odd = shape(pool_dtype=np.int16)
    with pytest.raises(ValueError, match=r"'xla' cannot serve: pool of int16"):
        api.select("xla", odd, "cpu")
    with pytest.raises(ValueError, match=r"no attention backend can serve.*not xla: pool of int16"):
        api.select("auto", odd, "cpu")


@pytest.mark.parametrize("name", api.MODULES)
def test_backend_table(name):
    backend = api.load(name)
    assert backend.name == name
    chosen = shape().with_blocks(backend.default_block_size(shape()), 100)
    assert chosen.max_blocks * chosen.block_size >= 100
    assert backend.supports(chosen) == (build.refusal() if name == "cpu" else None)


def test_pool_is_held_in_the_dtype_of_the_queries():
    for dtype in (np.dtype(np.float32), np.dtype(jnp.bfloat16)):
        assert api.load("xla").default_pool_dtype(dtype, "cpu") == dtype


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("num_heads", 0, "num_heads is 0"),
        ("num_kv_heads", 3, "num_kv_heads is 3; it must divide num_heads, which is 4"),
        ("head_dim", 0, "head_dim is 0"),
        ("block_size", -1, "block_size is -1"),
        ("soft_cap", 0.0, "soft_cap is 0.0; it must be more than 0"),
        ("windows", (), r"windows is \(\)"),
        ("windows", (None, 0), r"windows is \(None, 0\); each must be at least 1"),
    ],
)
def test_wrong_shapes_are_named(field, value, words):
    with pytest.raises(ValueError, match=words):
        shape(**{field: value})


def test_shapes_are_values():
    assert shape(dtype="float32") == shape(dtype=np.dtype(np.float32))
    assert hash(shape()) == hash(shape())
    with pytest.raises(ValueError, match="block_size is 0"):
        shape().with_blocks(0, 100)
