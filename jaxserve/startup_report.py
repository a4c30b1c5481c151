"""What an engine tells of its start. No jax."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.scheduler.buckets import BucketCost


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupReport:
    """What an engine settled on while it started.

    Sizes in bytes, tokens and slots; times in seconds.

    Attributes:
      tensor: devices of each stage.
      layers_per_stage: one number a stage.
      replicas: copies of all this.
      weight_bytes / pool_bytes: on all devices together.
      slots: of each replica.
      buckets: as measured on the first replica.
      slot_milliseconds: of an iteration, for each slot more that it reads (a decode at a context of 100 reads 100).
      compile_seconds: the loading of compiled programs included.
      programs / programs_loaded: in all, and those of them that were found in the compilation cache.
    """

    device: str
    platform: str
    tensor: int
    layers_per_stage: tuple[int, ...]
    replicas: int
    family: str
    parameters: int
    weight_bytes: int
    pool_bytes: int
    dtype: str
    quantize: str | None
    kv_cache_dtype: str
    attention: str
    attention_reason: str
    slots: int
    block_size: int
    max_rows: int
    max_context: int
    buckets: tuple[BucketCost, ...]
    slot_milliseconds: float
    load_seconds: float
    compile_seconds: float
    measure_seconds: float
    programs: int
    programs_loaded: int
