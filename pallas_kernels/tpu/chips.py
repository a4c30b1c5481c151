"""What the kernels' sizes depend on, by TPU generation."""

from __future__ import annotations

from typing import NamedTuple

from pallas_kernels.api import AttentionShape


class Chip(NamedTuple):
    """A TPU generation.

    Attributes:
      memory: bytes of a core's own memory (VMEM), which XLA uses too.
      cores: the number of cores that share a program's work.
      is_wide: whether matrix units are 256 wide: products take more rows. Where a chunk has fewer tokens than rows, the
        other rows are multiplied for nothing.
      whole_results: whether a matrix unit gives all 256 lanes of a result, even if the product has only 128.
    """

    memory: int = 16 * 2**20
    cores: int = 1
    is_wide: bool = False
    whole_results: bool = False


# By JAX's name of the device. `pltpu.get_tpu_info_for_chip` has the sizes of memories and matrix units.
_CHIPS = {
    "TPU v4": Chip(cores=2),
    "TPU v5 lite": Chip(128 * 2**20),
    "TPU v5": Chip(64 * 2**20, cores=2),
    "TPU v5p": Chip(64 * 2**20, cores=2),
    "TPU v6 lite": Chip(128 * 2**20, is_wide=True, whole_results=True),
    "TPU7x": Chip(64 * 2**20, is_wide=True),
}


def chip(shape: AttentionShape) -> Chip:
    """The chip that a shape is for."""
    return of_kind(shape.device_kind)


def of_kind(device_kind: str) -> Chip:
    """The chip of JAX's name; one that is not in the table has the defaults."""
    return _CHIPS.get(device_kind, Chip())
