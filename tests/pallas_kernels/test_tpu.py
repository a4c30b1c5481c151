"""The TPU kernels in the interpreter of their copies and semaphores: races, copies nobody waited for, the cut."""

from __future__ import annotations
