"""Compiles a plan's programs for absent devices and reads their memory and collectives."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax

from jaxserve.planning import hlo, overlap
from jaxserve.planning.deployment import Deployment, programs
from jaxserve.planning.plan import Plan, bucket_plan
from jaxserve.planning.stage_load import Collective
from jaxserve.planning.targets import lowering
from jaxserve.runner import compiler_options, sharded_parameters
from jaxserve.runner.lowering import StagePrograms, temporaries

Progress = Callable[[str, int, int], None]

_NOTABLE = 2**20  # bytes from which a copy is reported
# A copy into a TPU's vector memory (1), or into the other on-chip memory of v4 (3): a prefetch of what a matmul reads.
_FETCH = re.compile(r"= \(?[a-z0-9]+\[[0-9,]*\]\{[^}]*S\([13]\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledStage:
    """The compiled programs of a stage's largest bucket and its head; sizes in bytes per device.

    Attributes:
      seconds: compile time.
      arguments: weights, pool and other inputs.
      temporaries: memory beside the arguments, including results in new buffers.
      total: both, and the row state that other programs hold.
      sent: bytes that a device sends in an iteration.
      sent_under_compute: those that it sends while it multiplies or attends.
      surprises: collectives and copies that were not predicted, as text.
    """

    bucket: int
    seconds: float
    arguments: int
    temporaries: int
    total: int
    collectives: tuple[hlo.CollectiveOp, ...]
    sent: int
    sent_under_compute: int
    surprises: tuple[str, ...]


def count_kinds(found: Iterable[Collective | hlo.CollectiveOp]) -> Counter[str]:
    """Collectives by kind."""
    counts: Counter[str] = Counter()
    for each in found:
        counts[each.kind] += each.times
    return counts


def with_compiled(plan: Plan, stages: Sequence[CompiledStage], *, overlap: bool) -> Plan:
    """Fills in unknown collectives from compiled programs, and the largest bucket's time.

    Args:
      overlap: what is sent while the device multiplies or attends shortens that time, as in the programs' schedules.
    """
    shares = tuple(each.sent_under_compute / max(each.sent, 1) for each in stages) if overlap else ()
    if plan.is_known and not any(shares):
        return replace(plan, overlapped=shares)
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
    known, bucket = replace(plan, stages=tuple(made), overlapped=shares), stages[0].bucket
    largest = bucket_plan(plan.deployment, known.roofline(bucket=bucket), bucket)
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
    arguments, exchanges, copied, sent = 0, [], [], []
    for program in made:
        memory, text = program.memory_analysis(), program.as_text()
        assert memory is not None
        assert text is not None
        arguments = arguments or memory.argument_size_in_bytes
        exchanges += hlo.collectives(text)
        sent += overlap.exchanges(text)
        copied += copies(stage, text, plan.slots // plan.block_size)
    beside = temporaries(*made)
    return CompiledStage(
        bucket=bucket,
        seconds=seconds,
        arguments=arguments,
        temporaries=beside,
        total=arguments + beside + elsewhere,
        collectives=tuple(exchanges),
        sent=round(sum(each.sent for each in sent)),
        sent_under_compute=round(sum(each.sent for each in sent if each.under)),
        surprises=(*unforeseen(stage, exchanges, plan.stages[index].load.collectives), *copied),
    )


def unforeseen(
    stage: StagePrograms, exchanges: Sequence[hlo.CollectiveOp], predicted: Sequence[Collective] | None
) -> Iterator[str]:
    """Collectives that were not predicted."""
    whole = {} if stage.spec.gather else _kernels(stage, "shape")
    for each in exchanges:
        for array in each.arrays.split(", "):
            sizes = _arrangement(hlo.sizes_of(array))
            if each.kind != "all-reduce" and sizes in whole:
                yield f"{each.times} x {each.kind} of {array}: gathers the weights {whole[sizes]}"
    if predicted is not None:
        found, foreseen = count_kinds(exchanges), count_kinds(predicted)
        for kind in hlo.KINDS:
            if found[kind] != foreseen[kind]:
                yield f"{found[kind]} x {kind}, but {foreseen[kind]} were predicted"


def copies(stage: StagePrograms, text: str, n_blocks: int) -> Iterator[str]:
    """Copies of the key and value pool, or of a kernel or table."""
    weights = _kernels(stage, "local")
    n_blocks = stage.first_blocks(n_blocks)[-1]
    pool = jax.tree.leaves(stage.shape.backend.pool(stage.shape.attention, n_blocks))
    pools = {(math.prod(leaf.shape), 8 * leaf.dtype.itemsize) for leaf in pool}
    found: Counter[tuple[str, str, int, bool]] = Counter()
    for op, arrays, line in hlo.instructions(text):
        if op not in ("copy", "transpose") or not arrays or arrays[0][1] < _NOTABLE or _FETCH.search(line):
            continue
        name, nbytes = arrays[0]
        sizes = hlo.sizes_of(name)
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


def _arrangement(sizes: Sequence[int]) -> tuple[int, ...]:
    """The sizes in sorted order, which a transposed copy shares."""
    return tuple(sorted(size for size in sizes if size > 1))
