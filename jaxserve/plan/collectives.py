"""Predicts the collectives of a stage from its sharding spec."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxserve.plan.cost import Collective
from jaxserve.runner import kv_cache
from jaxserve.runner.lowering import StagePrograms
from jaxserve.runner.sharded_parameters import ShardedParameter

_Exchange = tuple[str, str, int, bool]  # kind, what, nbytes, per_row of a Collective


class _Step(NamedTuple):
    """An operation on the result of the one before.

    Attributes:
      is_sum: it is a matmul, so parts of its input give partial sums.
      reads_parts / gives_parts: whether each device reads, and gives, a part.
      results: bytes of each result, for each token.
    """

    name: str
    is_sum: bool
    reads_parts: bool
    gives_parts: bool
    results: tuple[int, ...]


def predict(stage: StagePrograms, parts: Mapping[str, ShardedParameter]) -> tuple[Collective, ...] | None:
    """The collectives of one iteration of a stage; None if the compiler decides some of them.

    The compiler decides if the spec splits "embed" or the hidden states between the layers.

    Args:
      parts: the stage's parameters by name.
    """
    split_axes = {axis for part in parts.values() for axis in part.axes if part.split(axis)}
    undecided = split_axes & {"embed", "word_embed"} or any(stage.spec.activations.values())
    if undecided and stage.mesh.size > 1:
        return None
    config, item = stage.model.padded_config, stage.shape.attention.dtype.itemsize
    heads, keys = (item * count * config.head_dim for count in (config.num_heads, config.num_kv_heads))
    hidden, by_head = item * config.hidden_size, kv_cache.head_parts(stage.mesh, stage.spec) > 1
    attend = _Step("layers.*.attend", False, by_head, by_head, (heads,))
    found: Counter[_Exchange] = Counter(_lookups(item, parts) if stage.is_first else ())
    for layer in stage.layers:

        def product(name: str, *results: int, layer: int = layer) -> _Step:
            out, into = parts[f"layers.{layer}.{name}.kernel"].divided
            return _Step(f"layers.*.{name}", True, into, out, results)

        sent = [*_exchanges([product("qkv", heads, keys, keys), attend, product("out", hidden)])]
        experts = parts.get(f"layers.{layer}.experts.down.kernel")
        if experts is None:
            sent += _exchanges([product("up", item * config.ffn_size), product("down", hidden)])
        elif not experts.whole:  # each device adds up what its experts, or parts of them, give
            sent.append(("all-reduce", "layers.*.experts", hidden, False))
        found.update(_together(sent) if stage.model.is_parallel(layer) else sent)
    if stage.is_last and head_table(parts).split("vocab"):
        found["all-gather", "head", 4 * config.vocab_size, True] += 1
    return tuple(Collective(*exchange, stage.mesh.size, times) for exchange, times in found.items())


def _lookups(item: int, parts: Mapping[str, ShardedParameter]) -> Iterator[_Exchange]:
    """The all-reduces of look-ups in split tables, separate for int8 values and scales."""
    tables = {name: part for name, part in parts.items() if name.startswith("embed.") and name.endswith(".table")}
    divided = {name: part for name, part in tables.items() if part.divided[0]}
    for name in divided:
        if f"{name}.scales" in parts:
            yield "all-reduce", "embed.scales", item, False
    widths = (part.local[1] * (1 if f"{name}.scales" in parts else item) for name, part in divided.items())
    yield from _together([("all-reduce", "embed", width, False) for width in widths])


def _exchanges(chain: Sequence[_Step]) -> Iterator[_Exchange]:
    """The exchanges within a chain of operations that starts from a replicated array.

    Partial sums are added up. Parts that an operation reads whole are gathered, or multiplied by their share of its
    matrix where adding up moves less. Whatever is whole is cut at no cost.
    """
    before = _Step("", False, False, False, ())
    for step in chain:
        is_cheaper = step.is_sum and 2 * sum(step.results) < sum(before.results)
        if before.gives_parts and not step.reads_parts and not is_cheaper:
            yield from (("all-gather", before.name, nbytes, False) for nbytes in before.results)
        elif step.is_sum and (before.gives_parts or step.reads_parts):
            yield "all-reduce", step.name, sum(step.results), False
        before = step


def _together(exchanges: Iterable[_Exchange]) -> Iterator[_Exchange]:
    """Merges the all-reduces, as the compiler does if they do not depend on each other."""
    sums = [each for each in exchanges if each[0] == "all-reduce"]
    yield from (each for each in exchanges if each not in sums)
    if sums:
        names = dict.fromkeys([sums[0][1], *(what.removeprefix("layers.*.") for _, what, _, _ in sums[1:])])
        yield "all-reduce", ", ".join(names), sum(nbytes for _, _, nbytes, _ in sums), False


def head_table(parts: Mapping[str, ShardedParameter]) -> ShardedParameter:
    """The parameter that makes logits: the head's table if there is one, or the embedding's."""
    return parts.get("head.tokens.table") or parts["embed.tokens.table"]
