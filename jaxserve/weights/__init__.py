"""Weights between a checkpoint and the devices. What others call is named here: `weights.load`, `weights.write_hf`.

`checkpoint` knows the files of a directory and `naming` which tensor is which parameter; `loading` reads, `saving`
writes; `orbax` is the other form they are kept in, `quantize` how they are held in eight bits.
"""

from jaxserve.weights.checkpoint import CheckpointError, read_config
from jaxserve.weights.loading import Place, Progress, describe, is_matrix, load, on_mesh, on_one_device
from jaxserve.weights.saving import convert, fingerprint, write_hf

__all__ = [
    "CheckpointError",
    "Place",
    "Progress",
    "convert",
    "describe",
    "fingerprint",
    "is_matrix",
    "load",
    "on_mesh",
    "on_one_device",
    "read_config",
    "write_hf",
]
