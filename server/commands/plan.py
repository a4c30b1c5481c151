"""`jaxserve plan`: predicts memory and speed of a model on devices that need not exist here."""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server.commands import console, flags, plan_watch

if TYPE_CHECKING:
    from jaxserve.planning.deployment import Deployment

HELP = """\
Predicts bytes, slots, collectives and milliseconds of a model on devices that this machine need not have.

  jaxserve plan --model bloom-176b --topology v5p:2x2x4 --tensor 16
  jaxserve plan --model bloom-176b --topology a100-80g:2x8 --tensor 8 --stages 2 --sharding my.toml --against default
  jaxserve plan --model llama-3-70b --topology v6e:4x4 --tensor 16 --sharding my.toml --watch
  jaxserve plan --model DIR --topology h200:8 --search --plot frontier.png

A model is a name (a wrong one lists them), a config.json or a checkpoint directory; a topology is a TPU slice (v4, v5e,
v5p, v6e, tpu7x: chips along each axis) or a set of GPUs (a100-40g, a100-80g, h100, h200: machines x GPUs). The engine's
flags mean what they mean to `jaxserve serve`. docs/sharding.md explains specs and has examples."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="NAME|FILE|DIR", help="name, config.json or checkpoint")
    parser.add_argument("--topology", required=True, metavar="v5p:2x2x4", help="devices")
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        default=1024,
        help="positions behind each decoding row in the predicted iterations (default: %(default)s)",
    )
    parser.add_argument("--against", metavar="FILE|default", help="compare with this spec, differences only")
    parser.add_argument(
        "--watch", action="store_true", help="plan again when the file of --sharding is saved, and print what changed"
    )
    parser.add_argument(
        "--search", action="store_true", help="rank the layouts over all mesh axes, and say why they lose"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="with --search: draw the frontier (.png, .svg)")
    parser.add_argument(
        "--compile",
        nargs="?",
        const="topology",
        choices=("topology", "cpu"),
        help="compile for the topology, or for as many virtual CPU devices, and compare with the prediction "
        "(alone: topology)",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with a picture")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    flags.add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    if args.plot is not None and not args.search:
        raise console.UserError("--plot draws the result of --search; give both")
    console.check_positive(args, "context")
    console.check_output("--plot", args.plot, is_picture=True)
    console.check_output("--html", args.html)
    if args.watch:
        return _watch(args)
    with console.user_errors():
        answers = _search(args) if args.search else _plan(args)
    if args.json:
        console.print_json(answers)
    return 0


def make_deployment(args: argparse.Namespace) -> Deployment:
    """The deployment in the flags. Raises UserError or ValueError for what is missing or wrong."""
    if args.model is None or args.topology is None:
        raise console.UserError("give --model and --topology, for example bloom-176b and h200:8")
    _stay_on_cpu()
    from jaxserve.planning import planner

    return planner.deployment(**_asked(args))


def _stay_on_cpu() -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing runs on a device, and a local one may be busy


def _asked(args: argparse.Namespace) -> dict[str, Any]:
    """The flags as arguments of `jaxserve.plan`."""
    settings = flags.engine_settings(args)
    spec = settings.pop("sharding") or "default"
    return {"model": args.model, "topology": args.topology, "spec": spec, **settings}


def _plan(args: argparse.Namespace) -> dict[str, Any]:
    _stay_on_cpu()
    from jaxserve.planning import planner

    asked = {"context": args.context, "compile": args.compile} | _asked(args)
    with console.progress_bars() as progress:
        try:
            result = planner.plan(**asked, against=args.against, progress=progress)
        except planner.ImpossibleSpec as problem:
            if not problem.is_ours:
                raise
            result = planner.plan(**planner.with_spec(args.against, asked), progress=progress)
            console.say(f"{problem}\nso {result.name} is compared with nothing")
    if not args.json:
        result.show(console.tables())
    if args.html is not None:
        result.save(args.html)
        console.say(f"wrote {args.html}; open it in a browser")
    return result.as_json()


def _watch(args: argparse.Namespace) -> int:
    for name in ("against", "search", "json"):
        if getattr(args, name):
            raise console.UserError(f"--watch prints what a save of --sharding changes; leave out --{name}")
    if args.sharding in (None, "default"):
        raise console.UserError("--watch plans again when a file is saved; give --sharding FILE")
    if not Path(args.sharding).is_file():
        raise console.UserError(f"--sharding {args.sharding} is not a file; --watch plans again when one is saved")
    _stay_on_cpu()
    from jaxserve.planning import planner

    with console.user_errors():
        asked = {"context": args.context, "compile": args.compile} | _asked(args)
        planner.deployment(**planner.with_spec("default", _asked(args)))  # mistakes in the flags are not waited for
    with console.progress_bars() as progress:
        plan_watch.watch(Path(args.sharding), partial(planner.plan, **asked, progress=progress), args.html)
    return 0


def _search(args: argparse.Namespace) -> dict[str, Any]:
    for name in ("against", "compile", "html"):
        if getattr(args, name) is not None:
            raise console.UserError(f"--search ranks many layouts by their predictions; leave out --{name}")
    deployment = dataclasses.replace(make_deployment(args), context=args.context)
    from jaxserve.planning import search_report
    from jaxserve.planning.search import search
    from jaxserve.planning.search_space import layouts

    started, tried = time.perf_counter(), list(layouts(deployment))
    with console.progress_bars() as progress:
        found = search(deployment, tried, progress)
    console.say(f"planned {len(tried)} layouts in {time.perf_counter() - started:.1f} s")
    if not args.json:
        out = console.tables()
        fit = "1 way fits" if len(found.candidates) == 1 else f"{len(found.candidates)} ways fit"
        out.print(f"[bold]{deployment.name} on {deployment.topology}: {fit}[/bold]")
        search_report.show(found, out)
    if args.plot is not None:
        title = f"{deployment.name} on {deployment.topology}, decodes at context {deployment.context:,}"
        search_report.plot(found.candidates, title, args.plot)
        console.say(f"wrote {args.plot}")
    return search_report.result_json(found)
