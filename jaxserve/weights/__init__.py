"""Reads checkpoints into sharded arrays and writes checkpoints.

`checkpoint` reads the files of a directory, `naming` maps tensors to parameters, `placement` says where they are held,
`loading` loads, `padding` pads, `saving` writes, `orbax` is the converted format, `narrow` quantizes.
"""

from jaxserve.weights.checkpoint import CheckpointError, read_ahead, read_config
from jaxserve.weights.loading import Progress, load
from jaxserve.weights.narrow import is_matrix, nbytes
from jaxserve.weights.padding import padded, unpadded
from jaxserve.weights.placement import Place, describe, on_mesh, on_one_device
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
    "read_ahead",
    "read_config",
    "unpadded",
    "write_hf",
]
