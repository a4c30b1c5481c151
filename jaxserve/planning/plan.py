"""What a plan says: bytes, slots, requests that fit and times of iterations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxserve.planning.calibration import Fit, fit_of
from jaxserve.planning.cost import Parts, Roofline, Seconds
from jaxserve.planning.deployment import Deployment
from jaxserve.planning.stage_load import StageLoad
from jaxserve.runner.sharded_parameters import ShardedParameter
from jaxserve.scheduler.cache_groups import CacheGroups

REQUEST = 2048  # tokens of a request, for "requests that fit"


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One stage: bytes on each of its devices, by use.

    Attributes:
      layers: first layer, and one past the last.
      activations: memory of the largest bucket beside weights, pool and state.
      activations_known: False if the compiler may make weights whole, which comes on top.
      state: state of the rows: block tables, histories, sampling parameters.
      pool: keys and values of all slots of the plan.
      free: what remains of the usable memory.
      load: the input of the cost model, with the collectives.
    """

    layers: tuple[int, int]
    weights: int
    activations: int
    activations_known: bool
    state: int
    pool: int = 0
    free: int = 0
    parameters: tuple[ShardedParameter, ...]
    load: StageLoad

    @property
    def total(self) -> int:
        """Bytes in use on each device."""
        return self.weights + self.activations + self.state + self.pool

    def with_pool(self, nbytes: int, usable: int) -> StagePlan:
        """The stage with a pool of so many bytes."""
        stage = replace(self, pool=nbytes)
        return replace(stage, free=usable - stage.total)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan:
    """One iteration of a bucket that holds decodes and then prompt tokens.

    Attributes:
      stages: the time of each stage by cause; empty if the collectives are unknown.
      replicas: engines that run such iterations.
    """

    tokens: int
    decodes: int
    stages: tuple[Seconds, ...]
    replicas: int

    @property
    def milliseconds(self) -> float | None:
        """Milliseconds of one iteration through all stages."""
        return 1e3 * sum(stage.total for stage in self.stages) if self.stages else None

    @property
    def slowest(self) -> int | None:
        """Index of the slowest stage, which limits the throughput."""
        return max(range(len(self.stages)), key=lambda stage: self.stages[stage].total, default=None)

    @property
    def limit(self) -> Seconds | None:
        """The time of the slowest stage."""
        return None if self.slowest is None else self.stages[self.slowest]

    @property
    def tokens_per_second(self) -> float | None:
        """Throughput of all replicas with every stage busy, prompt tokens included."""
        return self.replicas * self.tokens / self.limit.total if self.limit else None

    @property
    def bottleneck(self) -> str | None:
        """The largest part of the slowest stage's time: compute, memory, links or overhead."""
        return self.limit.bottleneck if self.limit else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The prediction for a deployment.

    Attributes:
      num_parameters / num_active: parameters of the model, and those that one token uses; without padding.
      padding: logical axis -> (size in the model, padded size).
      memory: bytes of a device, and the usable part.
      groups: the cache groups.
      slots: slots of the first cache group that fit on every stage, in whole blocks.
      buckets_reason: why the buckets are these, in words.
      overlapped: for each stage, the share of the bytes over links that the compiled program of the largest bucket
        sends while it multiplies or attends; empty without one.
    """

    deployment: Deployment
    num_parameters: int
    num_active: int
    padding: Mapping[str, tuple[int, int]]
    memory: tuple[int, int]
    groups: CacheGroups
    kv_cache_dtype: str
    slots: int
    stages: tuple[StagePlan, ...]
    buckets: tuple[BucketPlan, ...]
    buckets_reason: str
    overlapped: tuple[float, ...] = ()

    @property
    def requests(self) -> int:
        """Requests of 2,048 tokens that the slots of one replica hold at once."""
        return self.fitting(REQUEST)

    def fitting(self, tokens: int) -> int:
        """Requests of so many tokens that one replica holds at once."""
        return self.groups.fitting(self.slots // self.block_size, tokens)

    @property
    def num_devices(self) -> int:
        """Devices of one replica."""
        return self.deployment.engine.stage_devices * self.deployment.engine.stages

    @property
    def block_size(self) -> int:
        """Slots of a block."""
        return self.groups.block_size

    @property
    def is_known(self) -> bool:
        """Whether the collectives of every stage, and so all times, are known."""
        return all(stage.load.collectives is not None for stage in self.stages)

    def roofline(self, fit: Fit | None = None, *, bucket: int | None = None) -> Roofline:
        """The cost of iterations. Raises ValueError if the collectives of a stage are unknown.

        Args:
          bucket: tokens of the bucket, whose program may have collectives that overlap; None for none that do.
        """
        loads, deployment = [each.load for each in self.stages], self.deployment
        if self.overlapped and bucket == deployment.buckets[-1]:
            loads = [replace(load, overlapped=share) for load, share in zip(loads, self.overlapped, strict=True)]
        return Roofline(loads, deployment.topology, dtype=deployment.dtype, fit=fit)

    def parts(self, bucket: BucketPlan) -> Parts | None:
        """Seconds of a bucket's iteration through all stages, by cause; None if unknown."""
        if not bucket.stages:
            return None
        stages = self.roofline(bucket=bucket.tokens).parts(_chunks(self.deployment, bucket.tokens))
        return Parts(*map(sum, zip(*stages, strict=True)))

    def sampling(self, bucket: BucketPlan) -> float:
        """Seconds of the sampler in a bucket whose rows are greedy or have a temperature only.

        They are no part of an iteration's time: the constants are fitted to whole steps, which sample.
        """
        device = self.deployment.topology.device
        fit, nbytes = fit_of(device), self.stages[-1].load.sampled_bytes * bucket.decodes
        return nbytes / device.bandwidth / fit.efficiency + fit.sampler_seconds


def bucket_plan(deployment: Deployment, roofline: Roofline | None, tokens: int) -> BucketPlan:
    """An iteration that decodes every row and fills the rest with prompts.

    It has no times without a roofline.
    """
    decodes, chunks = min(tokens, deployment.engine.max_rows), _chunks(deployment, tokens)
    stages = () if roofline is None else tuple(roofline(chunks))
    return BucketPlan(tokens=tokens, decodes=decodes, stages=stages, replicas=deployment.engine.replicas)


def _chunks(deployment: Deployment, tokens: int) -> list[tuple[int, int]]:
    """(start, length) of the decodes and prompts of a bucket."""
    context = min(deployment.context, deployment.max_context - 1)
    decodes = min(tokens, deployment.engine.max_rows)
    prompts = range(decodes, tokens, deployment.max_context)
    return [(context, 1)] * decodes + [(0, min(deployment.max_context, tokens - start)) for start in prompts]
