"""Settings of an engine. Nothing here reads the environment.

`param` gives a field its limits, its help and the spelling of its flag; `server/commands/flags.py` reads them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from jaxserve.fields import param, params
from sharding import axes

SlotPolicyName = Literal["reserve", "grow"]
OrderName = Literal["fcfs", "slo"]
SchedulerName = Literal["iteration", "request"]
DtypeName = Literal["auto", "float32", "bfloat16"]
QuantizeName = Literal["int8", "int4", "float8"]
CacheDtypeName = Literal["auto", "float32", "bfloat16", "int8"]
GenerationConfigName = Literal["auto", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of an engine, fixed before it starts.

    Raises:
      ValueError: a setting has a wrong value; the message names it.
    """

    dtype: DtypeName = param(
        "auto", "dtype of weights and arithmetic; auto: float32 on a CPU, bfloat16 elsewhere", group="model"
    )
    quantize: QuantizeName | None = param(
        None,
        "quantize weights as they are loaded; int8 and float8 take half the memory of bfloat16, int4 two sevenths",
        default_help="keep weights in --dtype",
        group="model",
    )
    kv_cache_dtype: CacheDtypeName = param(
        "auto",
        "dtype of cached keys and values; int8 takes half the memory of bfloat16, so twice the slots fit; auto: the "
        "attention backend's choice",
        group="model",
    )
    # Orca's max batch size (OSDI'22, section 4.2).
    max_rows: int = param(16, "most requests in one batch", minimum=1, metavar="N")
    slots: int | None = param(
        None,
        "tokens whose keys and values the KV pool holds",
        default_help="as many as the device's memory allows",
        minimum=1,
        metavar="N",
    )
    block_size: int | None = param(
        None, "slots in a block", default_help="the attention backend's choice", minimum=1, metavar="N"
    )
    # reserve: Orca, Algorithm 1.
    slot_policy: SlotPolicyName = param(
        "grow",
        "reserve: allocate a request's worst case when it starts, never preempt; grow: allocate blocks as tokens come, "
        "preempt the latest arrival when the pool is full",
        default_help="grow; reserve with --deterministic",
    )
    buckets: tuple[int, ...] | None = param(
        None,
        "token counts that iterations are compiled for, ascending; auto measures a ladder at start, a finer one with "
        "--target-tpot",
        default_help="auto",
        minimum=1,
        metavar="16,32,...|auto",
        none="auto",
    )
    token_budget: int | None = param(
        None, "most tokens in one iteration", default_help="the largest bucket", minimum=1, metavar="N"
    )
    # See policy.ObjectiveTokenBudget, and policy.DefaultTokenBudget without a target.
    target_tpot: float | None = param(
        None,
        "target time between a request's tokens: iterations carry as many prompt tokens as the target allows; a target "
        "out of reach changes nothing",
        default_help="while requests generate, prompt tokens may make an iteration as long as a full batch of decodes, "
        "or twice as long as its own decodes; longer when prompts queue",
        minimum=0,
        exclusive=True,
        metavar="100ms",
        is_duration=True,
    )
    # See order.ObjectiveOrder.
    order: OrderName = param(
        "slo",
        "who goes first within a priority: fcfs: by arrival; slo: short prompts before long ones, which wait at most "
        "20 times --target-ttft longer, so that under overload most first tokens are in time",
    )
    target_ttft: float | None = param(
        None,
        "target time to the first token",
        default_help="none; --order slo counts with 2s",
        minimum=0,
        exclusive=True,
        metavar="2s",
        is_duration=True,
    )
    prefix_cache: bool = param(True, "reuse the cached blocks of prompts that begin alike")
    # See scheduler.host_cache.
    host_cache: int | None = param(
        None,
        "host memory, of all replicas together, for cached blocks that are evicted from the devices; they are copied "
        "back when a prompt begins with them",
        default_help="none",
        minimum=1,
        metavar="64GiB",
        is_size=True,
    )
    max_context: int | None = param(
        None,
        "most tokens, prompt and generated, of one request",
        default_help="the model's limit, or 2048 if it has none",
        minimum=1,
        metavar="N",
        group="model",
    )
    max_queued_requests: int = param(
        1024, "requests that may wait before further ones are refused", minimum=1, metavar="N"
    )
    max_queued_tokens: int = param(
        1_048_576, "tokens that may wait before further requests are refused", minimum=1, metavar="N"
    )
    max_queue_seconds: float | None = param(
        None,
        "time that a call may have to wait, as estimated, before it is refused",
        default_help="--target-ttft; none without it",
        minimum=0,
        exclusive=True,
        metavar="2s",
        is_duration=True,
    )
    # request: the baseline that Orca compares itself with.
    scheduler: SchedulerName = param("iteration", "request batches whole requests, for comparison")
    # One bucket, prompts cut at fixed positions, one sampler, no preemption, prefixes reused at the cuts only.
    deterministic: bool = param(
        False, "make answers bitwise independent of other requests; all iterations use one bucket"
    )
    speculate: str | None = param(
        None,
        "draft tokens and check several in one iteration, where that pays; ngram: what followed the last few tokens "
        "before; DIR: the checkpoint of a smaller model with the same vocabulary. Answers are the same up to rounding",
        default_help="off",
        metavar="ngram|DIR",
    )
    speculate_tokens: int = param(7, "most tokens drafted for a request", minimum=1, metavar="K")
    # Read by generation.defaults.read.
    generation_config: GenerationConfigName = param(
        "auto",
        "auto: the sampling parameters in the checkpoint's generation_config.json are the defaults of requests; off: "
        "they are not read",
        group="model",
    )
    scoring: bool = param(
        True, "do not serve prompt_logprobs and embeddings; less is compiled at start", flag="--no-scoring"
    )
    attention: str = param("auto", "attention backend", metavar="NAME")
    tensor: int = param(
        1,
        "devices that share each layer (tensor parallelism); heads, feed-forward and vocabulary are split over them",
        minimum=1,
        metavar="T",
        group="devices",
    )
    # Read by sharding.axes.
    mesh: str | None = param(
        None,
        "axes of the devices and their sizes, for the rules of --sharding; tensor=T and stage=S are --tensor and "
        "--stages, and devices of axes without rules hold copies",
        default_help="[mesh] in --sharding, or --tensor",
        metavar="NAME=N,...",
        group="devices",
    )
    stages: int = param(
        1,
        "parts of the layers (pipeline parallelism), each on devices of its own",
        minimum=1,
        metavar="S",
        group="devices",
    )
    replicas: int = param(
        1,
        "copies of the model, each on T x S devices of its own; a request goes to the one with the least outstanding "
        "work, less what its prefix cache holds",
        minimum=1,
        metavar="R",
        group="devices",
    )
    # With several stages the rows of the iterations in flight are disjoint.
    in_flight: int | None = param(
        None,
        "iterations launched before the oldest has completed",
        default_help="one more than stages; as many as stages shortens the time between tokens where devices take much "
        "longer than the host",
        minimum=1,
        metavar="N",
    )
    layers_per_stage: tuple[int, ...] | None = param(
        None, "layers in each stage", default_help="as even as possible", minimum=1, metavar="20,25,25", group="devices"
    )
    # Read by sharding.spec.read.
    sharding: str | None = param(
        None, "changes to how the model family is split over the T devices", metavar="FILE.toml", group="devices"
    )
    # auto: cache_folder.default(), or no cache for weights that are already in memory.
    compilation_cache: str | None = param(
        "auto", "folder that keeps compiled programs between runs", metavar="DIR|off", none="off"
    )

    def __post_init__(self) -> None:
        for name, each in ENGINE_PARAMS.items():
            if (problem := each.problem(getattr(self, name))) is not None:
                raise ValueError(f"{name} {problem}")
        self._settle_mesh()
        if self.speculate is None and self.speculate_tokens != ENGINE_PARAMS["speculate_tokens"].default:
            raise ValueError(f"speculate_tokens is {self.speculate_tokens}, which does nothing without speculate")
        if self.in_flight is not None and self.in_flight > self.stages + 1:
            raise ValueError(f"in_flight is {self.in_flight}; more than stages + 1 ({self.stages + 1}) would only wait")
        if self.host_cache is not None and not self.prefix_cache:
            raise ValueError(f"host_cache is {self.host_cache} without prefix_cache, whose blocks it would keep")
        if self.host_cache is not None and self.scheduler == "request":
            raise ValueError(f"host_cache is {self.host_cache}; with scheduler request it must be None")
        if self.deterministic:
            self._check_deterministic()
        if self.draft_model is not None and (self.stages, self.stage_devices) != (1, 1):
            raise ValueError(
                f"speculate is {self.speculate} with {axes.product(self.stage_axes)} and stages {self.stages}; a draft "
                "model runs on one device, so all must be 1 (or speculate ngram)"
            )
        if self.buckets is not None:
            if not self.buckets:
                raise ValueError("buckets is empty; give at least one token count, or omit it to measure a ladder")
            if list(self.buckets) != sorted(set(self.buckets)):
                raise ValueError(f"buckets are {self.buckets}; they must ascend without repeats")
            if self.token_budget is not None and self.token_budget > self.buckets[-1]:
                raise ValueError(
                    f"token_budget is {self.token_budget}, more than the largest bucket {self.buckets[-1]}"
                )

    @property
    def stage_axes(self) -> dict[str, int]:
        """The mesh axes of each stage's devices, the last of which runs fastest."""
        return axes.of_stage(axes.read(self.mesh, None), self.tensor)

    @property
    def num_devices(self) -> int:
        """Devices of all replicas."""
        return self.stage_devices * self.stages * self.replicas

    @property
    def stage_devices(self) -> int:
        """Devices of each stage."""
        return math.prod(self.stage_axes.values())

    @property
    def draft_tokens(self) -> int:
        """Most tokens drafted for one row; 0 without speculation."""
        return self.speculate_tokens if self.speculate else 0

    @property
    def draft_model(self) -> str | None:
        """Folder of the draft model's checkpoint, if there is one."""
        return None if self.speculate == "ngram" else self.speculate

    def _settle_mesh(self) -> None:
        """Makes `mesh`, `tensor` and `stages` agree, where rules have a mesh or it has these axes."""
        found = axes.read(self.mesh, self.sharding)
        if found:
            object.__setattr__(self, "mesh", axes.text_of(found))
        for axis, name in ((axes.TENSOR, "tensor"), (axes.STAGE, "stages")):
            size, given = found.get(axis), getattr(self, name)
            if size is not None and given not in (1, size):
                raise ValueError(f"{name} is {given}, but the mesh is {self.mesh}; give one of the two")
            object.__setattr__(self, name, size or given)

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
            raise ValueError(
                f"buckets are {self.buckets}; with deterministic there must be one: others round differently"
            )


ENGINE_PARAMS = params(EngineConfig)
