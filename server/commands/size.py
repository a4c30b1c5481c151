"""`jaxserve size`: which devices serve recorded traffic in time, and at what cost."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from server.commands import flags
from server.commands.console import PICTURES, UserError, check_output, progress_bars, say, tables, user_errors
from server.commands.plan import make_deployment
from server.commands.simulate import add_trace_flags, make_objective, read_trace, share

HELP = """\
Which mesh, how many copies of it, and which slots, rows and buckets serve recorded traffic in time, at what cost.

  jaxserve size --trace FILE --model bloom-176b --topology h200:2x8 --slo ttft=2s,tpot=100ms
  jaxserve size --trace FILE --model gpt3-13b --topology h100:8 --price 2.50 --plot sizing.png

Every way to cut the model over the topology's devices is simulated with the engine's own scheduler (see `jaxserve
simulate`): with the fewest copies that are enough, as many rows as are used, and the ladder of buckets that suits the
iterations best; those flags of the engine's are found rather than read, the others mean what they mean to `jaxserve
serve`. --price is yours to give, for an hour of one device; without it the table counts device hours."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help="recorded arrivals and lengths")
    add_trace_flags(parser)
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
    group.add_argument("--plot", type=Path, metavar="FILE", help="draw the result (.png, .svg)")
    group.add_argument("--json", action="store_true", help="print JSON instead of tables")
    flags.add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 1 if no deployment is enough."""
    if args.model is None or args.topology is None:
        raise UserError("size needs --model and --topology, the model and the most devices")
    if args.price is not None and not args.price > 0:
        raise UserError(f"--price is {args.price:g}; it must be above 0")
    if args.requests is not None and args.requests < 1:
        raise UserError(f"--requests is {args.requests}; it must be at least 1")
    check_output("--plot", args.plot, kinds=PICTURES)
    buckets = int(args.compile_time / args.compile_each)
    if buckets < 1:
        raise UserError(
            f"--compile-time {args.compile_time:g}s is less than the time of one bucket ({args.compile_each:g}s)"
        )
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing runs on a device, and a local one may be busy
    out = tables()
    with user_errors():
        deployment = make_deployment(args)
        workload = read_trace(args, deployment.max_context)
        from jaxserve.simulate import sizing

        objective = make_objective(args)
        with progress_bars() as progress:
            found = sizing.size(deployment, workload, objective, share=args.in_time, buckets=buckets, progress=progress)
    title = f"{deployment.name} on {deployment.topology}: {workload.name}, {workload.duration:,.0f} s"
    if args.plot is not None:
        sizing.plot(found, objective, args.price, title, args.plot)
        say(f"wrote {args.plot}")
    if args.json:
        answer = [sizing.sized_json(each, args.price) for each in found]
        json.dump({"workload": workload.name, "notes": workload.notes, "layouts": answer}, sys.stdout, indent=1)
        print()
    else:
        out.print(f"[bold]{title}[/bold]")
        price = "" if args.price is None else f"; {args.price:g} for an hour of a device"
        out.print(f"{args.in_time:.0%} of the requests: {objective}; at most {buckets} buckets{price}")
        for note in workload.notes:
            out.print(note)
        sizing.show(found, args.price, out)
    return 0 if found[0].enough else 1
