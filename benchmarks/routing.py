"""`python -m benchmarks routing`: how long it takes to find a prompt in all replicas' prefix caches."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import numpy as np
from rich.table import Table

from jaxserve.scheduler.block_allocation import BlockAllocation
from jaxserve.scheduler.prefix_index import PrefixIndex
from jaxserve.scheduler.slot_pool import SlotPool
from jaxserve.simulate.outcome import Distribution
from server.commands.bench import flags, machine, report
from server.commands.console import tables

HELP = """\
Times the look-up of a prompt in the index of all replicas' prefix caches, which is made for each request before a
replica is chosen. Every prompt is cached to a different length on each replica."""

NEW = "nothing of it is cached"
CACHED = "cached, asked again"
FORGOTTEN = "cached, its digests are forgotten"
HASHED = "cached, hashed for this request before"


def _allocation(tokens: list[int]) -> BlockAllocation:
    return BlockAllocation(tokens=list(tokens), max_length=len(tokens), prompt_length=len(tokens))


class Replicas:
    """Replicas that have parts of the same prompts in their caches."""

    def __init__(self, replicas: int, tokens: int, prompts: int, block_size: int) -> None:
        """
        Args:
          tokens: length of each prompt.
        """
        rng = np.random.default_rng(0)
        made = rng.integers(128_000, size=(prompts + 1, tokens)).tolist()
        self.prompts, self.unknown = made[:-1], made[-1]
        blocks = -(-tokens // block_size) + 1
        self.pools = [SlotPool(prompts * blocks, block_size, policy="grow", prefix_cache=True) for _ in range(replicas)]
        self.index = PrefixIndex(self.pools)
        for prompt in self.prompts:
            for number, pool in enumerate(self.pools, 1):
                part = _allocation([*prompt[: tokens * number // replicas], 0])
                self.index.cached_tokens(part)
                pool.admit(part)
                pool.extend(part, len(part.tokens))
                pool.publish(part, len(part.tokens))
                pool.release(part)

    def times(self) -> Iterator[tuple[str, float]]:
        """Look-ups of each kind for every prompt: the kind and milliseconds."""
        for prompt in self.prompts:
            request = _allocation(prompt)
            yield CACHED, self._time(request)
            yield HASHED, self._time(request)
            yield NEW, self._time(_allocation(self.unknown))
        for prompt in self.prompts:
            self.index._hashed.clear()
            self.index._hashed_tokens = 0
            yield FORGOTTEN, self._time(_allocation(prompt))

    def _time(self, request: BlockAllocation) -> float:
        start = time.perf_counter()
        self.index.cached_tokens(request)
        return 1e3 * (time.perf_counter() - start)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this benchmark."""
    flags.add_output_flags(parser)
    parser.add_argument("--replicas", type=flags.positive, default=64, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--tokens", type=flags.positive, default=13_600, metavar="N", help="of a prompt (default: %(default)s)"
    )
    parser.add_argument(
        "--block-size", type=flags.positive, default=64, metavar="N", help="as on GPUs and CPUs (default: %(default)s)"
    )
    parser.add_argument("--prompts", type=flags.positive, default=50, metavar="N", help="(default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Prints the time of a look-up of each kind and writes JSON; returns 0."""
    replicas, tokens, prompts = (2, 1000, 3) if args.quick else (args.replicas, args.tokens, args.prompts)
    measured: dict[str, list[float]] = {}
    for kind, milliseconds in Replicas(replicas, tokens, prompts, args.block_size).times():
        measured.setdefault(kind, []).append(milliseconds)
    table = Table(
        title=f"look-up of {tokens:,} tokens, {replicas} replicas, blocks of {args.block_size}, ms",
        title_justify="left",
    )
    table.add_column("prompt")
    table.add_column("p50 / p95 / p99", justify="right")
    results = {kind: Distribution.of(values) for kind, values in measured.items()}
    for kind, found in results.items():
        table.add_row(kind, report.percentiles(found, 3))
    console = tables()
    console.print(table)
    settings = {"replicas": replicas, "tokens": tokens, "prompts": prompts, "block_size": args.block_size}
    result = {"benchmark": "routing", "environment": machine.environment(), **settings, "milliseconds": results}
    report.write_json(args.out / "routing.json", result, console)
    return 0
