"""Compiles a plan's programs for absent devices and reads their memory and collectives."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax

from jaxserve.planning.cost import Collective
from jaxserve.planning.deployment import Deployment, programs
from jaxserve.planning.predict import Plan, bucket_plan
from jaxserve.planning.targets import lowering
from jaxserve.runner import compiler_options, sharded_parameters
from jaxserve.runner.lowering import StagePrograms, temporaries

Progress = Callable[[str, int, int], None]

_NOTABLE = 2**20  # bytes from which a copy is reported
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
_INSTRUCTION = re.compile(r"= (?P<shape>\(.*?\)|\S+) (?P<op>[a-z][a-z0-9-]*?)(?P<start>-start)?\(")
# A copy into a TPU's vector memory (1), or into the other on-chip memory of v4 (3): a prefetch of what a matmul reads.
_FETCH = re.compile(r"= \(?[a-z0-9]+\[[0-9,]*\]\{[^}]*S\([13]\)")
_COMPUTATION = re.compile(r"\s*(ENTRY )?%?(?P<name>[\w.-]+) \(.*\{$")
_FUSED = re.compile(r" fusion\(.*calls=%?([\w.-]+)")
_ARRAY = re.compile(r"(?P<dtype>[a-z]+[0-9]*)\[(?P<sizes>[0-9,]*)\]")
_GROUPS = re.compile(
    r"replica_groups=(?:\{\{(?P<first>[\d,]+)\}|\[\d+,(?P<size>\d+)\]"
    r"|mesh\[(?P<axes>[^\]]*)\](?:, device_ids=\S+)? \{(?P<over>[^}]*)\})"
)
_WIDTHS = {"pred": 1, "bf16": 2}


class CollectiveOp(NamedTuple):
    """Collectives of one kind and result in a compiled program.

    Attributes:
      arrays: the results, as the program writes them: bf16[64,14336].
      nbytes: bytes of one of them on each device.
      group: devices that take part in one; 0 if the program does not say.
    """

    kind: str
    arrays: str
    nbytes: int
    times: int
    group: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledStage:
    """The compiled programs of a stage's largest bucket and its head; sizes in bytes per device.

    Attributes:
      seconds: compile time.
      arguments: weights, pool and other inputs.
      temporaries: memory beside the arguments, including results in new buffers.
      total: both, and the row state that other programs hold.
      surprises: collectives and copies that were not predicted, as text.
    """

    bucket: int
    seconds: float
    arguments: int
    temporaries: int
    total: int
    collectives: tuple[CollectiveOp, ...]
    surprises: tuple[str, ...]


def count_kinds(found: Iterable[Collective | CollectiveOp]) -> Counter[str]:
    """Collectives by kind."""
    counts: Counter[str] = Counter()
    for each in found:
        counts[each.kind] += each.times
    return counts


def with_compiled(plan: Plan, stages: Sequence[CompiledStage]) -> Plan:
    """Fills in unknown collectives from compiled programs, and the largest bucket's time."""
    if plan.is_known:
        return plan
    made = []
    for stage, compiled in zip(plan.stages, stages, strict=True):
        devices = math.prod(stage.load.mesh.values())
        found = tuple(
            Collective(
                op.kind, f"{op.arrays} (compiled)", op.nbytes / compiled.bucket, False, op.group or devices, op.times
            )
            for op in compiled.collectives
        )
        load = stage.load if stage.load.collectives is not None else replace(stage.load, collectives=found)
        made.append(replace(stage, load=load))
    known = replace(plan, stages=tuple(made))
    largest = bucket_plan(plan.deployment, known.roofline(), stages[0].bucket)
    return replace(known, buckets=(*plan.buckets[:-1], largest))


def compile_stages(plan: Plan, devices: Sequence[Any], progress: Progress) -> tuple[CompiledStage, ...]:
    """Compile the largest bucket of each stage for devices. Equal stages are compiled once.

    Raises:
      ValueError: the compiler fails; the message has the first line of its error.
    """
    deployment, made = plan.deployment, []
    stages = programs(deployment, devices)
    known: dict[Any, CompiledStage] = {}
    for index, stage in enumerate(stages):
        progress("compiling", index, len(stages))
        kinds = tuple(map(stage.model.config.layer_kind, stage.layers))
        alike = (kinds, plan.stages[index].parameters)
        if alike not in known:
            known[alike] = _compile(plan, index, stage, deployment)
        made.append(known[alike])
    progress("compiling", len(stages), len(stages))
    return tuple(made)


def _compile(plan: Plan, index: int, stage: StagePrograms, deployment: Deployment) -> CompiledStage:
    bucket = deployment.buckets[-1]
    options = compiler_options.of(stage.mesh.devices.flat[0].platform, absent=True)
    started = time.perf_counter()
    try:
        with lowering(stage.mesh):
            lowered = [stage.lower_forward(bucket, plan.slots // plan.block_size)]
            if stage.is_last:
                lowered.append(stage.lower_head(stage.shape.layout(bucket).points))
        made = [each.compile(options) for each in lowered]
    except RuntimeError as problem:
        raise ValueError(f"stage {index} does not compile: {str(problem).splitlines()[0]}") from problem
    seconds = time.perf_counter() - started
    state = stage.state()
    elsewhere = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.sampling))
    arguments, exchanges, copied = 0, [], []
    for program in made:
        memory, text = program.memory_analysis(), program.as_text()
        assert memory is not None
        assert text is not None
        arguments = arguments or memory.argument_size_in_bytes
        exchanges += collectives(text)
        copied += copies(stage, text, plan.slots // plan.block_size)
    beside = temporaries(*made)
    return CompiledStage(
        bucket=bucket,
        seconds=seconds,
        arguments=arguments,
        temporaries=beside,
        total=arguments + beside + elsewhere,
        collectives=tuple(exchanges),
        surprises=(*unforeseen(stage, exchanges, plan.stages[index].load.collectives), *copied),
    )


def collectives(text: str) -> list[CollectiveOp]:
    """The collectives in an HLO module; one in a loop counts once."""
    found: Counter[tuple[str, str, int, int]] = Counter()
    for op, arrays, line in _instructions(text):
        if op in KINDS:
            size, names = sum(nbytes for _, nbytes in arrays), ", ".join(name for name, _ in arrays)
            found[op, names, size, _group(line)] += 1
    return [CollectiveOp(*key[:3], count, key[3]) for key, count in found.items()]


def _group(line: str) -> int:
    """Devices of a group, from `replica_groups=` and `{{0,1},{2,3}}`, `[2,2]<=[4]` or `mesh['x'=2,'y'=2] {'x'}`."""
    match = _GROUPS.search(line)
    if match is None:
        return 0
    if match["axes"] is None:
        return int(match["size"]) if match["size"] else match["first"].count(",") + 1
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", match["axes"]))
    # A part of an axis is written 'x':(1)2, of size 2.
    over = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", match["over"])
    return math.prod(int(part or sizes[axis]) for axis, part in over)


def _instructions(text: str) -> Iterator[tuple[str, list[tuple[str, int]], str]]:
    """(operation, [(array, bytes), ...] of its result, the whole line) of each instruction.

    Instructions within fusions are left out, because their results are never in memory, unless they are collectives. An
    all-reduce in a fusion `all-reduce-scatter` is a reduce-scatter with the fusion's result; so TPUs have them.
    """
    fused, inside, given = set(_FUSED.findall(text)), "", ""
    for line in text.splitlines():
        if (opening := _COMPUTATION.match(line)) is not None:
            inside, given = opening["name"] if opening["name"] in fused else "", line.rpartition("->")[2]
        match = _INSTRUCTION.search(line)
        if match is None or (inside and match["op"] not in KINDS):
            continue
        if inside.startswith("all-reduce-scatter"):
            yield "reduce-scatter", _arrays(given), line
            continue
        arrays = _arrays(match["shape"])
        # An all-reduce has its results only, on TPUs and CPUs.
        if match["start"] and (match["op"] != "all-reduce" or match["shape"].startswith("((")):
            arrays = _results(arrays, match["op"])
        yield match["op"], arrays, line


def _arrays(shape: str) -> list[tuple[str, int]]:
    """(array, bytes) of each array in a shape."""
    return [(f"{a['dtype']}[{a['sizes']}]", _nbytes(a)) for a in _ARRAY.finditer(shape)]


def _results(arrays: list[tuple[str, int]], op: str) -> list[tuple[str, int]]:
    """The results of a start whose arrays are operands, as many results and, for permutes, two contexts of u32[]."""
    if op == "collective-permute":
        arrays = [each for each in arrays if each[0] != "u32[]"]
    return arrays[len(arrays) // 2 :] if op in KINDS else arrays[:1]


def _nbytes(array: re.Match[str]) -> int:
    width = _WIDTHS.get(array["dtype"]) or max(int(re.sub(r"\D", "", array["dtype"]) or 8) // 8, 1)
    return width * math.prod(int(size) for size in array["sizes"].split(",") if size)


def unforeseen(
    stage: StagePrograms, exchanges: Sequence[CollectiveOp], predicted: Sequence[Collective] | None
) -> Iterator[str]:
    """Collectives that were not predicted."""
    whole = {} if stage.spec.gather else _kernels(stage, "shape")
    for each in exchanges:
        for array in each.arrays.split(", "):
            if each.kind != "all-reduce" and _arrangement(_sizes(array)) in whole:
                yield f"{each.times} x {each.kind} of {array}: gathers the weights {whole[_arrangement(_sizes(array))]}"
    if predicted is not None:
        found, foreseen = count_kinds(exchanges), count_kinds(predicted)
        for kind in KINDS:
            if found[kind] != foreseen[kind]:
                yield f"{found[kind]} x {kind}, but {foreseen[kind]} were predicted"


def copies(stage: StagePrograms, text: str, n_blocks: int) -> Iterator[str]:
    """Copies of the key and value pool, or of a kernel or table."""
    weights = _kernels(stage, "local")
    n_blocks = stage.first_blocks(n_blocks)[-1]
    pool = jax.tree.leaves(stage.shape.backend.pool(stage.shape.attention, n_blocks))
    pools = {(math.prod(leaf.shape), 8 * leaf.dtype.itemsize) for leaf in pool}
    found: Counter[tuple[str, str, int, bool]] = Counter()
    for op, arrays, line in _instructions(text):
        if op not in ("copy", "transpose") or not arrays or arrays[0][1] < _NOTABLE or _FETCH.search(line):
            continue
        name, nbytes = arrays[0]
        sizes = _sizes(name)
        elements = math.prod(sizes)
        if n_blocks in sizes and (elements, 8 * nbytes // elements) in pools:
            what = "the pool"
        elif _arrangement(sizes) in weights:
            what = f"the weights {weights[_arrangement(sizes)]}"
        else:
            continue
        found[what, name, nbytes, "while" in line] += 1
    for (what, name, nbytes, loop), count in found.items():
        where = " in every iteration of a loop" if loop else ""
        yield f"{count} x copy of {what} as {name} ({nbytes / 2**20:.1f} MiB){where}"


def _kernels(stage: StagePrograms, which: Literal["shape", "local"]) -> dict[tuple[int, ...], str]:
    """Names of the kernels and tables of each size, transposed or not."""
    names: dict[tuple[int, ...], str] = {}
    for part in sharded_parameters.group_layers([sharded_parameters.parameters_of(stage).values()])[0]:
        if len(part.shape) > 1:
            sizes = _arrangement(getattr(part, which))
            names[sizes] = f"{names[sizes]} or {part.name}" if sizes in names else part.name
    return names


def _sizes(array: str) -> tuple[int, ...]:
    match = _ARRAY.match(array)
    assert match is not None
    return tuple(int(size) for size in match["sizes"].split(",") if size)


def _arrangement(sizes: Sequence[int]) -> tuple[int, ...]:
    """The sizes in sorted order, which a transposed copy shares."""
    return tuple(sorted(size for size in sizes if size > 1))
