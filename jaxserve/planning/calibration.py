"""The constants of the cost model by kind of device, and where they come from. No jax.

* A100: efficiency 0.57 and 55 us a layer fit Orca's published microbenchmark (OSDI'22: 101B on 8 A100-40GB, prompts of
  128, 32 tokens, batches of 1 to 32) within 4%. (Least squares, in benchmarks/orca.py, give 0.61 and 82 us: six points
  read off a figure hardly tell the two apart.) The starts of the collectives are within the 55 us.
* H200: `benchmarks/device/fit.py` fits the steps that one H200 took. Links and the starts of collectives were not
  measured: links stay as on the A100, and a layer with two all-reduces has the A100's overhead.
  The start of the sampler is what its time of 32 rows of 250,880 logits (0.117 ms) has beside reading them. It was not
  measured elsewhere, and is left out there.
* Other GPUs: as the A100. TPUs: assumed; there a layer has no launches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sharding.devices import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The share of their peaks that devices reach, and overheads.

    Attributes:
      efficiency: share of the peaks of arithmetic and memory that is reached.
      layer_seconds: overhead of a layer.
      link_efficiency: share of the peak of the links; None for `efficiency`.
      collective_seconds: overhead of a collective.
      sampler_seconds: overhead of the sampler's program.
      overlapped: arithmetic and memory traffic overlap, so only the longer of the two counts.
    """

    efficiency: float
    layer_seconds: float
    link_efficiency: float | None = None
    collective_seconds: float = 0.0
    sampler_seconds: float = 0.0
    overlapped: bool = False

    @property
    def of_links(self) -> float:
        """Share of the peak of the links that is reached."""
        return self.efficiency if self.link_efficiency is None else self.link_efficiency


_FITTED = "a100-40g"  # the device of the published times
FITS: Mapping[str, Fit] = {
    _FITTED: Fit(efficiency=0.57, layer_seconds=55e-6),
    "h200": Fit(
        efficiency=0.76, layer_seconds=7e-6, link_efficiency=0.57, collective_seconds=24e-6, sampler_seconds=91e-6
    ),
}
_OTHERS = {"gpu": FITS[_FITTED], "tpu": Fit(efficiency=0.57, layer_seconds=10e-6)}
_CALIBRATED = {  # how: on what, and by what error; held by tests/benchmarks/device/test_fit.py
    _FITTED: "fitted to published times (Orca) of 6 batches of a 101B model, worst error 4%; not measured here",
    "h200": "calibrated on one h200, 10 steps of bloom-7b1 and llama-3-8b, worst error 18%",
}


def fit_of(device: Device) -> Fit:
    """The constants for a device."""
    return FITS.get(device.name, _OTHERS[device.platform])


def calibration(device: Device) -> str:
    """Where the constants for a device come from, in a sentence for those who read a prediction."""
    fit = fit_of(device)
    constants = f"{100 * fit.efficiency:.0f}% of the peaks and {1e6 * fit.layer_seconds:.0f} us a layer"
    source = f"carried over from {_FITTED}" if device.platform == "gpu" else "assumed"
    if device.name not in FITS:
        told = f"not calibrated for {device.name}: {source}; compare layouts, check absolute times"
    else:
        told = _CALIBRATED[device.name]
        if fit.collective_seconds:
            links, starts = f"links ({100 * fit.of_links:.0f}%)", f"{1e6 * fit.collective_seconds:.0f} us a collective"
            told += f"; not calibrated: small models, {links} and {starts}, {source}"
    return f"cost model: {constants}, {told}"
