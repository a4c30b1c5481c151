"""Matrix products by XLA's compiler for CPUs, in the forms that it is fast in."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Float8e4m3fn, Int8

from jaxserve.models import experts
from jaxserve.models.products import Quantized, dot, widened

INTEGER_ROWS = 8  # most rows that int8 matrices multiply as integers
_FEW_ROWS, _MANY_ROWS = 4, 256  # between these row counts `multiply` puts the kernel first
_RUN_ROWS = 16  # rows of an expert that are multiplied at a time
_TILE = 256  # kernel rows that are widened at a time


def multiply(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiplies with the operand order fastest in XLA's CPU matmul (measured in jax 0.10.2).

    From a few to about 200 rows this is kernel times x: half the time of the reverse at 8 rows in float32, five sixths
    at 32 in bfloat16. XLA would swap the operands to remove the transpose, hence the barrier. For more rows it is
    still faster by a few percent if the result is no wider than x. One bfloat16 row is padded to two, since one is 16
    times slower. Sums are float32, since bfloat16 sums are 3 to 7 times slower. Either order takes two thirds of the
    time of a kernel [in, out] at 8 rows, and about the same at 256.
    """
    rows, (out_features, in_features) = x.shape[0], kernel.shape
    few = 1 if x.dtype == jnp.float32 else _FEW_ROWS
    if few <= rows < _MANY_ROWS or (rows >= _MANY_ROWS and out_features <= in_features):
        return jax.lax.optimization_barrier(dot(kernel, x, jnp.float32)).T
    if rows == 1:
        return dot(jnp.pad(x, ((0, 1), (0, 0))), kernel, jnp.float32)[:1]
    return dot(x, kernel, jnp.float32)


def multiply_tiles(
    x: jax.Array, kernel: Int8[jax.Array, "out in"] | Float8e4m3fn[jax.Array, "out in"] | Quantized
) -> jax.Array:
    """Widens a kernel one tile at a time, so that the wide tile stays in the CPU's cache.

    XLA's CPU compiler would write the whole wide kernel to memory first, ten times slower than reading float32.
    """
    outputs = kernel.shape[0]
    tile = min(_TILE, outputs)

    def step(i: jax.Array, sums: jax.Array) -> jax.Array:  # slices are clamped: tiles may overlap
        part = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, i * tile, tile), kernel)
        wide = widened(part, x.dtype) if isinstance(part, Quantized) else part.astype(x.dtype)
        return jax.lax.dynamic_update_slice_in_dim(sums, multiply(x, wide), i * tile, 1)

    return jax.lax.fori_loop(0, -(-outputs // tile), step, jnp.zeros((len(x), outputs), jnp.float32))


def multiply_integers(x: jax.Array, kernel: Int8[jax.Array, "out in"]) -> jax.Array:
    """Multiplies as integers: a row of x is the sum of two int8 rows (15 bits), summed exactly.

    The kernel is read in place. One row takes half the time of a bfloat16 kernel, 8 rows the same, more are slower.
    """
    wide = x.astype(jnp.float32)
    step = jnp.max(jnp.abs(wide), axis=1, keepdims=True) / 127
    step = jnp.where(step == 0, 1, step)  # a row that is not finite gives NaN
    high = jnp.round(wide / step)
    low = jnp.round((wide - high * step) * (254 / step))
    rows = jnp.concatenate([high, low]).astype(jnp.int8)
    sums = jax.lax.dot_general(rows, kernel, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
    high_sums, low_sums = jnp.split(sums.astype(jnp.float32), 2)
    return (high_sums + low_sums / 254) * step


def multiply_runs(x: jax.Array, kernels: jax.Array | Quantized, sizes: jax.Array) -> jax.Array:
    """Multiplies tiles of a run's rows, so that experts without rows are not read.

    XLA's CPU compiler would multiply every row by every kernel.
    """
    values = kernels.values if isinstance(kernels, Quantized) else kernels
    rows, tile = len(x), min(_RUN_ROWS, len(x))
    ends, tiles = jnp.cumsum(sizes), -(-sizes // tile)
    last_tiles = jnp.cumsum(tiles)

    def step(i: jax.Array, y: jax.Array) -> jax.Array:
        group = jnp.sum(last_tiles <= i)
        start = ends[group] - sizes[group] + (i - last_tiles[group] + tiles[group]) * tile
        origin = jnp.minimum(start, rows - tile)
        kernel = jax.lax.dynamic_index_in_dim(values, group, keepdims=False).astype(x.dtype)
        new = multiply(jax.lax.dynamic_slice_in_dim(x, origin, tile), kernel)
        at = origin + jnp.arange(tile)
        old = jax.lax.dynamic_slice_in_dim(y, origin, tile)
        new = jnp.where(((at >= start) & (at < ends[group]))[:, None], new, old)
        return jax.lax.dynamic_update_slice_in_dim(y, new, origin, 0)

    # XLA's CPU compiler would fill the first values of all layers' loops at the start of a program if they were
    # constants, and hold them until their loops: these are zeros that depend on the sizes, which are not negative.
    zeros = jnp.broadcast_to((sizes[0] >> 31).astype(jnp.float32), (rows, values.shape[1]))
    y = jax.lax.fori_loop(0, last_tiles[-1], step, zeros)
    return experts.scaled(y, kernels, sizes)
