"""`jaxserve size`: which devices serve recorded traffic in time, and at what cost."""

from __future__ import annotations

import argparse
from pathlib import Path

from server.commands import console, flags
from server.commands.plan import make_deployment
from server.commands.simulate import add_trace_flags, read_trace, share

HELP = """\
Finds which mesh, how many copies of it, and which slots, rows and buckets serve recorded traffic in time, and the cost.

  jaxserve size --trace FILE --model bloom-176b --topology h200:2x8 --slo ttft=2s,tpot=100ms
  jaxserve size --trace FILE --model gpt3-13b --topology h100:8 --price 2.50 --plot sizing.png

It simulates every way to split the model over the topology's devices with the engine's own scheduler (see `jaxserve
simulate`), each with the fewest copies that are enough, as many rows as are used, and the buckets that suit the
iterations best. These replace the engine's flags; the other flags mean what they mean to `jaxserve serve`. The table
shows costs with --price, the price of one device for an hour, and device hours without it."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help="recorded arrivals and lengths")
    group = parser.add_argument_group("sizing")
    group.add_argument(
        "--in-time",
        type=share,
        default=0.95,
        metavar="X",
        help="share of the requests that must meet the objective (default: %(default)s)",
    )
    group.add_argument("--price", type=float, metavar="P", help="of an hour of one device, in any currency")
    group.add_argument(
        "--compile-time",
        type=flags.duration,
        default=60.0,
        metavar="60s",
        help="what compiling all buckets may take at start (default: 60s)",
    )
    group.add_argument(
        "--compile-each",
        type=flags.duration,
        default=6.0,
        metavar="6s",
        help="what compiling one bucket takes; `jaxserve plan --compile` measures it (default: 6s)",
    )
    add_trace_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 1 if no deployment is enough."""
    if args.price is not None and not args.price > 0:
        raise console.UserError(f"--price is {args.price:g}; it must be above 0")
    console.check_positive(args, "requests")
    console.check_output("--plot", args.plot, is_picture=True)
    buckets = int(args.compile_time / args.compile_each)
    if buckets < 1:
        raise console.UserError(
            f"--compile-time {args.compile_time:g}s is less than the time of one bucket ({args.compile_each:g}s)"
        )
    out, objective = console.tables(), args.slo
    with console.user_errors():
        deployment = make_deployment(args)
        workload = read_trace(args, deployment.max_context)
        from jaxserve.planning.calibration import calibration
        from jaxserve.simulate import sizing

        with console.progress_bars() as progress:
            found = sizing.size(deployment, workload, objective, share=args.in_time, buckets=buckets, progress=progress)
    trust = calibration(deployment.topology.device)
    title = f"{deployment.name} on {deployment.topology}: {workload.name}, {workload.duration:,.0f} s"
    if args.plot is not None:
        sizing.plot(found, objective, args.price, title, args.plot)
        console.say(f"wrote {args.plot}")
    if args.json:
        answer = [sizing.sized_json(each, args.price) for each in found]
        console.print_json(
            {
                "workload": workload.name,
                "notes": workload.notes,
                "clipped": workload.clipped,
                "calibration": trust,
                "layouts": answer,
            }
        )
    else:
        out.print(f"[bold]{title}[/bold]")
        price = "" if args.price is None else f"; {args.price:g} for an hour of a device"
        out.print(f"{args.in_time:.0%} of the requests: {objective}; at most {buckets} buckets{price}")
        for note in workload.notes:
            out.print(note)
        out.print(trust)
        sizing.show(found, args.price, out)
        if workload.clipped and found[0].enough:
            out.print(
                f"[bold]{workload.clipped} of {len(workload.jobs)} requests are longer in the trace[/bold] than the "
                f"context of {deployment.max_context} tokens: whole, they would take more slots and time than this "
                "layout was tried with"
            )
    return 0 if found[0].enough else 1
