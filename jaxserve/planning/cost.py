"""Predicts the time of an iteration by a roofline over compute, memory and links.

No jax, no model, no devices.

A device spends on a stage

    operations / peak + bytes of memory / bandwidth + bytes over links / bandwidth, each over the share that is reached,
    and an overhead for each layer and each collective

The three are added rather than overlapped: a layer is a chain of kernels, each bound by one of them. The shares and the
overheads depend on the device, see `calibration.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from jaxserve.planning.calibration import Fit, fit_of
from jaxserve.planning.stage_load import StageLoad
from sharding import axes
from sharding.devices import Topology

_MOST_FIXED = 4096  # sizes of iterations of which a roofline keeps what does not change


class Seconds(NamedTuple):
    """The time of one stage by cause, without what overlaps with a longer one."""

    compute: float
    memory: float
    links: float
    overhead: float

    @property
    def total(self) -> float:
        """Seconds of the stage."""
        compute, memory, links, overhead = self
        return compute + memory + links + overhead

    @property
    def bottleneck(self) -> str:
        """The name of the largest of the four."""
        return max(self._fields, key=lambda name: getattr(self, name))


class _FixedWork(NamedTuple):
    """What a stage does in all iterations of as many tokens and rows, whatever their positions.

    Attributes:
      ops / read: operations and bytes, without attention and experts.
      share: of the attention, what the busiest device has.
      attention: (index of the window, operations of a slot, bytes of a slot) of each kind.
      experts: operations and bytes of experts, if there are any.
      waited: seconds over links at their peak; of these `hidden` may overlap with other work.
    """

    ops: float
    read: float
    share: float
    attention: list[tuple[int, float, int]]
    experts: tuple[float, float] | None
    waited: float
    hidden: float
    overhead: float


class Parts(NamedTuple):
    """The seconds of one stage by what it does, without sampling.

    Attributes:
      matmul: the products of the layers, experts among them, and all that reads their weights.
      collectives: exchanges within the stage, their overhead, and the hop to the next.
      starts: the overhead of the layers.
    """

    matmul: float
    attention: float
    head: float
    collectives: float
    starts: float


def out_of_reach(chunks: Iterable[tuple[int, int]], window: int) -> tuple[int, int]:
    """What attention of chunks (start, length) does not read because of a window.

    Returns:
      (positions whose keys and values no token sees; (token, earlier position that it does not see) pairs).
    """
    slots = pairs = 0
    for start, length in chunks:
        end = start + length
        if end > window:
            slots += max(start + 1 - window, 0)
            beyond, before = end - window, max(start - window, 0)  # pairs out of reach, of tokens up to here
            pairs += (beyond * (beyond + 1) - before * (before + 1)) // 2
    return slots, pairs


class Roofline:
    """Seconds of an iteration on the devices of a topology, by stage.

    Stages of a pipeline work on different iterations at the same time.
    """

    def __init__(
        self, loads: Sequence[StageLoad], topology: Topology, *, dtype: str = "bfloat16", fit: Fit | None = None
    ) -> None:
        """
        Args:
          fit: the default is that of the topology's device.

        Raises:
          ValueError: the collectives of a stage are unknown.
        """
        self.fit = fit or fit_of(topology.device)
        self._loads, self._topology, self._dtype = loads, topology, dtype
        self._windows = list({each.window for load in loads for each in load.attention if each.window is not None})
        device = topology.device
        self._speeds = (
            device.flops[dtype],
            device.bandwidth,
            self.fit.efficiency,
            self.fit.of_links,
            self.fit.overlapped,
        )
        # By stage: its load; seconds over links of a step, a token, a row and a token's hop; its overhead; (index of
        # the window, operations of a slot, bytes of a slot) of each kind of its attention.
        self._parts: list[tuple[StageLoad, tuple[float, ...], float, list[tuple[int, float, int]]]] = []
        for load in loads:
            if load.collectives is None:
                raise ValueError(
                    'the speed of this sharding is unknown: to split "embed" or activations leaves the collectives to '
                    "the compiler; `jaxserve plan --compile` shows them"
                )
            speeds = {
                (over, is_ring): (topology.ring_bandwidth if is_ring else topology.group_bandwidth)(
                    axes.members(load.mesh, over or tuple(load.mesh))
                )
                for over, is_ring in {(each.over, each.is_ring) for each in load.collectives}
            }
            by_step, with_token, with_row = (
                sum(each.sent(*one) / speeds[each.over, each.is_ring] for each in load.collectives)
                for one in ((0, 0), (1, 0), (0, 1))
            )
            hop = load.hop_bytes / topology.hop_bandwidth(math.prod(load.mesh.values()))
            links = (by_step, with_token - by_step, with_row - by_step, hop)
            starts = sum(each.times for each in load.collectives)
            overhead = load.layers * self.fit.layer_seconds + starts * self.fit.collective_seconds
            attention = [
                (0 if each.window is None else 1 + self._windows.index(each.window), each.slot_ops, each.slot_bytes)
                for each in load.attention
            ]
            self._parts.append((load, links, overhead, attention))
        self._fixed: dict[tuple[int, int, int], list[_FixedWork]] = {}  # see `_fix`

    def __call__(
        self, chunks: Sequence[tuple[int, int]], bucket: int = 0, decodes: tuple[int, int] = (0, 0)
    ) -> list[Seconds]:
        """Seconds of an iteration by stage and cause. Arguments as of `totals`."""
        causes: list[Seconds] = []
        self.totals(chunks, bucket, decodes, causes)
        return causes

    def totals(
        self,
        chunks: Sequence[tuple[int, int]],
        bucket: int = 0,
        decodes: tuple[int, int] = (0, 0),
        causes: list[Seconds] | None = None,
    ) -> list[float]:
        """Seconds of an iteration of chunks (start, length), by stage; one logit row per chunk.

        Simulations ask for millions.

        Args:
          bucket: tokens of the bucket; 0 for no padding.
          decodes: number of chunks of length 1 that are not listed and are within all windows; sum of their starts.
          causes: gets the seconds of each stage by cause.
        """
        rows, starts = decodes
        tokens, slots = rows, starts + rows
        pairs = slots
        for start, length in chunks:
            end = start + length
            tokens, slots = tokens + length, slots + end
            pairs += end if length == 1 else (end * (end + 1) - start * (start + 1)) // 2
        attended = [(slots, pairs)]
        for window in self._windows:
            unseen_slots, unseen_pairs = out_of_reach(chunks, window)
            attended.append((slots - unseen_slots, pairs - unseen_pairs))
        size = tokens, (bucket if bucket > tokens else tokens), rows + len(chunks)
        flops, bandwidth, efficiency, of_links, overlapped = self._speeds
        totals = []
        for ops, read, share, attention, experts, waited, hidden, overhead in self._fixed.get(size) or self._fix(size):
            for window, slot_ops, slot_bytes in attention:
                slots, pairs = attended[window]
                ops, read = ops + slot_ops * pairs * share, read + slot_bytes * slots * share
            if experts is not None:
                ops, read = ops + experts[0], read + experts[1]
            compute, memory = ops / flops / efficiency, read / bandwidth / efficiency
            if overlapped:
                compute, memory = (compute, 0.0) if compute >= memory else (0.0, memory)
            if hidden:
                waited -= min(hidden, (compute + memory) * of_links)
            links = waited / of_links
            totals.append(compute + memory + links + overhead)
            if causes is not None:
                causes.append(Seconds(compute, memory, links, overhead))
        return totals

    def _fix(self, size: tuple[int, int, int]) -> list[_FixedWork]:
        """What iterations with these tokens, as many with padding, and rows have in common."""
        tokens, padded, rows = size
        fixed = []
        for load, (by_step, by_token, by_row, by_hop), overhead, attention in self._parts:
            sent = by_step + by_token * padded + by_row * rows
            experts = load.experts  # padding has none
            fixed.append(
                _FixedWork(
                    ops=load.token_ops * padded + load.row_ops * rows,
                    read=float(load.weight_bytes),
                    share=1 if load.row_parts == 1 else -(-rows // load.row_parts) / max(rows, 1),
                    attention=attention,
                    experts=None if experts is None else (experts.ops(tokens, padded), experts.read(tokens)),
                    waited=by_hop * padded + sent,
                    hidden=load.overlapped * sent,
                    overhead=overhead,
                )
            )
        if len(self._fixed) == _MOST_FIXED:
            self._fixed.clear()
        self._fixed[size] = fixed
        return fixed

    def parts(self, chunks: Sequence[tuple[int, int]], bucket: int = 0) -> list[Parts]:
        """An iteration's seconds by cause and stage; they add up to the total unless causes overlap.

        The arguments are those of `__call__`.
        """
        found = []
        for load, whole in zip(self._loads, self(chunks, bucket), strict=True):
            nothing = StageLoad(
                layers=0, weight_bytes=0, token_ops=0, row_ops=0, attention=(), collectives=(), mesh=load.mesh
            )
            layers = load.weight_bytes - load.head_bytes
            alone = (  # in the order of Parts
                replace(nothing, weight_bytes=layers, token_ops=load.token_ops, experts=load.experts),
                replace(nothing, attention=load.attention, row_parts=load.row_parts),
                replace(nothing, weight_bytes=load.head_bytes, row_ops=load.row_ops),
                replace(nothing, collectives=load.collectives, hop_bytes=load.hop_bytes),
                replace(nothing, layers=load.layers),
            )
            by_part = Roofline(alone, self._topology, dtype=self._dtype, fit=self.fit)(chunks, bucket)
            matmul, attention, head, sent, starts = (each.total for each in by_part)
            found.append(Parts(matmul, attention, head, sent - by_part[3].links + whole.links, starts))
        return found
