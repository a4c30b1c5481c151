"""The work of one device of a stage in an iteration, per token, row and position.

No jax, no model, no devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


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

    @property
    def is_ring(self) -> bool:
        """Whether devices send to neighbours on a ring only."""
        return self.kind == "collective-permute"

    def carried(self, tokens: int, rows: int) -> float:
        """Bytes of the result in one iteration."""
        return self.nbytes * (1 if self.per_step else rows if self.per_row else tokens)

    def sent(self, tokens: int, rows: int) -> float:
        """Bytes that each device sends in one iteration, with ring algorithms."""
        size = self.times * self.carried(tokens, rows)
        if self.is_ring:
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
      shares_rows: whether an expert multiplies all rows of a bucket that has no more than a tile.
    """

    num_experts: int
    per_token: int
    weight_bytes: int
    token_ops: float
    tile_rows: tuple[int, ...]
    shares_rows: bool = False

    def read(self, tokens: int) -> float:
        """Expected bytes of the experts that are read for so many tokens.

        The tokens choose independently.
        """
        return self.weight_bytes * self._used(tokens)

    def ops(self, tokens: int, bucket: int) -> float:
        """Expected operations for tokens of a bucket, with the rows that fill up tiles.

        With few rows, an expert has one tile; with many, the last of its tiles is half full.
        """
        rows, most, used = tokens * self.per_token, bucket * self.per_token, self.num_experts * self._used(tokens)
        if self.shares_rows and bucket <= max(self.tile_rows):
            return self.token_ops / self.per_token * used * bucket
        tile = min((size for size in self.tile_rows if size * self.num_experts >= most), default=max(self.tile_rows))
        tile = min(tile, most)
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
      sampled_bytes: bytes that the sampler reads for each row; 0 but on the last stage.
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
    hop_bytes: int = 0
    mesh: Mapping[str, int]
    head_bytes: int = 0
    sampled_bytes: int = 0
    row_parts: int = 1
    overlapped: float = 0.0

    @property
    def slot_bytes(self) -> int:
        """Bytes of keys and values of one position, all layers together."""
        return sum(each.slot_bytes for each in self.attention)
