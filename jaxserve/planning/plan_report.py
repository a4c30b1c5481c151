"""Reports a plan as tables and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from jaxserve.planning.calibration import calibration, fit_of
from jaxserve.planning.compiled import CompiledStage, count_kinds
from jaxserve.planning.cost import Parts, Seconds
from jaxserve.planning.hlo import KINDS
from jaxserve.planning.plan import REQUEST, Plan
from jaxserve.planning.stage_load import Collective
from jaxserve.planning.tables import UNEXPECTED, UNKNOWN, Section, as_json, number, shape, size
from jaxserve.runner.sharded_parameters import ShardedParameter
from sharding import axes
from sharding.spec import Rules, shown

_REMEDIES = {
    "compute": "arithmetic: more devices or a faster kind would help",
    "memory": "reading weights and keys from memory: more rows would use the same reads for more tokens",
    "links": "links between devices: a smaller tensor size and more stages would send less",
    "overhead": "starting layers: more rows would help, fewer stages would not",
}
_SAMPLING = (
    "Sampling of greedy rows or by temperature, the same for every sharding; not in the ms above, whose constants are "
    "fitted to whole steps"
)


def show(plan: Plan, out: Console, *, brief: bool = False) -> None:
    """Print everything that was predicted, or only the headline."""
    out.print(f"[bold]{headline(plan)}[/bold]")
    if brief:
        return
    for line in spec_lines(plan):
        out.print(f"  {escape(line)}")
    for section in (_parameters(plan), _memory(plan), collectives(plan), _iterations(plan), by_part(plan)):
        section.show(out)
    out.print(bottleneck(plan))


def parameters_of(plan: Plan) -> dict[str, ShardedParameter]:
    """The parameters of all stages by name."""
    return {part.name: part for stage in plan.stages for part in stage.parameters}


def _parameters(plan: Plan) -> Section:
    counts: dict[str, int] = {}
    for part in (part for stage in plan.stages for part in stage.parameters):
        counts[part.name] = counts.get(part.name, 0) + part.count
    columns = ("parameter", "count", "logical axes", "PartitionSpec", "shape", "on each device", "bytes each")
    rows = [
        (name, str(counts[name]), axes, partition(part), shape(part.shape), shape(part.local), size(part.nbytes))
        for name, part in parameters_of(plan).items()
        for axes in [", ".join(part.axes)]
    ]
    return Section("Parameters", columns, rows)


def _memory(plan: Plan) -> Section:
    engine, devices = plan.deployment.engine, plan.deployment.engine.stage_devices
    columns = ("stage", "devices", "layers", "weights", "pool", "activations", "row state", "free", "in use")
    rows = [
        (
            str(index),
            f"{index * devices}-{(index + 1) * devices - 1}",
            f"{stage.layers[0]}-{stage.layers[1] - 1}",
            *(size(each) for each in (stage.weights, stage.pool)),
            size(stage.activations) if stage.activations_known else UNKNOWN,
            *(size(each) for each in (stage.state, stage.free)),
            f"{100 * stage.total / plan.memory[0]:.1f}%",
        )
        for index, stage in enumerate(plan.stages)
    ]
    each_one = f", in each of {engine.replicas} replicas" if engine.replicas > 1 else ""
    fit = f"{plan.requests:,} requests of {REQUEST:,} tokens{each_one}"
    note = f"{plan.slots:,} slots in blocks of {plan.block_size}, {plan.kv_cache_dtype}, fit: {fit}"
    blocks = zip(plan.groups.windows[1:], plan.groups.blocks(plan.slots // plan.block_size)[1:], strict=True)
    others = [f"{each * plan.block_size:,} slots in layers with a window of {window:,}" for window, each in blocks]
    guess = max((stage.activations for stage in plan.stages if not stage.activations_known), default=None)
    if guess is not None:
        others.append(f"Activations: the compiler decides which weights it makes whole; {size(guess)} are set aside")
    title = f"Memory of each device: {size(plan.memory[0])}, of which {size(plan.memory[1])} may be used"
    return Section(title, columns, rows, [note, *others])


def collectives(plan: Plan) -> Section:
    """The collectives among the devices of a stage."""
    bucket = plan.buckets[-1].tokens
    columns = ("stage", "after", "collective", "over", "each iteration", "each layer", f"bytes each (bucket {bucket})")
    rows, notes = [], []
    for index, stage in enumerate(plan.stages):
        for each in stage.load.collectives or ():
            a_layer = each.times // (stage.layers[1] - stage.layers[0]) if each.what.startswith("layers") else 0
            nbytes = size(_carried(plan, each, bucket))
            over = f"{each.group} ({'*'.join(each.over)})" if each.over else str(each.group)
            rows.append((str(index), each.what, each.kind, over, str(each.times), str(a_layer or "-"), nbytes))
    if not plan.is_known:
        notes = ['Collectives: to split "embed" or activations leaves the compiler a choice; --compile shows it']
    elif not rows:
        notes = ["No collectives: no stage has more than one device"]
    return Section("Collectives", columns, rows, notes)


def by_kind(plan: Plan) -> Section:
    """The collectives of one iteration in the largest bucket, by kind: of all stages together."""
    rows = [
        (kind, str(count), size(payload)) for kind, (count, payload) in payloads(plan, plan.buckets[-1].tokens).items()
    ]
    columns = ("collective", "each iteration", "payload each iteration")
    notes = [] if rows else ["No collectives" if plan.is_known else UNKNOWN.capitalize()]
    return Section(f"Collectives by kind, bucket {plan.buckets[-1].tokens}", columns, rows, notes)


def payloads(plan: Plan, bucket: int) -> dict[str, tuple[int, float]]:
    """Kind of collective -> (number, result bytes) of one iteration; none if unknown."""
    found: dict[str, tuple[int, float]] = {}
    for each in (each for stage in plan.stages for each in stage.load.collectives or ()):
        count, payload = found.get(each.kind, (0, 0.0))
        found[each.kind] = count + each.times, payload + each.times * _carried(plan, each, bucket)
    return found if plan.is_known else {}


def _carried(plan: Plan, collective: Collective, bucket: int) -> float:
    """Bytes of the result of a collective in one bucket."""
    return collective.carried(bucket, min(bucket, plan.deployment.engine.max_rows))


def _iterations(plan: Plan) -> Section:
    deployment, device, causes = plan.deployment, plan.deployment.topology.device, Seconds._fields
    columns = ("bucket", "decodes", "prompt tokens", "ms", "tokens/s", *causes, "bound by")
    rows = [
        (
            *(str(count) for count in (each.tokens, each.decodes, each.tokens - each.decodes)),
            number(each.milliseconds, ".2f"),
            number(each.tokens_per_second, ",.0f"),
            *(number(seconds and 1e3 * seconds, ".2f") for seconds in each.limit or [None] * len(causes)),
            each.bottleneck or UNKNOWN,
        )
        for each in plan.buckets
    ]
    fit, dtype = fit_of(device), deployment.dtype
    links = deployment.topology.group_bandwidth(range(deployment.engine.stage_devices))
    starts = f" and {1e6 * fit.collective_seconds:.0f} us a collective" if fit.collective_seconds else ""
    note = (
        f"Roofline: {100 * fit.efficiency:.0f}% of {device.flops[dtype] / 1e12:,.0f} TFLOP/s ({dtype}) and of "
        f"{device.bandwidth / 1e9:,.0f} GB/s memory, {100 * fit.of_links:.0f}% of {links / 1e9:,.0f} GB/s links, one "
        f"after the other, and {1e6 * fit.layer_seconds:.0f} us a layer{starts}"
    )
    title = f"Iterations: decodes at context {deployment.context:,}, then prompts; ms of the slowest stage"
    trust = calibration(device)
    notes = [note, trust[0].upper() + trust[1:], _overlap(plan), f"Buckets: {plan.buckets_reason}"]
    return Section(title, columns, rows, [each for each in notes if each])


def _overlap(plan: Plan) -> str:
    """What the times assume of collectives that run while the device multiplies."""
    if plan.deployment.engine.stage_devices == 1:
        return ""
    if not plan.overlapped:
        return "Links: as if no collective ran while the device multiplies; --compile reads from the program which do"
    bucket, shares = plan.buckets[-1].tokens, ", ".join(f"{share:.0%}" for share in plan.overlapped)
    return (
        f"Links: of bucket {bucket}, {shares} of the bytes of collectives are sent while the device multiplies or "
        "attends, by the compiled program; other buckets are predicted as if none were"
    )


def by_part(plan: Plan) -> Section:
    """The milliseconds of each bucket by what is done."""
    rows = [
        (
            str(bucket.tokens),
            *(
                number(seconds and 1e3 * seconds, ".2f")
                for seconds in plan.parts(bucket) or [None] * len(Parts._fields)
            ),
            f"{1e3 * plan.sampling(bucket):.2f}",
        )
        for bucket in plan.buckets
    ]
    return Section("The same ms by part, all stages", ("bucket", *Parts._fields, "sampling"), rows, [_SAMPLING])


def compiled(plan: Plan, stages: Sequence[CompiledStage], where: str = "") -> Section:
    """The compiled programs beside the prediction, and the differences.

    Args:
      where: for what they are compiled, in words, if it is not the plan's topology.
    """
    rows, notes = [], []
    for index, (stage, program) in enumerate(zip(plan.stages, stages, strict=True)):
        for name, predicted, found in (
            ("bytes of each device", stage.total, program.total),
            ("temporaries", stage.activations, program.temporaries),
        ):
            known = stage.activations_known
            apart = f"{100 * (predicted / found - 1):+.1f}%" if found and known else ""
            rows.append((str(index), name, size(predicted) if known else UNKNOWN, size(found), apart))
        before, after = count_kinds(stage.load.collectives or ()), count_kinds(program.collectives)
        unknown = stage.load.collectives is None
        for kind in KINDS:
            if kind in after or kind in before:
                predicted = UNKNOWN if unknown else str(before.get(kind, 0))
                rows.append((str(index), kind, predicted, str(after.get(kind, 0)), ""))
        notes += [
            f"  stage {index}: {each.times} x {each.kind} of {each.arrays}, {size(each.nbytes)} each"
            for each in program.collectives
        ]
        if program.sent:
            share = f"{program.sent_under_compute / program.sent:.0%} of it while it multiplies or attends"
            notes.append(f"  stage {index}: a device sends {size(program.sent)}, {share}")
    surprises = [f"{UNEXPECTED} {index}: {text}" for index, stage in enumerate(stages) for text in stage.surprises]
    notes += surprises or ["Nothing unexpected: no gathers of weights, no copies of weights or pool"]
    seconds = sum({id(stage): stage.seconds for stage in stages}.values())  # equal stages are compiled once
    columns = ("stage", "", "predicted", "compiled", "difference")
    title = " ".join(filter(None, ("Compiled", where)))
    return Section(f"{title}, bucket {stages[0].bucket} ({seconds:.0f} s)", columns, rows, notes)


def plan_json(plan: Plan, stages_compiled: Sequence[CompiledStage] = ()) -> dict[str, Any]:
    """The sections of the report: predictions, and compiled programs if there are any.

    The units are bytes, milliseconds and tokens per second.
    """
    deployment, stages = plan.deployment, []
    device, spec = deployment.topology.device, deployment.spec
    for stage in plan.stages:
        values, load = as_json(stage), stage.load
        del values["load"]
        stages.append(values | {"slot_bytes": load.slot_bytes, "collectives": as_json(load.collectives)})
    buckets = [
        {name: getattr(bucket, name) for name in _BUCKET}
        | {"stages": [_milliseconds(each) for each in bucket.stages]}
        | {"parts": None if (parts := plan.parts(bucket)) is None else _milliseconds(parts)}
        | {"sampling": 1e3 * plan.sampling(bucket)}
        for bucket in plan.buckets
    ]
    return {
        "model": deployment.name,
        "family": deployment.config.family,
        "dtype": deployment.dtype,
        "topology": str(deployment.topology),
        "devices": {
            "platform": device.platform,
            "shape": list(deployment.topology.shape),
            "chip_devices": device.chip_devices,
        },
        "mesh": deployment.engine.stage_axes,
        "tensor": deployment.engine.stage_devices,
        "stages": stages,
        "replicas": deployment.engine.replicas,
        "spec": {("axes" if name == "rules" else name): value for name, value in as_json(spec).items()},
        "padding": as_json(plan.padding),
        "memory": plan.memory[0],
        "usable_memory": plan.memory[1],
        "block_size": plan.block_size,
        "kv_cache_dtype": plan.kv_cache_dtype,
        "slots": plan.slots,
        "requests_of_2048": plan.requests,
        "context": deployment.context,
        "calibration": calibration(device),
        "overlapped": list(plan.overlapped),
        "buckets": buckets,
    } | ({"compiled": as_json(tuple(stages_compiled))} if stages_compiled else {})


def _milliseconds(seconds: Seconds | Parts) -> dict[str, float]:
    return {name: 1e3 * value for name, value in seconds._asdict().items()}


_BUCKET = ("tokens", "decodes", "milliseconds", "tokens_per_second", "bottleneck")


def headline(plan: Plan) -> str:
    """The deployment in one line."""
    deployment = plan.deployment
    active = f", {plan.num_active / 1e9:.3g} G active" if plan.num_active < plan.num_parameters else ""
    parameters = f"{plan.num_parameters / 1e9:.3g} G parameters{active}"
    model = f"{deployment.name} ({deployment.config.family}, {parameters}, {deployment.dtype})"
    return f"{model} on {deployment.topology} ({deployment.topology.num_devices} devices): {layout(plan)}"


def layout(plan: Plan) -> str:
    """How the devices share the work, as text."""
    engine = plan.deployment.engine
    stages = ", ".join(str(stage.layers[1] - stage.layers[0]) for stage in plan.stages)
    told = f"{axes.product(engine.stage_axes).replace(' times ', ' x ')}, stages {engine.stages}"
    told += f" (layers {stages})" if engine.stages > 1 else ""
    return told + (f", replicas {engine.replicas}" if engine.replicas > 1 else "")


def spec_lines(plan: Plan) -> list[str]:
    """The spec as text, one line per section, and its padding."""
    spec = plan.deployment.spec
    lines = [f"{title}: {_rules(rules)}" for title, rules in spec.sections().items() if rules]
    lines += [f"pad: {', '.join(sorted(spec.pad))}"] if spec.pad else []
    return lines + [f"{name} {text}" for name, text in padding(plan).items()]


def _rules(rules: Rules) -> str:
    return ", ".join(f"{axis} -> {shown(target)}" for axis, target in rules.items())


def padding(plan: Plan) -> dict[str, str]:
    """Padding and repetition of each axis as text, with the bytes that repetition takes."""
    lines = {}
    for axis, (count, held) in plan.padding.items():
        if axis == "kv_heads" and held % count == 0:
            more = max(stage.pool for stage in plan.stages) * (held - count) // held
            text = f"{count}, held as {held}: {times(held // count)}, +{size(more)} on each device"
        else:
            text = f"{count:,} padded to {held:,}, {100 * (held - count) / count:.2g}% more"
        lines[axis.replace("_", " ")] = text
    return lines


def times(copies: int) -> str:
    """How often each KV head is repeated, as text."""
    return "each twice" if copies == 2 else f"each {copies} times"


def bottleneck(plan: Plan) -> str:
    """One sentence that names the bottleneck and a remedy."""
    full = next((each for each in plan.buckets if each.decodes == plan.deployment.engine.max_rows), plan.buckets[-1])
    if full.limit is None or full.bottleneck is None:
        return "Speed unknown: it depends on the collectives that the compiler chooses"
    share = getattr(full.limit, full.bottleneck) / full.limit.total
    where = f" of stage {full.slowest}" if len(full.stages) > 1 else ""
    what = _REMEDIES[full.bottleneck]
    return f"Bottleneck with {full.decodes} rows decoding: {100 * share:.0f}% of the time{where} goes to {what}"


def partition(part: ShardedParameter) -> str:
    """A partition as text, such as "(tensor, -)"."""
    return f"({', '.join(shown(target, '-') for target in part.partition)})"
