"""A scheduler as an engine's settings describe it: in front of devices, or of a simulation of them."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.buckets import BucketCost, BucketLadder
from jaxserve.config import EngineConfig
from jaxserve.scheduler import Scheduler
from jaxserve.slots import SlotPool


def make_scheduler(
    config: EngineConfig,
    costs: Sequence[BucketCost],
    *,
    n_blocks: int,
    block_size: int,
    max_context: int,
    eos_token_ids: frozenset[int],
) -> Scheduler:
    """A new scheduler over a pool of its own.

    Args:
      costs: of each bucket, ascending.
      n_blocks / block_size / max_context: what the engine settled on, whatever `config` asks for.
    """
    return Scheduler(
        SlotPool(n_blocks, block_size, policy=config.slot_policy, prefix_cache=config.prefix_cache),
        BucketLadder(costs),
        max_rows=config.max_rows,
        max_context=max_context,
        token_budget=config.token_budget,
        target_tpot=config.target_tpot,
        eos_token_ids=eos_token_ids,
        mode=config.scheduler,
        n_stages=config.stages,
        in_flight=config.in_flight,
    )
