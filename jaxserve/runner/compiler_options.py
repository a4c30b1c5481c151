"""Compiler options of the engine's programs, by platform, with reasons; plans use the same."""

from __future__ import annotations

from typing import Any

# Where activations are split by tokens, TPUs multiply while parts of them go around a ring. With these options the
# first part, and gathers of small arrays, travel while the device multiplies, too. `python -m benchmarks overlap` shows
# it. Programs without such collectives are the same.
_GATHER_WHILE_MULTIPLYING = {
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
    "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    "xla_tpu_overlap_compute_collective_tc": True,
    "xla_enable_async_all_gather": True,
}
# There is no device to measure on.
_WITHOUT_A_DEVICE = {"xla_gpu_autotune_level": 0}


def of(platform: str, *, absent: bool = False) -> dict[str, Any]:
    """The options for a platform.

    Args:
      absent: whether the devices are only described.
    """
    options = {"tpu": _GATHER_WHILE_MULTIPLYING}.get(platform, {})
    return options | (_WITHOUT_A_DEVICE if absent and platform == "gpu" else {})
