"""Writes checkpoints as Hugging Face directories or with Orbax, and fingerprints them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import save_file

from jaxserve import models
from jaxserve.models.schema import ModelConfig
from jaxserve.weights import mapped_orbax, naming, orbax
from jaxserve.weights.checkpoint import CheckpointError, StoredTensors, read_config
from jaxserve.weights.loading import Progress, load
from jaxserve.weights.naming import parameters
from jaxserve.weights.regions import layout, tensor_shapes
from jaxserve.weights.stored import FLOATS

_COPIED = (
    *("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "vocab.json", "merges.txt"),
    *("added_tokens.json", "chat_template.jinja"),
)


def write_hf(path: str | Path, config: ModelConfig, params: models.Params, dtype: jnp.dtype | None = None) -> None:
    """Writes a Hugging Face directory (config.json, model.safetensors).

    Args:
      path: directory; created if it does not exist.
      dtype: dtype of the stored values; None keeps that of each parameter.
    """
    directory, model = Path(path), models.build(config)
    family = models.family(config.family)
    name_of = naming.TensorNames(model, (family.PREFIX + model.stored_table()["embed"]["tokens"]["table"].name,))
    tensors = {}
    for parameter, leaf in zip(parameters(model, jnp.float32), jax.tree.leaves(params), strict=True):
        name, shape, axes, stored = parameter
        values = np.asarray(leaf) if dtype is None else np.asarray(leaf).astype(dtype)
        shapes = tensor_shapes(config, name, shape.shape, stored)
        names = [name_of(each) for each in stored.names]
        for full_name, size in zip(names, shapes, strict=True):
            tensors.setdefault(full_name, np.zeros(size, values.dtype))
        views = [stored.view(tensors[full_name]) for full_name in names]
        if stored.experts:
            views = [view[None] for view in views]
        axis, runs = layout(model, name, axes, shape.shape, stored)
        before = (slice(None),) * axis
        for start, length, tensor, place in runs:
            views[tensor][*before, place : place + length] = values[*before, start : start + length]
    directory.mkdir(parents=True, exist_ok=True)
    kind = str(max(tensors.values(), key=np.size).dtype)  # biases and norms may be wider
    entries = family.hf_config(config) | {"torch_dtype": kind}
    (directory / "config.json").write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
    file = directory / "model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o644)  # save_file makes it readable by the owner only


def convert(
    source: str | Path, target: str | Path, dtype: jnp.dtype | None = None, progress: Progress | None = None
) -> None:
    """Converts a Hugging Face directory to Orbax, with its configuration and tokenizer.

    The target is renamed into place when it is complete.

    Args:
      target: must not exist, or be empty.
      dtype: dtype of the saved matrices; None keeps that of the stored ones that are not quantized. `load` casts to any
        dtype.

    Raises:
      CheckpointError: the source cannot be read, or the target exists and is not empty.
    """
    directory = Path(source)
    config = read_config(directory)
    if orbax.is_saved(directory):
        raise CheckpointError(f"{directory} is already converted")
    _check_is_free(Path(target))
    tensors = StoredTensors(directory)
    if dtype is None:
        matrices = (tensors[name].values for name in tensors.names() if len(tensors[name].shape) > 1)
        kept = {values.dtype for values in matrices}.intersection(FLOATS)
        dtype = jnp.result_type(*kept or {np.float32})
    model, host = models.build(config), SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    params = load(directory, model, dtype, place=lambda *_: host, progress=progress)
    names = [parameter.name for parameter in parameters(model, dtype)]
    with _renamed_when_complete(directory, Path(target)) as partial:
        arrays = dict(zip(names, jax.tree.leaves(params), strict=True))
        orbax.save(partial, arrays, f"{fingerprint(directory)}-{jnp.dtype(dtype).name}")


def convert_mapped(
    source: str | Path, target: str | Path, mapping: str | Path, progress: Progress | None = None
) -> None:
    """Converts another program's Orbax checkpoint to Hugging Face's layout, by a mapping file.

    The target is renamed into place when it is complete.

    Args:
      source: the directory with config.json and the tokenizer.
      target: must not exist, or be empty.
      mapping: see `mapped_orbax`.

    Raises:
      CheckpointError: something cannot be read, the tensors are not the model's, or the target is not empty.
    """
    directory = Path(source)
    model = models.build(read_config(directory))
    _check_is_free(Path(target))
    with _renamed_when_complete(directory, Path(target)) as partial:
        for done, total in mapped_orbax.write_safetensors(directory, Path(mapping), partial):
            if progress is not None:
                progress("converting weights", done, total)
        naming.match(StoredTensors(partial), model, list(parameters(model, jnp.dtype(jnp.float32))), partial)


def _check_is_free(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} exists and is not an empty directory")


@contextlib.contextmanager
def _renamed_when_complete(source: Path, out: Path) -> Iterator[Path]:
    """A directory with the source's configuration and tokenizer, which becomes `out` at the end."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        for file in sorted(path for pattern in _COPIED for path in source.glob(pattern)):
            shutil.copyfile(file, partial / file.name)
        yield partial
        partial.chmod(0o755)
        partial.replace(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def fingerprint(path: str | Path) -> str:
    """A digest of a checkpoint; reads only some of its bytes (milliseconds).

    Raises:
      CheckpointError: the checkpoint cannot be read.
    """
    directory = Path(path)
    if orbax.is_saved(directory):
        return orbax.fingerprint(directory)
    try:
        config = (directory / "config.json").read_bytes()
    except OSError as error:
        raise CheckpointError(f"{directory / 'config.json'} cannot be read: {error.strerror}") from None
    return hashlib.sha256(config + StoredTensors(directory).fingerprint().encode()).hexdigest()
