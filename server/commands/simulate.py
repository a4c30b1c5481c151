"""`jaxserve simulate`: runs the scheduler on a virtual clock, with traffic."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from server.commands import console, flags
from server.commands.plan import make_deployment

if TYPE_CHECKING:
    from jaxserve.simulate.policy_comparison import Policy
    from jaxserve.simulate.system import Objective, SimulatedEngine
    from jaxserve.simulate.workload import Workload

HELP = """\
Runs the engine's own scheduler on a virtual clock, with a roofline model of the devices: no accelerator, no weights.

  jaxserve simulate --trace FILE --model bloom-176b --topology a100-80g:1x8 --tensor 8 --max-rows 64
  jaxserve simulate --trace FILE --model gpt3-13b --topology h100:1 --slo ttft=500ms,tpot=50ms --speed 2
  jaxserve simulate --trace FILE --day 3h --autoscale deploy/kustomize/components/scaling/scaledobject.yaml \
    --model gpt3-13b --topology h100:1
  jaxserve simulate --rate 12 --requests 1000000 --policies grow --model gpt3-13b --topology h100:1

--trace serves recorded traffic under several policies, --rate synthetic traffic. With --autoscale replicas follow the
load by the rule of a KEDA ScaledObject, beside fleets of a fixed size. Traces: Azure LLM inference (CSV:
TIMESTAMP,ContextTokens,GeneratedTokens) and Mooncake (a JSON object a line: timestamp, input_length, output_length,
hash_ids). Requests longer than the context are clipped. The engine's flags mean what they mean to `jaxserve serve`.
docs/simulator.md explains and has examples."""

_VOCABULARY = 256  # enough to distinguish prefixes, and Python keeps one object for each number below 257


def add_flags(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--trace", type=Path, metavar="FILE", help="recorded arrivals and lengths")
    what.add_argument(
        "--rate", type=float, metavar="R", help="synthetic traffic: Poisson arrivals, R a second, uniform lengths"
    )
    group = parser.add_argument_group("synthetic traffic")
    group.add_argument("--prompt", default="32:512", metavar="LOW:HIGH", help="prompt tokens (default: %(default)s)")
    group.add_argument("--output", default="1:128", metavar="LOW:HIGH", help="generated tokens (default: %(default)s)")
    group = parser.add_argument_group("policies")
    group.add_argument(
        "--client-max-tokens",
        type=int,
        metavar="N",
        help="what clients give as max_tokens, where it is more than they use (default: exactly what they use)",
    )
    group.add_argument(
        "--policies", metavar="A,B", help="only these (default: all; they are named in the first column)"
    )
    group.add_argument(
        "--urgent", type=share, default=0.1, metavar="X", help="share served with priority (default: %(default)s)"
    )
    group.add_argument(
        "--flood",
        type=_times,
        default=0.0,
        metavar="X",
        help="another tenant that sends X times this traffic as well, with turns between tenants and without",
    )
    group = parser.add_argument_group("replicas that follow the load")
    group.add_argument(
        "--autoscale",
        type=Path,
        metavar="FILE",
        help="a ScaledObject whose rule sets the replicas, instead of policies; --topology has the devices of one",
    )
    group.add_argument(
        "--replica-start",
        type=flags.duration,
        default="120s",
        metavar="S",
        help="from the start of a replica until it takes requests (default: %(default)s)",
    )
    group.add_argument(
        "--day",
        type=flags.duration,
        metavar="3h",
        help="move a trace's requests to follow a day of this length, from its quietest time to the next",
    )
    add_trace_flags(parser)


def add_trace_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of traffic, devices, objective, results and engine."""
    group = parser.add_argument_group("traffic and devices")
    group.add_argument("--model", metavar="NAME|FILE|DIR", help="name, config.json or checkpoint")
    group.add_argument("--topology", metavar="h100:8", help="devices")
    group.add_argument(
        "--slo",
        type=_objective,
        default="ttft=1s,tpot=100ms",
        metavar="ttft=1s,tpot=100ms",
        help="time to the first token and between tokens that a request must meet (default: %(default)s)",
    )
    group.add_argument(
        "--requests",
        type=int,
        metavar="N",
        help="how many; a shorter trace is repeated (default: all of a trace; 3000 synthetic ones)",
    )
    group.add_argument(
        "--speed", type=float, default=1.0, metavar="X", help="replay a trace X times as fast (default: %(default)s)"
    )
    group.add_argument(
        "--columns",
        type=_columns,
        metavar="time=T,prompt=P,output=O[,tenant=N]",
        help="columns of a CSV trace with another header: arrival (a date or seconds), tokens, and who asks",
    )
    group.add_argument("--seed", type=_seed, default=0, metavar="N", help="of synthetic tokens (default: %(default)s)")
    group = parser.add_argument_group("results")
    group.add_argument("--plot", type=Path, metavar="FILE", help="draw the result (.png, .svg)")
    group.add_argument("--json", action="store_true", help="print JSON instead of tables")
    flags.add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Simulates the traffic; prints, draws or writes the result. Returns 0."""
    console.check_positive(args, "requests", "client_max_tokens")
    console.check_output("--plot", args.plot, is_picture=True)
    out = console.tables()
    with console.user_errors():
        answer = _simulate(args, out)
    if args.plot is not None:
        console.say(f"{args.plot} is written")
    if args.json:
        console.print_json(answer)
    return 0


def _simulate(args: argparse.Namespace, out: Console) -> dict[str, Any]:
    deployment = make_deployment(args)
    workload = _workload(args, deployment.max_context)
    from jaxserve.planning import plan_report
    from jaxserve.planning.calibration import calibration
    from jaxserve.planning.predict import predict
    from jaxserve.simulate import policy_comparison

    plan = predict(deployment)
    deployment = plan.deployment
    system = policy_comparison.system_of(plan, deployment.engine)
    title = f"{workload.name}, {workload.duration:,.0f} s; {plan_report.headline(plan)}"
    answer = {
        "workload": workload.name,
        "notes": workload.notes,
        "clipped": workload.clipped,
        "calibration": calibration(deployment.topology.device),
        "slots": system.slots,
    }
    if not args.json:
        out.print(f"[bold]{title}[/bold]")
        buckets = ", ".join(str(cost.size) for cost in system.costs)
        out.print(f"{deployment.engine.max_rows} rows, {system.slots:,} slots, buckets {buckets}")
        out.print(f"buckets: {plan.buckets_reason}")
        out.print(calibration(deployment.topology.device))
        for note in workload.notes:
            out.print(note)
    serve = _serve_policies if args.autoscale is None else _serve_autoscaled
    return answer | serve(args, system, workload, title, out)


def _serve_policies(
    args: argparse.Namespace, system: SimulatedEngine, workload: Workload, title: str, out: Console
) -> dict[str, Any]:
    from jaxserve.simulate import policy_comparison

    objective = args.slo
    with console.progress_bars() as progress:
        replays = policy_comparison.compare(
            system,
            workload,
            _chosen(policy_comparison.policies(system, objective, args.urgent, args.flood), args.policies),
            max_tokens=args.client_max_tokens,
            seed=args.seed,
            progress=progress,
        )
    figures = [policy_comparison.figures(each, objective) for each in replays]
    if not args.json:
        policy_comparison.show(figures, objective, system.slots, out)
    if args.plot is not None:
        policy_comparison.plot(replays, objective, title, args.plot)
    return {"policies": figures}


def _serve_autoscaled(
    args: argparse.Namespace, system: SimulatedEngine, workload: Workload, title: str, out: Console
) -> dict[str, Any]:
    from jaxserve.simulate import day
    from jaxserve.simulate.autoscaling import ScalingRule

    if args.policies is not None or args.flood or system.replicas > 1:
        raise console.UserError("--autoscale does not go with --policies, --flood or --replicas: it sets the replicas")
    with console.progress_bars() as progress:
        results = day.compare(
            system,
            workload,
            ScalingRule.read(args.autoscale),
            start_seconds=args.replica_start,
            max_tokens=args.client_max_tokens,
            progress=progress,
        )
    figures = [day.figures(each, args.slo) for each in results]
    if not args.json:
        day.show(figures, args.slo, out)
    if args.plot is not None:
        day.plot(results, args.slo, title, args.plot)
    return {"fleets": figures}


def _workload(args: argparse.Namespace, max_context: int) -> Workload:
    if args.day is None:
        return (_synthetic if args.trace is None else read_trace)(args, max_context)
    from jaxserve.simulate import day

    if args.trace is None or args.requests is not None:
        raise console.UserError("--day goes with --trace and without --requests: its length says how many there are")
    return day.of_a_day(read_trace(args, max_context, seconds=args.day), args.day)


def _synthetic(args: argparse.Namespace, max_context: int) -> Workload:
    """Uniform lengths and Poisson arrivals, as in Orca's evaluation."""
    from jaxserve.simulate import workload as load

    workload = load.uniform(
        requests=args.requests or 3000,
        prompt=load.Range.parse(args.prompt),
        output=load.Range.parse(args.output),
        vocab_size=_VOCABULARY,
        seed=args.seed,
    )
    load.fit(workload, max_context)
    return load.poisson(workload, rate=args.rate, seed=args.seed)


def _chosen(policies: Sequence[Policy], names: str | None) -> Sequence[Policy]:
    if names is None:
        return policies
    known = {policy.name: policy for policy in policies}
    for name in names.split(","):
        if name not in known:
            raise console.UserError(f"--policies names {name!r}; there are {', '.join(known)}")
    return [known[name] for name in names.split(",")]


def read_trace(args: argparse.Namespace, max_context: int, seconds: float | None = None) -> Workload:
    """The recorded traffic of the flags, of so many seconds; notes count clipped requests."""
    from jaxserve.simulate import workload as load

    return load.read_trace(
        args.trace,
        max_context=max_context,
        vocab_size=_VOCABULARY,
        seed=args.seed,
        limit=args.requests,
        seconds=seconds,
        speed=args.speed,
        columns=args.columns,
    )


def _objective(text: str) -> Objective:
    from jaxserve.simulate.system import Objective

    found = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in ("ttft", "tpot") or name in found:
            raise argparse.ArgumentTypeError(f"{text!r} is no objective; write ttft=1s,tpot=100ms")
        found[name] = flags.duration(value)
    if len(found) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} lacks one of ttft and tpot; write ttft=1s,tpot=100ms")
    return Objective(**found)


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no seed; write a whole number such as 7")
    return int(text)


def _columns(text: str) -> dict[str, str]:
    parts = [part.partition("=") for part in text.split(",")]
    found = {name: column for name, _, column in parts}
    if not {"time", "prompt", "output"} <= set(found) <= {"time", "prompt", "output", "tenant"} or "" in found.values():
        raise argparse.ArgumentTypeError(f"{text!r} names no columns; write time=T,prompt=P,output=O and ,tenant=N")
    return found


def _times(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 < found <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is no factor; write a number above 0, such as 10")
    return found


def share(text: str) -> float:
    """A number from 0 to below 1."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share; write a number from 0 to below 1, such as 0.1")
    return found
