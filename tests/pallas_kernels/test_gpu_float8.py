"""Products with float8 kernels for GPUs in Triton's interpreter, against NumPy in float64."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gpu import float8

multiply = jax.jit(partial(float8.multiply, device_kind="", interpret=True))


def test_all_numbers_are_widened_exactly():
    bits = np.arange(256, dtype=np.uint8)
    values = jax.lax.bitcast_convert_type(jnp.asarray(bits[:, None]), jnp.float8_e4m3fn)
    found = np.asarray(multiply(jnp.ones((1, 1), jnp.bfloat16), values))[0]
    np.testing.assert_array_equal(found, np.asarray(values, np.float32)[:, 0])
    assert np.isnan(found[[0x7F, 0xFF]]).all()


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(3, 70, 200), (20, 64, 128)])
def test_a_float8_matrix(rows, outputs, inputs, seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, inputs)).astype(jnp.bfloat16)
    values = rng.standard_normal((outputs, inputs)).astype(jnp.float8_e4m3fn)
    exact = x.astype(np.float64) @ values.astype(np.float64).T
    np.testing.assert_allclose(multiply(x, values), exact, rtol=2e-6, atol=2e-6 * np.abs(exact).max())


def test_only_devices_without_float8_need_it():
    found = [float8.pays(kind) for kind in ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA H200", "cpu")]
    assert found == [True, False, False, False]
