"""What the kernels' sizes depend on, by TPU generation."""

from __future__ import annotations

from typing import NamedTuple

from pallas_kernels.api import AttentionShape


class Chip(NamedTuple):
    """A TPU generation.

    Attributes:
      name: as `sharding.devices` has it; empty if the generation is not known.
      memory: bytes of a core's own memory (VMEM), which XLA uses too.
      cores: the number of cores that share a program's work.
      is_wide: whether matrix units are 256 wide: products take more rows. Where a chunk has fewer tokens than rows, the
        other rows are multiplied for nothing.
      whole_results: whether a matrix unit gives all 256 lanes of a result, even if the product has only 128.
    """

    name: str = ""
    memory: int = 16 * 2**20
    cores: int = 1
    is_wide: bool = False
    whole_results: bool = False


_V5E = Chip("v5e", 128 * 2**20)
_V5P = Chip("v5p", 64 * 2**20, cores=2)
_V6E = Chip("v6e", 128 * 2**20, is_wide=True, whole_results=True)
# By JAX's names of the device. `pltpu.get_tpu_info_for_chip` has the sizes of memories and matrix units.
_CHIPS = {
    "TPU v4": Chip("v4", cores=2),
    "TPU v5 lite": _V5E,
    "TPU v5e": _V5E,
    "TPU v5": _V5P,
    "TPU v5p": _V5P,
    "TPU v6 lite": _V6E,
    "TPU v6e": _V6E,
    "TPU7x": Chip("tpu7x", 64 * 2**20, is_wide=True),
}


def chip(shape: AttentionShape) -> Chip:
    """The chip that a shape is for."""
    return of_kind(shape.device_kind)


def of_kind(device_kind: str) -> Chip:
    """The chip of JAX's name; one that is not in the table has the defaults."""
    return _CHIPS.get(device_kind, Chip())
