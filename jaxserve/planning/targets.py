"""Describes devices to compile for that are not present."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from sharding.devices import Device, Topology


class _Chip(NamedTuple):
    """What XLA needs to know of a GPU beyond its memory: sizes in bytes, clock in GHz.

    From NVIDIA's tuning guides for Ampere and Hopper, as XLA's own target specs have them.
    """

    capability: int
    cores: int
    units: int
    shared: int
    cache: int
    clock: float


_AMPERE = _Chip(capability=8, cores=108, units=64, shared=164 * 1024, cache=40 * 2**20, clock=1.41)
_HOPPER = _Chip(capability=9, cores=132, units=128, shared=228 * 1024, cache=50 * 2**20, clock=1.98)
_CHIPS = {"a100-40g": _AMPERE, "a100-80g": _AMPERE, "h100": _HOPPER, "h200": _HOPPER}


def devices_of(topology: Topology) -> Sequence[Any]:
    """The devices of a topology, as compile targets.

    Raises ValueError if the compiler for them is not installed.
    """
    find, package = (_tpus, "tpu") if topology.device.platform == "tpu" else (_gpus, "cuda12")
    try:
        return find(topology)
    except Exception as problem:
        raise ValueError(
            f"cannot compile for {topology}: {str(problem).splitlines()[0]}. The compiler for it comes with "
            f"pip install 'jax[{package}]=={jax.__version__}'"
        ) from problem


def cpus(count: int) -> Sequence[Any]:
    """Virtual devices of this machine's CPU, as many as are asked for.

    Raises ValueError if jax has started with fewer.
    """
    settings: Any = jax.config
    with contextlib.suppress(RuntimeError):  # jax has started, perhaps with enough of them
        settings.update("jax_num_cpu_devices", max(count, settings.jax_num_cpu_devices))
    have = jax.devices("cpu")
    if len(have) < count:
        raise ValueError(
            f"jax has started with {len(have)} CPU devices, and {count} are needed: set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count} before it starts"
        )
    return have[:count]


def lowering(mesh: Mesh) -> AbstractContextManager[Any]:
    """A context in which kernels are lowered for the mesh's device, not the local one."""
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def _tpus(topology: Topology) -> Sequence[Any]:
    from jax.experimental import topologies

    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # this machine is no TPU machine and has no metadata server
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    options: dict[str, Any] = {"chip_config_name": "megacore"} if topology.device.name == "v4" else {}
    if min(topology.shape[:2]) == 1:
        options["chips_per_host_bounds"] = [1, 1, 1]
    return topologies.get_topology_desc(platform="tpu", topology_name=str(topology), **options).devices


def _gpus(topology: Topology) -> Sequence[Any]:
    from jax.experimental import topologies

    machines, gpus = topology.shape
    return topologies.get_topology_desc(
        platform="cuda", topology_name="", topology=f"1x{machines}x{gpus}", target_config=_target(topology.device)
    ).devices


def _target(device: Device) -> str:
    """A stream_executor.GpuTargetConfigProto as text.

    XLA reads it instead of asking a device. Without CUDA's versions it takes the driver for one older than 12.3, whose
    command buffers (CUDA graphs) hold no custom calls. The driver is as in XLA's own target specs; the runtime and the
    toolkit are what jax's wheels for CUDA 12 are made with (`cuda_runtime_build_version()` of `jax_cuda12_plugin`).
    """
    chip = _CHIPS[device.name]
    feature = "ACCELERATED_FEATURES" if chip.capability == 9 else "NONE"
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: {48 * 1024}
  shared_memory_per_core: {chip.shared}
  shared_memory_per_block_optin: {chip.shared - 1024}
  threads_per_core_limit: 2048
  core_count: {chip.cores}
  fpus_per_core: {chip.units}
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: {2**16 - 1}
  block_dim_limit_z: {2**16 - 1}
  memory_bandwidth: {int(device.bandwidth)}
  l2_cache_size: {chip.cache}
  clock_rate_ghz: {chip.clock}
  device_memory_size: {device.memory}
  cuda_compute_capability {{ major: {chip.capability} feature_extension: {feature} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  driver_version: "13.0.0"
  runtime_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "NVIDIA {device.name.upper()}"
"""
