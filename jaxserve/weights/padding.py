"""Pads parameters to the sizes that devices divide, and removes the padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve import models
from jaxserve.models.products import Quantized
from jaxserve.weights.naming import parameters
from jaxserve.weights.narrow import is_matrix
from jaxserve.weights.regions import UNCHANGED, StoredLayout, layout


def padded(model: models.Model, params: models.Params) -> models.Params:
    """Pads a model's parameters; leaves that have the padded shape are unchanged."""
    return _convert_leaves(model, params, model, StoredLayout.pad)


def unpadded(model: models.Model, params: models.Params) -> models.Params:
    """Removes the padding of parameters; leaves that have the unpadded shape are unchanged."""
    return _convert_leaves(model, params, model.unpadded, StoredLayout.unpad)


def _convert_leaves(
    model: models.Model,
    params: models.Params,
    like: models.Model,
    move: Callable[[StoredLayout, Any, tuple[int, ...]], Any],
) -> models.Params:
    """Applies `move` (`StoredLayout.pad` or `unpad`) to leaves shaped unlike those of `like`."""
    wanted = parameters(model.unpadded, jnp.dtype(jnp.float32))
    shapes = [leaf.shape for leaf in jax.tree.leaves(like.shapes(jnp.float32))]
    leaves, structure = jax.tree.flatten(params, is_leaf=is_matrix)
    moved = []
    for (name, own, axes, _), shape, leaf in zip(wanted, shapes, leaves, strict=True):
        if leaf.shape != shape:
            of = layout(model, name, axes, own.shape, UNCHANGED)
            leaf = _move_quantized(of, leaf, shape, move) if is_matrix(leaf) else move(of, leaf, shape)
        moved.append(leaf)
    return jax.tree.unflatten(structure, moved)


def _move_quantized(
    of: StoredLayout,
    leaf: Quantized,
    shape: tuple[int, ...],
    move: Callable[[StoredLayout, Any, tuple[int, ...]], Any],
) -> Quantized:
    """A quantized matrix after `move`; scales and zero points go with their rows and groups."""
    values, of_inputs = move(of, leaf.values, shape), of.axis == len(shape) - 1
    if leaf.group is None:
        return Quantized(values, leaf.scales if of_inputs else move(of, leaf.scales, shape[:-1]))
    of, groups = of.in_units(leaf.group) if of_inputs else of, (*shape[:-1], shape[-1] // leaf.group)
    beside = (part if part is None else move(of, part, groups) for part in leaf[1:])
    return Quantized(values, *beside)
