"""Ragged attention in plain JAX that XLA compiles well for CPUs; it runs on every platform."""

from pallas_kernels.xla.backend import BACKEND, XlaBackend, effective_window
from pallas_kernels.xla.pool import XlaPool

__all__ = ["BACKEND", "XlaBackend", "XlaPool", "effective_window"]
