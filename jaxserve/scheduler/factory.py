"""Makes the scheduler that an engine's settings describe, for devices or for a simulation."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.config import EngineConfig
from jaxserve.iteration import max_points
from jaxserve.scheduler.buckets import BucketCost, BucketLadder
from jaxserve.scheduler.cache_groups import CacheGroups, GroupedPool
from jaxserve.scheduler.host_cache import HostCache
from jaxserve.scheduler.order import make_order
from jaxserve.scheduler.policy import make_policy
from jaxserve.scheduler.row_parts import PartitionedPool, make_pools
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.speculation import Drafter, Speculation
from jaxserve.scheduler.static_batching import StaticBatchScheduler


def fixed_chunk(config: EngineConfig, sizes: Sequence[int], block_size: int) -> int | None:
    """The chunk length at whose multiples deterministic mode cuts prompts; None in other modes.

    It is as many whole blocks as fit the largest bucket beside the decodes of all other rows.

    Args:
      sizes: compiled token counts, ascending.

    Raises:
      ValueError: not even one block fits.
    """
    if not config.deterministic:
        return None
    left = min(sizes[-1], config.token_budget or sizes[-1]) - (config.max_rows - 1)
    if left < block_size:
        raise ValueError(
            f"a bucket of {sizes[-1]} tokens leaves {max(left, 0)} beside {config.max_rows - 1} decodes; with "
            f"deterministic a block of {block_size} must fit: a bucket of {config.max_rows - 1 + block_size} or more"
        )
    return left // block_size * block_size


def make_scheduler(
    config: EngineConfig,
    costs: Sequence[BucketCost],
    *,
    slot_milliseconds: float = 0.0,
    n_blocks: int,
    groups: CacheGroups,
    eos_token_ids: frozenset[int],
    drafter: Drafter | None = None,
    kind: type[Scheduler] = Scheduler,
    block_bytes: Sequence[int] = (),
) -> Scheduler:
    """A new scheduler over a new slot pool.

    Args:
      costs: one for each bucket, ascending.
      slot_milliseconds: added milliseconds of an iteration per slot that it reads.
      n_blocks / groups: the engine's final sizes, whatever `config` asks for; the blocks of the first group.
      drafter: the draft model, if there is one.
      kind: what to make, unless batches are static.
      block_bytes: bytes of a block of each cache group, if evicted blocks go to the host.
    """
    chunk = fixed_chunk(config, [cost.size for cost in costs], groups.block_size)
    ladder = BucketLadder(costs)
    speculation = None
    if config.speculate is not None:
        speculation = Speculation(
            ladder,
            most=config.draft_tokens,
            max_points=max_points(config.max_rows, config.draft_tokens),
            waits=config.stages == 1,
            drafter=drafter,
        )
    is_static = config.scheduler == "request"
    batches = (config.in_flight or config.stages + 1) if config.stages > 1 else 1
    policy = make_policy(
        ladder,
        max_rows=config.max_rows,
        batches=batches,
        token_budget=config.token_budget,
        target_tpot=config.target_tpot,
        slot_milliseconds=slot_milliseconds,
        window=groups.windows[0],
        is_fixed=is_static or chunk is not None,
    )
    pool = make_pools(
        groups,
        n_blocks,
        policy=config.slot_policy,
        prefix_cache=config.prefix_cache,
        prefix_blocks=None if chunk is None else chunk // groups.block_size,
    )
    if config.host_cache is not None:
        assert not isinstance(pool, PartitionedPool)
        cache = HostCache(config.host_cache // config.replicas, block_bytes)
        for each in pool.pools if isinstance(pool, GroupedPool) else [pool]:
            each.blocks.attach(cache)
    return (StaticBatchScheduler if is_static else kind)(
        pool,
        ladder,
        max_rows=config.max_rows,
        max_context=groups.max_context,
        policy=policy,
        order=make_order(config, ladder),
        fixed_chunk=chunk,
        eos_token_ids=eos_token_ids,
        n_stages=config.stages,
        in_flight=config.in_flight,
        speculation=speculation,
    )
