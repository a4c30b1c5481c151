"""What an engine is told once, before it starts. Nothing here reads the environment."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

SlotPolicyName = Literal["reserve", "grow"]
SchedulerName = Literal["iteration", "request"]
DtypeName = Literal["auto", "float32", "bfloat16"]
QuantizeName = Literal["int8"]
CacheDtypeName = Literal["auto", "float32", "bfloat16", "int8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Every setting of an engine, validated on construction.

    Attributes:
      dtype: compute dtype of weights and activations; `auto` is float32 on a CPU and bfloat16 elsewhere.
      quantize: `int8` holds matrices in eight bits, half the memory of bfloat16 (`jaxserve.weights.quantize`); None
        holds them in dtype.
      kv_cache_dtype: what keys and values are held in; `auto` is the attention backend's choice, `int8` takes half the
        memory of bfloat16 (one scale a token and head, `pallas_kernels.int8`).
      max_rows: requests in one batch at most (Orca's max batch size, OSDI'22 section 4.2).
      slots: tokens the KV pool holds; None sizes the pool from the device's memory.
      block_size: slots in a block; None takes the attention backend's choice.
      slot_policy: `reserve` sets a request's worst case aside at admission (Orca, Algorithm 1);
        `grow` allocates as tokens come and preempts the latest arrival under pressure.
      buckets: compiled token counts, ascending; None measures a ladder at start.
      token_budget: most tokens one iteration may carry; None is the largest bucket.
      target_tpot: target seconds between a request's tokens. The token budget then follows the load, below
        `token_budget` (see `policy.ObjectiveTokenBudget`). None: see `policy.DefaultTokenBudget`.
      prefix_cache: whether full blocks of finished prompts are reused.
      max_context: most tokens (prompt and generated) of one request; None is the model's own limit, or 2,048
        for a model without one.
      max_queued_requests / max_queued_tokens: what may wait before a request is refused at the door.
      scheduler: `iteration`, or `request` for request-level batching in the same engine (the baseline Orca compares
        itself with).
      deterministic: whether an answer is the same to the bit whatever else is served: one bucket, prompts cut at fixed
        positions, one sampler, nothing preempted (slot policy `reserve`), prefixes reused where prompts are cut only.
      speculate: what drafts tokens for an iteration to check several at once: `ngram` looks up what followed the last
        few tokens before; the folder of a checkpoint is that of a smaller model of the same vocabulary; None drafts
        none. The answers are the same (see `speculation`).
      speculate_tokens: tokens drafted for one row at most.
      scoring: whether prompt_logprobs is served (a second program per bucket).
      attention: name of the attention backend, or `auto`.
      tensor: devices that share each layer (tensor or intra-layer parallelism), the same number in every stage.
      stages: parts that the layers are cut into, each on devices of its own (pipeline or inter-layer parallelism).
      replicas: copies of the whole model, each on devices of its own, behind one door.
      in_flight: iterations launched before the oldest has answered; None is one more than stages, so that no device
        waits for the host. With several stages their rows are disjoint, and as many as there are stages have a row
        wait less for its next token.
      layers_per_stage: how many layers each stage owns; None cuts as evenly as can be.
      sharding: a TOML file that changes the family's default sharding (`sharding.spec.read`); None changes nothing.
      compilation_cache: folder where compiled programs are kept between starts; `auto` is the user's own, which the
        command line has too (`cache_folder.default`), and none for weights that are in memory; None keeps none.
    """

    dtype: DtypeName = "auto"
    quantize: QuantizeName | None = None
    kv_cache_dtype: CacheDtypeName = "auto"
    max_rows: int = 16
    slots: int | None = None
    block_size: int | None = None
    slot_policy: SlotPolicyName = "grow"
    buckets: tuple[int, ...] | None = None
    token_budget: int | None = None
    target_tpot: float | None = None
    prefix_cache: bool = True
    max_context: int | None = None
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1_048_576
    scheduler: SchedulerName = "iteration"
    deterministic: bool = False
    speculate: str | None = None
    speculate_tokens: int = 7
    scoring: bool = True
    attention: str = "auto"
    tensor: int = 1
    stages: int = 1
    replicas: int = 1
    in_flight: int | None = None
    layers_per_stage: tuple[int, ...] | None = None
    sharding: str | None = None
    compilation_cache: str | None = "auto"

    def __post_init__(self) -> None:
        for name, choices in (
            ("dtype", DtypeName),
            ("kv_cache_dtype", CacheDtypeName),
            ("slot_policy", SlotPolicyName),
            ("scheduler", SchedulerName),
        ):
            if getattr(self, name) not in get_args(choices):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(get_args(choices))}")
        if self.quantize not in (None, *get_args(QuantizeName)):
            raise ValueError(f"quantize is {self.quantize!r}; it must be {', '.join(get_args(QuantizeName))} or None")
        for name in (
            "max_rows",
            "max_queued_requests",
            "max_queued_tokens",
            "speculate_tokens",
            "tensor",
            "stages",
            "replicas",
        ):
            _at_least_one(name, getattr(self, name))
        for name in ("slots", "block_size", "token_budget", "max_context", "in_flight"):
            if getattr(self, name) is not None:
                _at_least_one(name, getattr(self, name))
        for count in self.layers_per_stage or ():
            _at_least_one("layers_per_stage", count)
        if self.target_tpot is not None and not 0 < self.target_tpot < math.inf:
            raise ValueError(f"target_tpot is {self.target_tpot!r}; it must be above 0 seconds")
        if self.in_flight is not None and self.in_flight > self.stages + 1:
            raise ValueError(
                f"in_flight is {self.in_flight}; more than stages + 1 ({self.stages + 1}) would only wait in line"
            )
        if self.deterministic:
            self._check_deterministic()
        if self.draft_model is not None and (self.stages, self.tensor) != (1, 1):
            raise ValueError(
                f"speculate is {self.speculate} with tensor {self.tensor} and stages {self.stages}; a model drafts on "
                "one device, so both must be 1 (or speculate ngram)"
            )
        if self.buckets is not None:
            if not self.buckets:
                raise ValueError("buckets is empty; give at least one token count, or leave it out to measure a ladder")
            for bucket in self.buckets:
                _at_least_one("buckets", bucket)
            if list(self.buckets) != sorted(set(self.buckets)):
                raise ValueError(f"buckets are {self.buckets}; they must ascend without repeats")
            if self.token_budget is not None and self.token_budget > self.buckets[-1]:
                raise ValueError(
                    f"token_budget is {self.token_budget}, more than the largest bucket {self.buckets[-1]}"
                )

    @property
    def draft_tokens(self) -> int:
        """Tokens drafted for one row at most; 0 without speculation."""
        return self.speculate_tokens if self.speculate else 0

    @property
    def draft_model(self) -> str | None:
        """The folder of the checkpoint that drafts, if one does."""
        return None if self.speculate == "ngram" else self.speculate

    def _check_deterministic(self) -> None:
        for name, allowed in (
            ("slot_policy", "reserve"),
            ("scheduler", "iteration"),
            ("target_tpot", None),
            ("speculate", None),
        ):
            if getattr(self, name) != allowed:
                raise ValueError(f"{name} is {getattr(self, name)}; with deterministic it must be {allowed}")
        if self.buckets is not None and len(self.buckets) > 1:
            raise ValueError(f"buckets are {self.buckets}; with deterministic there is one: another rounds otherwise")


def _at_least_one(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1")
