"""Saves parameters with Orbax, and restores them onto any devices in any dtype.

Orbax takes 0.8 s to import, so functions import it when they need it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxserve.models.products import Quantized
from jaxserve.weights import narrow
from jaxserve.weights.checkpoint import CheckpointError, read_json
from jaxserve.weights.regions import StoredLayout
from sharding.spec import ShardingSpec

_MARKER = "jaxserve.json"
_ARRAYS = "weights"
_IN_FLIGHT = 256 * 2**20  # bytes restored at a time
_FILE = 128 * 2**20  # approximate bytes of a data file
_VERSION = 1  # of the names and layouts of parameters


def is_saved(directory: Path) -> bool:
    """Whether a directory was written by `save`."""
    return (directory / _MARKER).is_file()


def save(directory: Path, arrays: dict[str, jax.Array], fingerprint: str) -> None:
    """Writes arrays by name, then the marker file that `is_saved` looks for."""
    import orbax.checkpoint as ocp

    largest = max(array.nbytes for array in arrays.values())
    handler = ocp.PyTreeCheckpointHandler(save_concurrent_gb=1 + largest // 10**9)
    options = ocp.args.PyTreeSave(arrays, ocdbt_target_data_file_size=_FILE)  # files are assembled in memory
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(directory.resolve() / _ARRAYS, options)
    marker = {"version": _VERSION, "fingerprint": fingerprint}
    (directory / _MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")


def fingerprint(directory: Path) -> str:
    """The fingerprint that `save` wrote. Raises CheckpointError."""
    return str(_read_marker(directory)["fingerprint"])


def restore(
    directory: Path,
    targets: dict[str, jax.ShapeDtypeStruct | Quantized],
    saved: dict[str, tuple[int, ...]] | None = None,
    layouts: dict[str, StoredLayout] | None = None,
) -> dict[str, jax.Array | Quantized]:
    """Reads arrays by name into the dtype and sharding of each target.

    Args:
      targets: shapes with shardings; a `Quantized` target is quantized after reading.
      saved: the stored shapes, if targets are larger; the padding is zero.
      layouts: where the entries of targets are stored, if not at the same indices.

    Raises:
      CheckpointError: other names or shapes were saved, or the files are damaged.
    """
    import orbax.checkpoint as ocp

    _read_marker(directory)
    saved = saved or {name: target.shape for name, target in targets.items()}
    folder = directory.resolve() / _ARRAYS
    arrays: dict[str, jax.Array | Quantized] = {}
    moved = {name: each for name, each in (layouts or {}).items() if len(each.runs) > 1}
    read = {name: _as_read(target, saved[name] if name in moved else None) for name, target in targets.items()}
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            found = checkpointer.metadata(folder).item_metadata.tree
            _check(directory, {name: tuple(entry.shape) for name, entry in found.items()}, saved)
            for group in _groups(read):
                restore_args = ocp.checkpoint_utils.construct_restore_args(group)
                for name, target in group.items():
                    if name not in moved and target.shape != saved[name]:
                        restore_args[name] = dataclasses.replace(restore_args[name], strict=False)
                options = ocp.args.PyTreeRestore(item=group, restore_args=restore_args, partial_restore=True)
                for name, array in jax.block_until_ready(checkpointer.restore(folder, options)).items():
                    target = targets[name]
                    if name in moved:
                        array = _move(array, _as_read(target), moved[name])
                    if not isinstance(target, Quantized) and target.format.layout is not None:
                        array = jax.device_put(array, target.format)
                    arrays[name] = narrow.on_devices(array, target) if isinstance(target, Quantized) else array
    except CheckpointError:
        raise
    except Exception as error:  # Orbax and its storage raise various types for missing or damaged files
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{folder} cannot be restored: {reason}") from error
    return arrays


def _as_read(target: jax.ShapeDtypeStruct | Quantized, whole: tuple[int, ...] | None = None) -> jax.ShapeDtypeStruct:
    """The array to restore for a target: float32 if it is quantized, replicated if `whole`."""
    dtype, like = (jnp.float32, target.values) if isinstance(target, Quantized) else (target.dtype, target)
    sharding = like.sharding
    if whole is not None and isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, ShardingSpec({}).resolve((), (), sharding.mesh))
    return jax.ShapeDtypeStruct(whole or target.shape, dtype, sharding=sharding)


def _move(array: jax.Array, target: jax.ShapeDtypeStruct, layout: StoredLayout) -> jax.Array:
    """Moves the entries of a restored array to their indices in a padded model."""
    axis, index = layout.axis, layout.places
    index = np.pad(index, (0, target.shape[axis] - len(index)), constant_values=-1)

    def take(x: jax.Array) -> jax.Array:
        return jnp.take(x, jnp.where(index < 0, x.shape[axis], index), axis, mode="fill", fill_value=0)

    return jax.jit(take, out_shardings=target.sharding)(array)


def _groups(targets: dict[str, jax.ShapeDtypeStruct]) -> Iterator[dict[str, jax.ShapeDtypeStruct]]:
    """Groups of arrays to restore together, the largest first.

    An array that is being restored needs its memory twice, so the last groups should be small.
    """
    group: dict[str, jax.ShapeDtypeStruct] = {}
    taken = 0
    for name, target in sorted(targets.items(), key=lambda item: -math.prod(item[1].shape)):
        size = math.prod(target.shape) * target.dtype.itemsize
        if group and taken + size > _IN_FLIGHT:
            yield group
            group, taken = {}, 0
        group[name] = target
        taken += size
    yield group


def _read_marker(directory: Path) -> dict:
    marker = read_json(directory / _MARKER)
    if marker.get("version") != _VERSION or "fingerprint" not in marker:
        raise CheckpointError(
            f"{directory / _MARKER} has version {marker.get('version')!r}, but version "
            f"{_VERSION} is needed; convert the checkpoint again"
        )
    return marker


def _check(directory: Path, saved: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]) -> None:
    for name in sorted(saved.keys() | wanted.keys()):
        if name not in saved:
            raise CheckpointError(f"{directory}: parameter {name!r} is missing")
        if name not in wanted:
            raise CheckpointError(f"{directory}: parameter {name!r} does not belong to the model in config.json")
        if saved[name] != wanted[name]:
            raise CheckpointError(
                f"{directory}: parameter {name!r} has shape {list(saved[name])} where config.json asks for "
                f"{list(wanted[name])}"
            )
