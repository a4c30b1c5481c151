"""Predicts the collectives of a stage from its sharding spec."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxserve.planning.stage_load import Collective
from jaxserve.runner import kv_cache, rings
from jaxserve.runner.lowering import StagePrograms
from jaxserve.runner.sharded_parameters import ShardedParameter, is_of_experts
from sharding.devices import Topology
from sharding.spec import Target, names
from sharding.spec import parts as parts_of

_UNDECIDED = {"embed", "word_embed", "head_dim", "router"}  # logical axes; their parts meet whole vectors
_Over = tuple[str, ...]  # mesh axes with more than one device


class _Unknown(Exception):
    """The compiler chooses how parts over some mesh axes become parts over others."""


class _Exchange(NamedTuple):
    """A Collective without its devices and number."""

    kind: str
    what: str
    nbytes: int
    over: _Over
    per_row: bool = False


class _Step(NamedTuple):
    """An operation on the result of the one before.

    Attributes:
      is_sum: it is a matmul, so parts of its input give partial sums.
      reads / gives: the mesh axes over which devices read, and give, parts.
      results: bytes of each result, for each token.
    """

    name: str
    is_sum: bool
    reads: _Over
    gives: _Over
    results: tuple[int, ...]


def predict(
    stage: StagePrograms, parts: Mapping[str, ShardedParameter], topology: Topology, bucket: int
) -> tuple[Collective, ...] | None:
    """The collectives of one iteration of a stage; None if the compiler decides some of them.

    The compiler decides if the spec splits "embed", norms of heads or routers, or if parts over some mesh axes are read
    as parts over others; and in some cases of split hidden states (see `_tokens` and `_ring`).

    Args:
      parts: the stage's parameters by name.
      topology: with the stage's devices.
      bucket: tokens of the largest bucket, whose program this is.
    """
    split_axes = {axis for part in parts.values() for axis in part.axes if part.split(axis)}
    undecided = split_axes & _UNDECIDED or stage.spec.gather
    if undecided and stage.mesh.size > 1:
        return None
    try:
        found = _all(stage, parts, topology, bucket)
    except _Unknown:
        return None
    return tuple(
        Collective(kind, what, nbytes, per_row, parts_of(over, stage.mesh.shape), times, over)
        for (kind, what, nbytes, over, per_row), times in found.items()
    )


def gathers(
    parameters: Iterable[ShardedParameter], gather: Collection[str], mesh: Mapping[str, int]
) -> tuple[Collective, ...]:
    """Gathers of layers' weights over the spec's `gather` axes, whatever else is unknown."""
    found = []
    for part in parameters:
        over = tuple(axis for target in part.partition for axis in names(target) if axis in gather)
        if part.name.startswith("layers.") and (group := parts_of(over, mesh)) > 1:
            found.append(Collective("all-gather", part.name, part.nbytes * group, False, group, part.count, over, True))
    return tuple(found)


def _all(
    stage: StagePrograms, parts: Mapping[str, ShardedParameter], topology: Topology, bucket: int
) -> Counter[_Exchange]:
    """The exchanges of one iteration, with their numbers. Raises _Unknown."""

    def over(*targets: Target) -> _Over:
        return tuple(axis for target in targets for axis in names(target) if stage.mesh.shape[axis] > 1)

    config, item = stage.model.padded_config, stage.shape.attention.dtype.itemsize
    heads, keys = (item * count * config.head_dim for count in (config.num_heads, config.num_kv_heads))
    tokens, ring = _tokens(stage, parts), _ring(stage, parts)
    hidden, by_head = item * config.hidden_size, over(kv_cache.head_target(stage.mesh, stage.spec))
    of_tokens = parts_of(tokens, stage.mesh.shape)
    by_slot = kv_cache.slot_axes(stage.mesh, stage.spec)
    by_part = (*kv_cache.row_axes(stage.mesh, stage.spec), *by_slot)
    sums = 4 * config.num_heads // parts_of(by_head, stage.mesh.shape)  # of weights, as logarithms
    found: Counter[_Exchange] = Counter(_lookups(stage, parts, over) if stage.is_first else ())
    for layer in stage.layers:
        if ring:
            found.update(dict(_around(stage, layer, hidden, ring)))
            continue

        def product(name: str, *results: int, layer: int = layer) -> _Step:
            out, into = map(over, parts[f"layers.{layer}.{name}.kernel"].partition)
            return _Step(f"layers.*.{name}", True, into, out, results)

        out, given, attended = product("out", hidden), by_head, []
        if by_slot:
            gathered = sums * parts_of(by_slot, stage.mesh.shape)
            found[_Exchange("all-gather", "layers.*.attend", gathered, by_slot)] += 1
        if by_part:  # what each part of the pool's rows and slots gives is added up, to shares of heads if read so
            split, scattered = kv_cache.attended(stage.mesh, stage.spec, f"layers.{layer}.out.kernel")
            given, result = names(split[1]), heads // parts_of(by_head, stage.mesh.shape)
            each = result // parts_of(by_part, stage.mesh.shape)
            of_part = (bucket, each // item) if scattered == 1 else (bucket * each // result, result // item)
            if scattered is not None and _stays_scattered(stage, topology, by_part, of_part):
                found[_Exchange("reduce-scatter", "layers.*.attend", each, by_part)] += 1
            else:
                attended.append(_Exchange("all-reduce", "layers.*.attend", result, by_part))
        attend = _Step("layers.*.attend", False, by_head, given, (heads,))
        sent = [*_exchanges([product("qkv", heads, keys, keys), attend, out])]
        if tokens and any(each.kind != "all-reduce" for each in sent):
            raise _Unknown
        if tokens:  # each device attends with the queries of all tokens
            local = (nbytes // parts_of(by_head, stage.mesh.shape) for nbytes in (heads, keys, keys))
            found.update(_Exchange("all-gather", "layers.*.qkv", nbytes, tokens) for nbytes in local)
        experts = parts.get(f"layers.{layer}.experts.down.kernel")
        if experts is None:
            sent += _exchanges([product("up", item * config.ffn_size), product("down", hidden)])
        elif not experts.whole:  # each device adds up what its experts, or parts of them, give
            sent.append(_Exchange("all-reduce", "layers.*.experts", hidden, over(*experts.partition)))
        sent = [*attended, *(each._replace(nbytes=each.nbytes // of_tokens) for each in sent)]
        found.update(_together(sent) if stage.model.is_parallel(layer) else sent)
    if tokens or ring:
        found[_Exchange("all-gather", "the last layer", hidden, tokens or ring)] += 1
    if stage.is_last and (of_head := over(head_table(parts).partition[0])):
        found[_Exchange("all-gather", "head", 4 * config.vocab_size, of_head, True)] += 1
    return found


def _stays_scattered(stage: StagePrograms, topology: Topology, by_part: _Over, of_part: tuple[int, int]) -> bool:
    """Whether the compiler keeps the reduce-scatter of what parts of the pool give.

    The one for TPUs makes an all-reduce and a slice of it in two cases (libtpu 0.0.42.1): over all devices of a slice
    that is a box of three dimensions or a square of more than two by two (but not of TPU7x), and where each device gets
    up to four tokens, or no more than one tile of 8 x 128 numbers.

    Args:
      of_part: what each device gets: (tokens, numbers for each of them).

    Raises:
      _Unknown: it is over all devices of a stage that has some of such a slice, whose place counts.
    """
    if stage.platform != "tpu":
        return True
    group, lengths = parts_of(by_part, stage.mesh.shape), [length for length in topology.shape if length > 1]
    is_cube = len(lengths) == 3 or (len(lengths) == 2 and lengths[0] == lengths[1] > 2)
    if group == stage.mesh.size and is_cube and topology.device.chip_devices == 1:
        if group < topology.num_devices:
            raise _Unknown
        return False
    tokens, numbers = of_part
    return tokens > 8 or (tokens > 4 and numbers > 128)


def _tokens(stage: StagePrograms, parts: Mapping[str, ShardedParameter]) -> _Over:
    """The mesh axes that split the hidden states between the layers by tokens.

    Raises _Unknown where the compiler chooses what to exchange: over axes that split parameters or heads, too; and in
    what is not plain. Compilers for GPUs join gathers, and widen some of them.
    """
    split = {name: kv_cache.over(stage.mesh, target) for name, target in stage.spec.activations.items()}
    tokens = split.get("tokens", ())
    taken = {axis for part in parts.values() for target in part.partition for axis in names(target)}
    taken.update(names(kv_cache.head_target(stage.mesh, stage.spec)))
    by_part = (*kv_cache.row_axes(stage.mesh, stage.spec), *kv_cache.slot_axes(stage.mesh, stage.spec))
    if tokens and (taken & {*tokens} or by_part not in ((), tokens) or not _is_plain(stage, parts)):
        raise _Unknown
    return tokens


def _ring(stage: StagePrograms, parts: Mapping[str, ShardedParameter]) -> _Over:
    """The mesh axes of the rings of a stage, which split the hidden states by "embed".

    Raises _Unknown where the hidden states are split so, but some exchanges are not those of rings.
    """
    over = kv_cache.over(stage.mesh, stage.spec.activations.get("embed"))
    if not over:
        return ()
    by_part = (*kv_cache.row_axes(stage.mesh, stage.spec), *kv_cache.slot_axes(stage.mesh, stage.spec))
    kernels = [part for name, part in parts.items() if name.startswith("layers.") and name.endswith(".kernel")]
    heads = kv_cache.over(stage.mesh, kv_cache.head_target(stage.mesh, stage.spec))
    is_known = over == rings.ring_axes(stage.mesh, stage.spec, stage.platform) == heads
    others = (*by_part, *kv_cache.over(stage.mesh, stage.spec.activations.get("tokens")))
    is_known &= all(rings.split_axis(part.partition, stage.mesh, over) is not None for part in kernels)
    if others or not is_known or not _is_plain(stage, parts):
        raise _Unknown
    return over


def _around(stage: StagePrograms, layer: int, hidden: int, over: _Over) -> Iterator[tuple[_Exchange, int]]:
    """The exchanges of a layer around rings, and their numbers: of products and norms.

    Args:
      hidden: bytes of the hidden states of a token.
    """
    group = parts_of(over, stage.mesh.shape)
    for name in ("qkv", "out", "up", "down"):  # the gate reads the parts that `up` reads
        yield _Exchange("collective-permute", f"layers.*.{name}", hidden // group, over), group - 1
    yield _Exchange("all-reduce", "layers.*.norms", 4, over), stage.model.hidden_sums(layer)


def _is_plain(stage: StagePrograms, parts: Mapping[str, ShardedParameter]) -> bool:
    """Whether the exchanges of split hidden states are known.

    They are not with experts, which see all tokens; beside parallel halves of a layer; where only a part of each head
    is rotated; of quantized matrices and on GPUs.
    """
    rotary = getattr(stage.model.config, "rotary", None)  # of the families that have one
    in_parts = rotary is not None and (rotary.interleaved or rotary.size < stage.model.config.head_dim)
    is_parallel = any(map(stage.model.is_parallel, stage.layers))
    has_experts = any(is_of_experts(part.axes) for part in parts.values())
    return not (in_parts or is_parallel or has_experts or stage.quantize is not None or stage.platform == "gpu")


def _lookups(
    stage: StagePrograms, parts: Mapping[str, ShardedParameter], over: Callable[[Target], _Over]
) -> Iterator[_Exchange]:
    """The all-reduces of look-ups in split tables, separate for quantized values and scales.

    The compilers of accelerators add what two tables give for a token before they add it up over devices.
    """
    item, tokens = stage.shape.attention.dtype.itemsize, parts_of(_tokens(stage, parts), stage.mesh.shape)
    tables = {name: part for name, part in parts.items() if name.startswith("embed.") and name.endswith(".table")}
    divided = {name: over(part.partition[0]) for name, part in tables.items() if part.divided[0]}
    for name, axes in divided.items():
        if f"{name}.scales" in parts:
            yield _Exchange("all-reduce", "embed.scales", item, axes)
    widths = {name: tables[name].local[1] * (1 if f"{name}.scales" in parts else item) for name in divided}
    sums = [_Exchange("all-reduce", "embed", widths[name] // tokens, axes) for name, axes in divided.items()]
    is_added = stage.platform != "cpu" and stage.quantize is None
    yield from _together(dict.fromkeys(sums) if is_added else sums)


def _exchanges(chain: Sequence[_Step]) -> Iterator[_Exchange]:
    """The exchanges within a chain of operations that starts from a replicated array.

    Partial sums are added up. Parts that an operation reads whole are gathered, or multiplied by their share of its
    matrix where adding up moves less. Whatever is whole is cut at no cost.
    """
    before = _Step("", False, (), (), ())
    for step in chain:
        if before.gives and step.reads and before.gives != step.reads:
            raise _Unknown
        is_cheaper = step.is_sum and 2 * sum(step.results) < sum(before.results)
        if before.gives and not step.reads and not is_cheaper:
            yield from (_Exchange("all-gather", before.name, nbytes, before.gives) for nbytes in before.results)
        elif step.is_sum and (before.gives or step.reads):
            yield _Exchange("all-reduce", step.name, sum(step.results), step.reads or before.gives)
        before = step


def _together(exchanges: Iterable[_Exchange]) -> Iterator[_Exchange]:
    """Merges all-reduces of equal groups, as the compiler does with independent ones."""
    sums: dict[_Over, list[_Exchange]] = {}
    for each in exchanges:
        if each.kind == "all-reduce":
            sums.setdefault(each.over, []).append(each)
        else:
            yield each
    for over, merged in sums.items():
        told = dict.fromkeys([merged[0].what, *(each.what.removeprefix("layers.*.") for each in merged[1:])])
        yield _Exchange("all-reduce", ", ".join(told), sum(each.nbytes for each in merged), over)


def head_table(parts: Mapping[str, ShardedParameter]) -> ShardedParameter:
    """The parameter that makes logits: the head's table if there is one, or the embedding's."""
    return parts.get("head.tokens.table") or parts["embed.tokens.table"]
