"""Reads checkpoints into sharded arrays and writes checkpoints.

`checkpoint` reads the files of a directory, `naming` maps tensors to parameters, `loading` loads, `saving` writes,
`orbax` is the converted format, `narrow` quantizes.
"""

from jaxserve.weights.checkpoint import CheckpointError, read_config
from jaxserve.weights.loading import (
    Place,
    Progress,
    describe,
    is_matrix,
    load,
    on_mesh,
    on_one_device,
    padded,
    unpadded,
)
from jaxserve.weights.narrow import nbytes
from jaxserve.weights.saving import convert, convert_mapped, fingerprint, write_hf

__all__ = [
    "CheckpointError",
    "Place",
    "Progress",
    "convert",
    "convert_mapped",
    "describe",
    "fingerprint",
    "is_matrix",
    "load",
    "nbytes",
    "on_mesh",
    "on_one_device",
    "padded",
    "read_config",
    "unpadded",
    "write_hf",
]
