"""The sizes and times that an engine reports of its start. No jax."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.scheduler.buckets import BucketCost


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupReport:
    """The sizes that an engine chose at start, and how long the start took.

    Sizes are in bytes, tokens and slots; times are in seconds.

    Attributes:
      tensor: devices of each stage.
      layers_per_stage: one number per stage.
      replicas: copies of the model.
      padding: the model's axes that are held with more than it has, such as "vocab 50,257 held as 50,258"; or empty.
      weight_bytes / pool_bytes: on all devices together.
      buckets_reason: why the buckets are these, in words.
      slots: slots of each replica.
      buckets: bucket costs, measured on the first replica.
      decode_buckets: buckets with a second program, for iterations of decodes only.
      slot_milliseconds: added milliseconds of an iteration per slot that it reads (a decode at context 100 reads 100).
      compile_seconds: includes the loading of compiled programs.
      pool_parts: parts of the pool, each with the blocks of its own requests.
      programs / programs_loaded: all programs, and how many of them came from the compilation cache.
    """

    device: str
    platform: str
    tensor: int
    layers_per_stage: tuple[int, ...]
    replicas: int
    family: str
    parameters: int
    padding: str
    weight_bytes: int
    pool_bytes: int
    dtype: str
    quantize: str | None
    kv_cache_dtype: str
    attention: str
    attention_reason: str
    buckets_reason: str
    slots: int
    block_size: int
    max_rows: int
    max_context: int
    buckets: tuple[BucketCost, ...]
    decode_buckets: tuple[int, ...]
    slot_milliseconds: float
    load_seconds: float
    compile_seconds: float
    measure_seconds: float
    programs: int
    programs_loaded: int
    pool_parts: int = 1

    @property
    def request_slots(self) -> int:
        """Slots that one request can have: those of a part of the pool."""
        return self.slots // self.pool_parts
