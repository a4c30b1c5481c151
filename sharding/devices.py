"""Device specifications, and topologies by name: `v5p:2x2x4`, `a100-80g:2x8`, `h200:8`.

No jax.

Peaks are the vendors' figures for dense arithmetic, per JAX device. Link speeds are for one direction. Sources:

* TPU: the pages "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e" and "TPU7x" of docs.cloud.google.com/tpu/docs. They give
  the inter-chip interconnect (ICI) in both directions and over all ports; here it is halved. Float32 at full precision
  takes six bfloat16 passes. A TPU7x chip is two devices; the link between its two halves is six ICI links wide.
* GPU: NVIDIA's datasheets of A100 SXM (40 and 80 GB), H100 SXM and H200 SXM; memory as their drivers report it. NVLink
  is 600 GB/s (A100) and 900 GB/s (H100, H200) in both directions. Float32 is without TF32. Between machines there is
  one network card per GPU, of 200 Gb/s (A100) or 400 Gb/s, as in DGX machines and in Orca's (OSDI'22, section 6).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

_GB, _GIB, _TERA = 10**9, 2**30, 10**12
_F32_PASSES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The specification of one JAX device.

    Attributes:
      flops: peak operations per second by dtype: bfloat16, float32, int8. A multiply-add is two.
      memory: bytes of memory.
      bandwidth: bytes per second of that memory.
      link: bytes per second that one link carries in one direction (TPU: an ICI port; GPU: all of NVLink).
      network: bytes per second to other machines; 0 if links reach everywhere (a TPU slice).
      dimensions: dimensions of the topology: 2 or 3 for a torus of chips, 2 for machines x GPUs.
      chip_devices: devices of a chip.
      ring: least number of chips along an axis for which its ends are connected.
      matrix_unit: rows and columns of a TPU's matrix units; None of GPUs.
      on_chip: bytes of a TPU's memory on the chip, where its compiler keeps some arrays.
    """

    name: str
    platform: Literal["tpu", "gpu"]
    flops: Mapping[str, float]
    memory: int
    bandwidth: float
    link: float
    network: float = 0.0
    dimensions: int
    chip_devices: int = 1
    ring: int = 0
    matrix_unit: int | None = None
    on_chip: int = 0


def _tpu(
    name: str,
    *,
    bf16: float,
    int8: float,
    memory: float,
    bandwidth: float,
    ici: float,
    torus: int,
    devices: int = 1,
    unit: int = 128,
    on_chip: int = 128,
) -> Device:
    """A TPU from tera-operations per second, GiB and GB per second of a chip.

    `ici` counts both directions over all ports; `on_chip` is in MiB, of a device.
    """
    ports = 2 * torus
    return Device(
        name=name,
        platform="tpu",
        flops={
            "bfloat16": bf16 * _TERA / devices,
            "float32": bf16 * _TERA / devices / _F32_PASSES,
            "int8": int8 * _TERA / devices,
        },
        memory=int(memory * _GIB / devices),
        bandwidth=bandwidth * _GB / devices,
        link=ici * _GB / 2 / ports / devices,
        dimensions=torus,
        chip_devices=devices,
        ring=4 if torus == 3 else 16,
        matrix_unit=unit,
        on_chip=on_chip << 20,
    )


def _gpu(name: str, *, bf16: float, f32: float, memory: float, bandwidth: float, nvlink: float, nic: float) -> Device:
    """A GPU from tera-operations per second, GiB and GB per second.

    `nvlink` counts both directions, `nic` one.
    """
    return Device(
        name=name,
        platform="gpu",
        flops={"bfloat16": bf16 * _TERA, "float32": f32 * _TERA, "int8": 2 * bf16 * _TERA},
        memory=int(memory * _GIB),
        bandwidth=bandwidth * _GB,
        link=nvlink * _GB / 2,
        network=nic * _GB,
        dimensions=2,
    )


_DEVICES = (
    _tpu("v4", bf16=275, int8=275, memory=32, bandwidth=1200, ici=600, torus=3),
    _tpu("v5e", bf16=197, int8=393, memory=16, bandwidth=819, ici=400, torus=2),
    _tpu("v5p", bf16=459, int8=918, memory=95, bandwidth=2765, ici=1200, torus=3, on_chip=64),
    _tpu("v6e", bf16=918, int8=1836, memory=32, bandwidth=1638, ici=800, torus=2, unit=256),
    _tpu("tpu7x", bf16=2307, int8=2307, memory=192, bandwidth=7380, ici=1200, torus=3, devices=2, unit=256, on_chip=64),
    _gpu("a100-40g", bf16=312, f32=19.5, memory=39.4, bandwidth=1555, nvlink=600, nic=25),
    _gpu("a100-80g", bf16=312, f32=19.5, memory=79.2, bandwidth=2039, nvlink=600, nic=25),
    _gpu("h100", bf16=989, f32=67, memory=79.1, bandwidth=3350, nvlink=900, nic=50),
    _gpu("h200", bf16=989, f32=67, memory=141, bandwidth=4800, nvlink=900, nic=50),
)
DEVICES: Mapping[str, Device] = {device.name: device for device in _DEVICES}

# How jax names them (`device_kind`), by the start of the name.
_KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
    "NVIDIA A100-SXM4-40GB": "a100-40g",
    "NVIDIA A100-SXM4-80GB": "a100-80g",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A set of equal devices.

    Attributes:
      shape: for TPUs, chips along each axis of the torus; for GPUs, (machines, GPUs of each).
    """

    device: Device
    shape: tuple[int, ...]

    def __str__(self) -> str:
        sizes = self.shape[1:] if self.device.platform == "gpu" and self.shape[0] == 1 else self.shape
        return f"{self.device.name}:{'x'.join(map(str, sizes))}"

    @property
    def num_devices(self) -> int:
        """Number of JAX devices."""
        return math.prod(self.shape) * self.device.chip_devices

    def group_bandwidth(self, group: Sequence[int]) -> float:
        """Bytes per second that each device of a group can send in a collective over the group.

        On a torus, every axis that the group spans adds a link, or two if the axis is a closed ring. A group of GPUs in
        several machines is limited by their network cards.

        Args:
          group: places in jax's order, in which the first axis runs fastest.
        """
        device = self.device
        if device.platform == "gpu":
            machines = {place // self.shape[-1] for place in group}
            inside = len(group) / len(machines)
            return device.link if len(machines) == 1 else min(device.link, inside * device.network)
        chips, links, stride = {place // device.chip_devices for place in group}, 0, 1
        if len(chips) == 1:
            return 6 * device.link * device.chip_devices
        for length in self.shape:
            span = len({chip // stride % length for chip in chips})
            stride *= length
            if span > 1:
                links += 2 if span == length and length % device.ring == 0 else 1
        return links * device.link

    def ring_bandwidth(self, group: Sequence[int]) -> float:
        """Bytes per second that each device of a group can send around a ring, both ways."""
        bandwidth = self.group_bandwidth(group)
        return bandwidth if self.device.platform == "gpu" else min(bandwidth, 2 * self.device.link)

    def hop_bandwidth(self, size: int) -> float:
        """Bytes per second from a device to its counterpart in the next stage of `size` devices."""
        device = self.device
        if device.platform == "gpu" and self.shape[0] > 1 and size * 2 > self.shape[-1]:
            return device.network
        return device.link


def parse(text: str) -> Topology:
    """Parses a topology such as `v5p:2x2x4`, `a100-80g:2x8` or `h200:8`.

    Raises:
      ValueError: the device is unknown (the message suggests the nearest name), or the shape is wrong for it.
    """
    name, _, sizes = text.lower().partition(":")
    if name not in DEVICES:
        close = difflib.get_close_matches(name, DEVICES, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(DEVICES)}"
        raise ValueError(f"topology {text!r}: device {name!r} is not known; {hint}")
    device = DEVICES[name]
    parts = sizes.split("x") if sizes else []
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"topology {text!r}: write {name}:{_example(device)}, chips along each axis or GPUs")
    shape = tuple(int(part) for part in parts)
    if device.platform == "gpu" and len(shape) == 1:
        shape = (1, *shape)
    if len(shape) != device.dimensions:
        what = "machines x GPUs" if device.platform == "gpu" else f"chips along {device.dimensions} axes"
        raise ValueError(f"topology {text!r}: {name} comes in {what}, such as {name}:{_example(device)}")
    return Topology(device=device, shape=shape)


def of_kind(device_kind: str, count: int) -> Topology | None:
    """`count` devices of the kind with this jax name, near each other; None if unknown."""
    start = next((start for start in _KINDS if device_kind.startswith(start)), None)
    if start is None:
        return None
    device = DEVICES[_KINDS[start]]
    if device.platform == "gpu":
        return Topology(device=device, shape=(1, count))
    chips = max(count // device.chip_devices, 1)
    return Topology(device=device, shape=(chips, *[1] * (device.dimensions - 1)))


def kind_of(device: Device) -> str:
    """The jax name of a device; empty if unknown."""
    return next((kind for kind, name in _KINDS.items() if name == device.name), "")


def _example(device: Device) -> str:
    return "2x8 or 8" if device.platform == "gpu" else "x".join(["2", "2", "4"][: device.dimensions])
