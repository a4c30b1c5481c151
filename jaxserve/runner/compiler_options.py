"""Compiler options of the engine's programs, by platform, with reasons; plans use the same."""

from __future__ import annotations

from typing import Any

import jax

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
# CPUs: XLA's older emitters compile the sampler's 150 to 220 fusions in half of the time, a third of a first start. The
# programs are as fast, and their results bitwise the same. In the layers they are slower by 3% for few rows. jax 0.11
# has no such option.
_SAMPLER_ON_CPUS = {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}
# There is no device to measure on.
_WITHOUT_A_DEVICE = {"xla_gpu_autotune_level": 0}


def of(platform: str, *, absent: bool = False, sampler: bool = False) -> dict[str, Any]:
    """The options for a program of a platform.

    Args:
      absent: whether the devices are only described.
      sampler: whether the program is the sampler.
    """
    options = {"tpu": _GATHER_WHILE_MULTIPLYING, "cpu": _SAMPLER_ON_CPUS if sampler else {}}.get(platform, {})
    return options | (_WITHOUT_A_DEVICE if absent and platform == "gpu" else {})
