"""Prints a plan as tables and converts it to JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from jaxserve.plan import cost
from jaxserve.plan.compiled import KINDS, CompiledStage, predicted_counts
from jaxserve.plan.cost import Collective
from jaxserve.plan.predict import REQUEST, Plan, StagePlan
from jaxserve.runner.sharded_parameters import ShardedParameter
from sharding.spec import ShardingSpec

_STEPS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def show(plan: Plan, out: Console) -> None:
    """Print everything that was predicted."""
    out.print(f"[bold]{headline(plan)}[/bold]")
    for line in spec_lines(plan.deployment.spec):
        out.print(f"  {escape(line)}")
    for axis, (count, held) in plan.padding.items():
        out.print(f"  {axis} {count:,} is padded to {held:,}, {100 * (held - count) / count:.2g}% more")
    _show_parameters(plan, out)
    _show_memory(plan, out)
    _show_collectives(plan, out)
    _show_iterations(plan, out)
    out.print(bottleneck(plan))


def _show_parameters(plan: Plan, out: Console) -> None:
    table = _table("parameter", "count", "logical axes", "PartitionSpec", "shape", "on each device", "bytes each")
    for part in {part.name: part for stage in plan.stages for part in stage.parts}.values():
        count = sum(each.count for stage in plan.stages for each in stage.parts if each.name == part.name)
        sizes = (partition(part), shape(part.shape), shape(part.local), size(part.nbytes))
        table.add_row(part.name, str(count), ", ".join(part.axes), *sizes)
    _section(out, "Parameters", table)


def _show_memory(plan: Plan, out: Console) -> None:
    tensor, replicas = plan.deployment.engine.tensor, plan.deployment.engine.replicas
    table = _table("stage", "devices", "layers", "weights", "pool", "activations", "row state", "free", "in use")
    for index, stage in enumerate(plan.stages):
        table.add_row(
            str(index),
            f"{index * tensor}-{(index + 1) * tensor - 1}",
            f"{stage.layers[0]}-{stage.layers[1] - 1}",
            *(size(each) for each in (stage.weights, stage.pool, stage.activations, stage.state, stage.free)),
            f"{100 * stage.total / plan.memory[0]:.1f}%",
        )
    title = f"Memory of each device: {size(plan.memory[0])}, of which {size(plan.memory[1])} may be used"
    _section(out, title, table)
    each_one = f", in each of {replicas} replicas" if replicas > 1 else ""
    fit = f"{plan.requests:,} requests of {REQUEST:,} tokens{each_one}"
    out.print(f"{plan.slots:,} slots in blocks of {plan.block_size}, {plan.kv_cache_dtype}, fit: {fit}")


def _show_collectives(plan: Plan, out: Console) -> None:
    bucket = plan.buckets[-1].tokens
    table = _table("stage", "after", "collective", "each iteration", "each layer", f"bytes each (bucket {bucket})")
    for index, stage in enumerate(plan.stages):
        for each in stage.collectives or ():
            a_layer = each.times // (stage.layers[1] - stage.layers[0]) if each.what.startswith("layers") else 0
            nbytes = size(carried(plan, each, bucket))
            table.add_row(str(index), each.what, each.kind, str(each.times), str(a_layer or "-"), nbytes)
    if any(stage.collectives is None for stage in plan.stages):
        out.print('\nCollectives: to split "embed" or activations leaves the compiler a choice; --compile shows it')
    elif table.row_count:
        _section(out, f"Collectives, each over {plan.deployment.engine.tensor} devices", table)
    else:
        out.print("\nNo collectives: no stage has more than one device")


def _show_iterations(plan: Plan, out: Console) -> None:
    deployment, device = plan.deployment, plan.deployment.topology.device
    table = _table(
        "bucket", "decodes", "prompt tokens", "ms", "tokens/s", "compute", "memory", "links", "overhead", "bound by"
    )
    for each in plan.buckets:
        table.add_row(
            *(str(count) for count in (each.tokens, each.decodes, each.tokens - each.decodes)),
            f"{each.milliseconds:.2f}",
            f"{each.tokens_per_second:,.0f}",
            *(f"{1e3 * seconds:.2f}" for seconds in each.stages[each.slowest]),
            Text(each.bottleneck, "bold"),
        )
    _section(
        out, f"Iterations: decodes at context {deployment.context:,}, then prompts; ms of the slowest stage", table
    )
    fit, dtype = cost.FITS[device.platform], deployment.dtype
    links = deployment.topology.group_bandwidth(deployment.engine.tensor)
    out.print(
        f"Roofline: {100 * fit.efficiency:.0f}% of {device.flops[dtype] / 1e12:,.0f} TFLOP/s ({dtype}), of "
        f"{device.bandwidth / 1e9:,.0f} GB/s memory and of {links / 1e9:,.0f} GB/s links, one after the other, and "
        f"{1e6 * fit.layer_seconds:.0f} us a layer"
    )


def show_compiled(plan: Plan, stages: Sequence[CompiledStage], out: Console) -> None:
    """Print the compiled programs next to the prediction; surprises in red."""
    table = _table("stage", "", "predicted", "compiled", "difference")
    for index, (stage, compiled) in enumerate(zip(plan.stages, stages, strict=True)):
        for name, predicted, found in (
            ("bytes of each device", stage.total, compiled.total),
            ("temporaries", stage.activations, compiled.temporaries),
        ):
            apart = f"{100 * (predicted / found - 1):+.1f}%" if found else ""
            table.add_row(str(index), name, size(predicted), size(found), apart)
        before, after = predicted_counts(plan, index), compiled.counts()
        for kind in KINDS:
            if kind in after or kind in (before or {}):
                table.add_row(
                    str(index), kind, str(before.get(kind, 0)) if before else "-", str(after.get(kind, 0)), ""
                )
    seconds = sum({id(stage): stage.seconds for stage in stages}.values())  # equal stages are compiled once
    _section(out, f"Compiled, bucket {stages[0].bucket} ({seconds:.0f} s)", table)
    for index, compiled in enumerate(stages):
        for each in compiled.collectives:
            out.print(escape(f"  stage {index}: {each.times} x {each.kind} of {each.arrays}, {size(each.nbytes)} each"))
    surprises = [(index, text) for index, stage in enumerate(stages) for text in stage.surprises]
    if not surprises:
        out.print("[green]Nothing unexpected: no gathers of weights, no copies of weights or pool[/green]")
    for index, text in surprises:
        out.print(f"[bold red]unexpected in stage {index}:[/bold red] [red]{escape(text)}[/red]")


def as_json(plan: Plan, compiled: Sequence[CompiledStage] = ()) -> dict[str, Any]:
    """Everything that was predicted, and what was compiled, if it was.

    The units are bytes, milliseconds and tokens per second.
    """
    deployment = plan.deployment
    return {
        "model": deployment.name,
        "family": deployment.config.family,
        "dtype": deployment.dtype,
        "topology": str(deployment.topology),
        "devices": {
            "platform": deployment.topology.device.platform,
            "shape": list(deployment.topology.shape),
            "chip_devices": deployment.topology.device.chip_devices,
        },
        "tensor": deployment.engine.tensor,
        "stages": [_stage_json(stage) for stage in plan.stages],
        "replicas": deployment.engine.replicas,
        "spec": {
            "axes": dict(deployment.spec.rules),
            "parameters": {glob: dict(rules) for glob, rules in deployment.spec.parameters.items()},
            "activations": dict(deployment.spec.activations),
            "pool": dict(deployment.spec.pool),
            "pad": sorted(deployment.spec.pad),
        },
        "padding": {axis: list(sizes) for axis, sizes in plan.padding.items()},
        "memory": plan.memory[0],
        "usable_memory": plan.memory[1],
        "block_size": plan.block_size,
        "kv_cache_dtype": plan.kv_cache_dtype,
        "slots": plan.slots,
        "requests_of_2048": plan.requests,
        "context": deployment.context,
        "buckets": [
            {
                "tokens": bucket.tokens,
                "decodes": bucket.decodes,
                "milliseconds": bucket.milliseconds,
                "tokens_per_second": bucket.tokens_per_second,
                "bottleneck": bucket.bottleneck,
                "stages": [{name: 1e3 * value for name, value in each._asdict().items()} for each in bucket.stages],
            }
            for bucket in plan.buckets
        ],
    } | ({"compiled": [_compiled_json(stage) for stage in compiled]} if compiled else {})


def _stage_json(stage: StagePlan) -> dict[str, Any]:
    names = ("name", "count", "axes", "partition", "shape", "local", "nbytes")
    collectives = None
    if stage.collectives is not None:
        collectives = [each._asdict() for each in stage.collectives]
    return {
        "layers": list(stage.layers),
        "weights": stage.weights,
        "pool": stage.pool,
        "activations": stage.activations,
        "state": stage.state,
        "free": stage.free,
        "slot_bytes": stage.slot_bytes,
        "parameters": [{name: getattr(part, name) for name in names} for part in stage.parts],
        "collectives": collectives,
    }


def _compiled_json(stage: CompiledStage) -> dict[str, Any]:
    return {
        "bucket": stage.bucket,
        "seconds": stage.seconds,
        "arguments": stage.arguments,
        "temporaries": stage.temporaries,
        "total": stage.total,
        "collectives": [each._asdict() for each in stage.collectives],
        "surprises": list(stage.surprises),
    }


def headline(plan: Plan) -> str:
    """The deployment in one line."""
    deployment = plan.deployment
    stages = ", ".join(str(stage.layers[1] - stage.layers[0]) for stage in plan.stages)
    layout = f"tensor {deployment.engine.tensor}, stages {deployment.engine.stages}"
    layout += f" (layers {stages})" if deployment.engine.stages > 1 else ""
    layout += f", replicas {deployment.engine.replicas}" if deployment.engine.replicas > 1 else ""
    model = (
        f"{deployment.name} ({deployment.config.family}, {plan.parameters / 1e9:.3g} G parameters, {deployment.dtype})"
    )
    return f"{model} on {deployment.topology} ({deployment.topology.num_devices} devices): {layout}"


def spec_lines(spec: ShardingSpec) -> list[str]:
    """A spec as text, one line per section."""
    sections = {"axes": spec.rules, **{f'parameters."{glob}"': rules for glob, rules in spec.parameters.items()}}
    sections |= {"activations": spec.activations, "pool": spec.pool}
    lines = [f"{title}: {rules_text(rules)}" for title, rules in sections.items() if rules]
    return lines + ([f"pad: {', '.join(sorted(spec.pad))}"] if spec.pad else [])


def rules_text(rules: Mapping[str, str | None]) -> str:
    """The rules as text, such as "heads -> tensor, embed -> none"."""
    return ", ".join(f"{axis} -> {target or 'none'}" for axis, target in rules.items())


def bottleneck(plan: Plan) -> str:
    """One sentence that names the bottleneck and a remedy."""
    full = next((each for each in plan.buckets if each.decodes == plan.deployment.engine.max_rows), plan.buckets[-1])
    seconds = full.stages[full.slowest]
    share = getattr(seconds, full.bottleneck) / seconds.total
    where = f" of stage {full.slowest}" if len(full.stages) > 1 else ""
    what = {
        "compute": "arithmetic: more devices or a faster kind would help",
        "memory": "reading weights and keys from memory: more rows would use the same reads for more tokens",
        "links": "links between devices: a smaller tensor size and more stages would send less",
        "overhead": "starting layers: fewer stages would not help, more rows would",
    }[full.bottleneck]
    return f"Bottleneck with {full.decodes} rows decoding: {100 * share:.0f}% of the time{where} goes to {what}"


def carried(plan: Plan, collective: Collective, bucket: int) -> int:
    """Bytes of the result of a collective in one bucket."""
    return collective.nbytes * (min(bucket, plan.deployment.engine.max_rows) if collective.per_row else bucket)


def partition(part: ShardedParameter) -> str:
    """A partition as text, such as "(tensor, -)"."""
    return f"({', '.join(target or '-' for target in part.partition)})"


def shape(sizes: Sequence[int]) -> str:
    """A shape as text, such as "15680 x 14336"."""
    return " x ".join(map(str, sizes)) or "scalar"


def size(nbytes: int) -> str:
    """Bytes as text, in the unit that fits."""
    for step, unit in _STEPS:
        if abs(nbytes) >= step:
            return f"{nbytes / step:.2f} {unit}"
    return f"{nbytes} B"


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in columns:
        words = column in ("parameter", "logical axes", "PartitionSpec", "after", "collective", "", "bound by")
        table.add_column(column, justify="left" if words else "right", no_wrap=True)
    return table


def _section(out: Console, title: str, table: Table) -> None:
    out.print(f"\n[bold]{title}[/bold]")
    out.print(table)
