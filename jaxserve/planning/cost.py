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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from jaxserve.planning.calibration import Fit, fit_of
from sharding import axes
from sharding.devices import Topology

_MOST_FIXED = 4096  # sizes of iterations of which a roofline keeps what does not change


class Collective(NamedTuple):
    """An exchange among devices of a matmul's or lookup's partial results, or an array's parts.

    Attributes:
      kind: all-reduce, all-gather, reduce-scatter, all-to-all or collective-permute, as XLA calls them.
      what: the operation whose result it is, such as `layers.*.out`.
      nbytes: bytes of the result, for each token; if `per_row`, for each row with logits; if `per_step`, in all.
      group: devices that take part.
      times: number in one iteration of a stage (one per layer for operations of layers).
      over: the mesh axes of the group; empty if they are not known.
    """

    kind: str
    what: str
    nbytes: float
    per_row: bool
    group: int
    times: int
    over: tuple[str, ...] = ()
    per_step: bool = False

    def carried(self, tokens: int, rows: int) -> float:
        """Bytes of the result in one iteration."""
        return self.nbytes * (1 if self.per_step else rows if self.per_row else tokens)

    def sent(self, tokens: int, rows: int) -> float:
        """Bytes that each device sends in one iteration, with ring algorithms."""
        size = self.times * self.carried(tokens, rows)
        if self.kind == "collective-permute":
            return size
        passes = {"all-reduce": 2, "reduce-scatter": self.group}.get(self.kind, 1)  # a part is the result of the latter
        return passes * size * (self.group - 1) / self.group


class AttentionLoad(NamedTuple):
    """The attention of all layers of a stage that have the same window.

    Attributes:
      window: most positions that a token attends to, itself included; None for all.
      slot_ops: operations for each (token, position it attends to).
      slot_bytes: bytes of keys and values of one position.
    """

    window: int | None
    slot_ops: float
    slot_bytes: int


class ExpertLoad(NamedTuple):
    """The experts of all layers of a stage.

    Devices multiply whole tiles, each of rows of one expert, and read the kernels of experts that have rows.

    Attributes:
      num_experts: experts of a layer.
      per_token: how many of them serve a token.
      weight_bytes: bytes of all of them.
      token_ops: operations for each token, with the experts that serve it.
      tile_rows: sizes of tiles; a bucket takes the least that holds an expert's mean rows, or the largest.
    """

    num_experts: int
    per_token: int
    weight_bytes: int
    token_ops: float
    tile_rows: tuple[int, ...]

    def read(self, tokens: int) -> float:
        """Expected bytes of the experts that these tokens use, if they choose independently."""
        return self.weight_bytes * self._used(tokens)

    def ops(self, tokens: int, bucket: int) -> float:
        """Expected operations for tokens of a bucket, with the rows that fill up tiles.

        With few rows, an expert has one tile; with many, the last of its tiles is half full.
        """
        rows, most = tokens * self.per_token, bucket * self.per_token
        tile = min((size for size in self.tile_rows if size * self.num_experts >= most), default=max(self.tile_rows))
        tile, used = min(tile, most), self.num_experts * self._used(tokens)
        return self.token_ops / self.per_token * max(used * tile, rows + used * (tile - 1) / 2)

    def _used(self, tokens: int) -> float:
        """The expected share of experts that these tokens use."""
        return 1 - (1 - self.per_token / self.num_experts) ** tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoad:
    """The work of one device of a stage, per token, row and position.

    Attributes:
      weight_bytes: weights read once per iteration; without those of experts.
      head_bytes: those of them that make the logits.
      token_ops / row_ops: operations of matmuls for each token, and for each row with logits; without experts.
      collectives: the collectives within the stage; None if they are unknown, and so is the time on links.
      overlapped: the share of their bytes that the device sends while it multiplies or attends.
      hop_bytes: bytes that each token sends to the next stage; 0 on the last.
      mesh: sizes of the mesh's axes; the stage has that many devices.
      row_parts: parts of the rows, each of which other devices attend to; the busiest of them counts.
    """

    layers: int
    weight_bytes: int
    token_ops: float
    row_ops: float
    attention: tuple[AttentionLoad, ...]
    experts: ExpertLoad | None = None
    collectives: tuple[Collective, ...] | None
    hop_bytes: int
    mesh: Mapping[str, int]
    head_bytes: int = 0
    row_parts: int = 1
    overlapped: float = 0.0

    @property
    def slot_bytes(self) -> int:
        """Bytes of keys and values of one position, all layers together."""
        return sum(each.slot_bytes for each in self.attention)


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
      waited: seconds over links; of these `hidden` may overlap with other work.
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
    """The seconds of one stage by what it does; sampling is not predicted.

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


def reads(chunks: Iterable[tuple[int, int]], window: int | None = None) -> tuple[int, int]:
    """What attention of chunks (start, length) reads.

    Args:
      window: most positions that a token attends to.

    Returns:
      (positions whose keys and values are read, a chunk its row's once; (token, position) pairs).
    """
    slots = pairs = 0
    if window is None:
        for start, length in chunks:
            end = start + length
            slots += end
            pairs += end if length == 1 else (end * (end + 1) - start * (start + 1)) // 2
        return slots, pairs
    for start, length in chunks:
        end = start + length
        slots += end
        pairs += (end * (end + 1) - start * (start + 1)) // 2
        if end > window:
            slots -= max(start + 1 - window, 0)
            beyond, before = end - window, max(start - window, 0)  # pairs out of reach, of tokens up to here
            pairs -= (beyond * (beyond + 1) - before * (before + 1)) // 2
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
        self._loads, self._device, self._topology, self._dtype = loads, topology.device, topology, dtype
        self._windows = list({each.window for load in loads for each in load.attention})
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
                over: topology.group_bandwidth(axes.members(load.mesh, over or tuple(load.mesh)))
                for over in {each.over for each in load.collectives}
            }
            by_step, with_token, with_row = (
                sum(each.sent(*one) / speeds[each.over] for each in load.collectives)
                for one in ((0, 0), (1, 0), (0, 1))
            )
            hop = load.hop_bytes / topology.hop_bandwidth(math.prod(load.mesh.values()))
            links = (by_step, with_token - by_step, with_row - by_step, hop)
            starts = sum(each.times for each in load.collectives)
            overhead = load.layers * self.fit.layer_seconds + starts * self.fit.collective_seconds
            attention = [(self._windows.index(each.window), each.slot_ops, each.slot_bytes) for each in load.attention]
            self._parts.append((load, links, overhead, attention))
        overlap = self.fit.overlapped or any(load.overlapped for load in loads)
        self._is_plain = not overlap and self._windows == [None] and all(load.experts is None for load in loads)
        self._fixed: dict[tuple[int, int, int], list[_FixedWork]] = {}  # see `_fix`

    def __call__(
        self, chunks: Sequence[tuple[int, int]], bucket: int = 0, decodes: tuple[int, int] = (0, 0)
    ) -> list[Seconds]:
        """Seconds of an iteration of chunks (start, length), by stage; one logit row per chunk.

        Args:
          bucket: tokens of the bucket; 0 for no padding.
          decodes: number of chunks of length 1 that are not listed and are within all windows; sum of their starts.
        """
        return [Seconds(*each) for each in self._stages(chunks, bucket, decodes)]

    def totals(
        self, chunks: Sequence[tuple[int, int]], bucket: int = 0, decodes: tuple[int, int] = (0, 0)
    ) -> list[float]:
        """An iteration's seconds by stage, all causes together. Arguments as of `__call__`."""
        if not self._is_plain:
            return [
                compute + memory + links + overhead
                for compute, memory, links, overhead in self._stages(chunks, bucket, decodes)
            ]
        # As `_stages`, in less time: simulations ask for millions.
        rows, starts = decodes
        tokens, slots, found = rows, starts + rows, []
        pairs = slots
        for start, length in chunks:
            end = start + length
            tokens, slots = tokens + length, slots + end
            pairs += end if length == 1 else (end * (end + 1) - start * (start + 1)) // 2
        size = tokens, max(tokens, bucket), rows + len(chunks)
        flops, bandwidth, efficiency, of_links, _ = self._speeds
        for ops, read, share, attention, _, waited, _, overhead in self._fixed.get(size) or self._fix(size):
            for _, slot_ops, slot_bytes in attention:
                ops, read = ops + slot_ops * pairs * share, read + slot_bytes * slots * share
            found.append(ops / flops / efficiency + read / bandwidth / efficiency + waited / of_links + overhead)
        return found

    def _stages(
        self, chunks: Sequence[tuple[int, int]], bucket: int, decodes: tuple[int, int]
    ) -> list[tuple[float, float, float, float]]:
        """What `Seconds` holds, by stage."""
        rows, starts = decodes
        tokens, ends = rows, starts + rows
        if chunks:
            tokens = sum([length for _, length in chunks], rows)
            found = [reads(chunks, window) for window in self._windows]
            attended = [(slots + ends, pairs + ends) for slots, pairs in found]
            rows += len(chunks)
        else:
            attended = [(ends, ends)] * len(self._windows)
        size = tokens, max(tokens, bucket), rows
        fixed = self._fixed.get(size) or self._fix(size)
        flops, bandwidth, efficiency, of_links, overlapped = self._speeds
        stages = []
        for ops, read, share, attention, experts, waited, hidden, overhead in fixed:
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
            stages.append((compute, memory, waited / of_links, overhead))
        return stages

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
                layers=0,
                weight_bytes=0,
                token_ops=0,
                row_ops=0,
                attention=(),
                collectives=(),
                hop_bytes=0,
                mesh=load.mesh,
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
