"""Predicts what an iteration costs from sizes: a roofline over compute, memory and links.

No jax, no model, no devices.

A device spends on a stage

    (operations / peak + bytes of memory / bandwidth + bytes over links / bandwidth) / efficiency + layers * overhead

The three are added rather than overlapped: a layer is a chain of kernels, each bound by one of them. Efficiency 0.57
and 55 us a layer fit Orca's published microbenchmark (OSDI'22: 101B on 8 A100-40GB, prompts of 128, 32 tokens, batches
of 1 to 32) within 4% and serve for every GPU. (Least squares, in benchmarks/orca.py, give 0.61 and 82 us: six points
read off a figure hardly tell the two apart.) For TPUs both are assumptions: there a layer has no launches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sharding.devices import Topology

ITEMSIZE = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How close devices come to their peaks.

    Attributes:
      efficiency: share of each peak that is reached.
      layer_seconds: overhead of a layer.
      overlapped: arithmetic and memory traffic overlap, so only the longer of the two counts.
    """

    efficiency: float
    layer_seconds: float
    overlapped: bool = False


FITS = {"gpu": Fit(efficiency=0.57, layer_seconds=55e-6), "tpu": Fit(efficiency=0.57, layer_seconds=10e-6)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """The sizes that the cost of a decoder depends on.

    A layer has 4 matmuls: q, k and v; out; up; down.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int


class Collective(NamedTuple):
    """An exchange of the partial results of one matmul or lookup among a stage's devices.

    Attributes:
      kind: all-reduce or all-gather, as XLA calls them.
      what: the operation whose result it is, such as `layers.*.out`.
      nbytes: bytes of the result, for each token or, if `per_row`, for each row with logits.
      group: devices that take part.
      times: number in one iteration of a stage (one per layer for operations of layers).
    """

    kind: str
    what: str
    nbytes: int
    per_row: bool
    group: int
    times: int

    def sent(self, tokens: int, rows: int) -> float:
        """Bytes that each device sends in one iteration, with ring algorithms."""
        passes = 2 if self.kind == "all-reduce" else 1
        size = self.nbytes * (rows if self.per_row else tokens)
        return self.times * passes * size * (self.group - 1) / self.group


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoad:
    """The work of one device of a stage, per token, row and position.

    Attributes:
      weight_bytes: weights read once per iteration.
      token_ops / row_ops: operations of matmuls for each token, and for each row with logits.
      slot_ops: operations of attention for each (token, position it attends to), all layers together.
      slot_bytes: bytes of keys and values of one position, all layers together.
      collectives: the collectives within the stage.
      hop_bytes: bytes that each token sends to the next stage; 0 on the last.
      tensor: devices of the stage.
    """

    layers: int
    weight_bytes: int
    token_ops: float
    row_ops: float
    slot_ops: float
    slot_bytes: int
    collectives: tuple[Collective, ...]
    hop_bytes: int
    tensor: int


class Seconds(NamedTuple):
    """The time of one stage by cause; a cause that overlaps with a longer one is 0."""

    compute: float
    memory: float
    links: float
    overhead: float

    @property
    def total(self) -> float:
        """Seconds of the stage."""
        return sum(self)

    @property
    def bottleneck(self) -> str:
        """The name of the largest of the four."""
        return max(self._fields, key=lambda name: getattr(self, name))


class Work(NamedTuple):
    """The work of one iteration.

    Attributes:
      tokens: size of the bucket, padding included.
      rows: rows with logits.
      slots: positions whose keys and values are read (a chunk reads its row's once).
      pairs: (token, position) pairs of attention.
    """

    tokens: int
    rows: int
    slots: float
    pairs: float


def work(chunks: Iterable[tuple[int, int]], bucket: int | None = None) -> Work:
    """The work of chunks (start, length) in a bucket of `bucket` tokens (default: no padding)."""
    tokens = rows = slots = pairs = 0
    for start, length in chunks:
        tokens, rows, slots = tokens + length, rows + 1, slots + start + length
        pairs += length * start + length * (length + 1) // 2
    return Work(max(tokens, bucket or 0), rows, slots, pairs)


def stage_seconds(
    load: StageLoad, topology: Topology, work: Work, *, dtype: str = "bfloat16", fit: Fit | None = None
) -> Seconds:
    """Seconds of one stage of an iteration.

    Stages of a pipeline work on different iterations at the same time.

    Args:
      fit: the default is that of the topology's platform.
    """
    device = topology.device
    fit = fit or FITS[device.platform]
    ops = load.token_ops * work.tokens + load.row_ops * work.rows + load.slot_ops * work.pairs
    read = load.weight_bytes + load.slot_bytes * work.slots
    links = sum(
        each.sent(work.tokens, work.rows) / topology.group_bandwidth(each.group) for each in load.collectives
    ) + load.hop_bytes * work.tokens / topology.hop_bandwidth(load.tensor)
    compute = ops / device.flops[dtype] / fit.efficiency
    memory = read / device.bandwidth / fit.efficiency
    if fit.overlapped:
        compute, memory = (compute, 0.0) if compute >= memory else (0.0, memory)
    return Seconds(
        compute=compute,
        memory=memory,
        links=links / fit.efficiency,
        overhead=load.layers * fit.layer_seconds,
    )


def loads(
    sizes: ModelSizes, tensor: int, layers_per_stage: Sequence[int], *, dtype: str = "bfloat16"
) -> tuple[StageLoad, ...]:
    """The loads of the stages under the default specs.

    These split heads, feed-forward and vocabulary over `tensor` devices. Layers need two all-reduces each, the
    embedding lookup needs one (Megatron-LM, arXiv:1909.08053, section 3), and the logits are gathered.
    """
    item, hidden, last = ITEMSIZE[dtype], sizes.hidden_size, len(layers_per_stage) - 1
    inner, keys = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    layer = hidden * (2 * inner + 2 * keys + 2 * sizes.ffn_size) / tensor
    head = sizes.vocab_size * hidden / tensor
    made = []
    for stage, layers in enumerate(layers_per_stage):
        collectives = []
        if tensor > 1:
            if stage == 0:
                collectives.append(Collective("all-reduce", "embed", hidden * item, False, tensor, 1))
            collectives += [
                Collective("all-reduce", f"layers.*.{name}", hidden * item, False, tensor, layers)
                for name in ("out", "down")
            ]
            if stage == last:
                collectives.append(Collective("all-gather", "head", sizes.vocab_size * 4, True, tensor, 1))
        made.append(
            StageLoad(
                layers=layers,
                weight_bytes=int((layers * layer + (head if stage == last else 0)) * item),
                token_ops=2 * layers * layer,
                row_ops=2 * head if stage == last else 0.0,
                slot_ops=4 * layers * inner / tensor,
                slot_bytes=2 * layers * keys * item // tensor,
                collectives=tuple(collectives),
                hop_bytes=0 if stage == last else hidden * item,
                tensor=tensor,
            )
        )
    return tuple(made)
