"""`jaxserve plan`: predicts memory and speed of a model on devices that need not exist here."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from server.commands import console, flags

if TYPE_CHECKING:
    from jaxserve.planning.compiled import CompiledStage
    from jaxserve.planning.deployment import Deployment
    from jaxserve.planning.predict import Plan

HELP = """\
Predicts bytes, slots, collectives and milliseconds of a model on devices that this machine need not have.

  jaxserve plan --model bloom-176b --topology v5p:2x2x4 --tensor 16
  jaxserve plan --model bloom-176b --topology a100-80g:2x8 --tensor 8 --stages 2 --sharding my.toml --against default
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
    parser.add_argument("--search", action="store_true", help="rank all (tensor, stages) and rules that fit")
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
    out = console.tables()
    with console.user_errors():
        deployment = make_deployment(args, context=args.context)
        answers = _search(args, deployment, out) if args.search else _plan(args, deployment, out)
    if args.json:
        console.print_json(answers)
    return 0


def make_deployment(args: argparse.Namespace, *, context: int = 1024) -> Deployment:
    """The deployment in the flags. Raises UserError or ValueError for a missing flag, or a wrong name or setting."""
    if args.model is None or args.topology is None:
        raise console.UserError("give --model and --topology, for example bloom-176b and h200:8")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing runs on a device, and a local one may be busy
    from sharding import devices

    if args.sharding == "default":
        args = _with_spec(args, "default")
    topology, engine = devices.parse(args.topology), flags.engine_config(args)
    from jaxserve.planning import model_catalog
    from jaxserve.planning.deployment import Deployment

    name, config = model_catalog.find(args.model)
    return Deployment(
        name=name,
        config=config,
        topology=topology,
        engine=engine,
        spec=_spec(config.family, args.sharding),
        context=context,
    )


def _spec(family: str, file: str | None) -> Any:
    from sharding import spec, specs

    default = specs.default(family)
    return default if file in (None, "default") else spec.read(file, default)


def _with_spec(args: argparse.Namespace, file: str) -> argparse.Namespace:
    """The flags with another file of rules, whose mesh stands for those in the flags, and nothing to compare with."""
    from sharding import axes

    changed: dict[str, Any] = {"sharding": None if file == "default" else file, "against": None}
    if axes.read(None, changed["sharding"]):
        changed |= {"mesh": None, "tensor": 1}
    return argparse.Namespace(**vars(args) | changed)


def _label(file: str | None) -> str:
    return "default" if file is None else Path(file).name


def _plan(args: argparse.Namespace, deployment: Deployment, out: Console) -> dict[str, Any]:
    from jaxserve.planning import comparison, plan_page, plan_report

    labels = _label(args.sharding), _label(args.against)
    try:
        predicted, plan, stages = _predict(args, deployment, True)
    except ValueError as problem:
        if args.against is None:
            raise
        console.say(f"{labels[0]} is not possible: {problem}\nso {labels[1]} is compared with nothing")
        alone = _with_spec(args, args.against)
        return _plan(alone, make_deployment(alone, context=args.context), out)
    where = "for CPUs" if args.compile == "cpu" else ""
    sections, answers = [plan_report.compiled(predicted, stages, where)] if stages else [], {}
    if args.against is not None:
        try:
            _, other, _ = _predict(args, make_deployment(_with_spec(args, args.against), context=args.context), False)
        except ValueError as problem:
            raise ValueError(f"{labels[1]} is not possible: {problem}") from None
        differences = comparison.differences(plan, other)
        answers["against"] = [
            {name: getattr(each, name) for name in ("what", "ours", "theirs")} for each in differences
        ]
        answers["against_plan"] = plan_report.plan_json(other) | {"labels": labels}
        sections[:0] = [comparison.section(differences, labels), comparison.memory((plan, other), labels)]
    answers = plan_report.plan_json(plan, stages) | answers
    if not args.json:
        plan_report.show(plan, out, brief=args.against is not None)
        for section in sections:
            section.show(out)
    if args.html is not None:
        tables = [plan_report.collectives(plan), *sections]
        plan_page.write(args.html, plan, answers, tables)
        console.say(f"wrote {args.html}; open it in a browser")
    return answers


def _predict(
    args: argparse.Namespace, deployment: Deployment, always: bool
) -> tuple[Plan, Plan, Sequence[CompiledStage]]:
    """The plan that was compiled, the plan with compiled collectives where they are unknown, and the compiled stages.

    Without `always`, a plan with known collectives is not compiled.
    """
    from jaxserve.planning import compiled, targets
    from jaxserve.planning.predict import predict

    plan = predict(deployment)
    if args.compile is None or (plan.is_known and not always):
        return plan, plan, ()
    on_cpus = args.compile == "cpu"
    asked = predict(dataclasses.replace(deployment, on_cpus=True)) if on_cpus else plan
    devices = targets.cpus(plan.num_devices) if on_cpus else targets.devices_of(deployment.topology)
    with console.progress_bars() as progress:
        stages = compiled.compile_stages(asked, devices, progress)
    return asked, compiled.with_compiled(plan, stages), stages


def _search(args: argparse.Namespace, deployment: Deployment, out: Console) -> dict[str, Any]:
    from jaxserve.planning import search

    with console.progress_bars() as progress:
        found, left_out = search.search(deployment, progress)
    if not args.json:
        out.print(f"[bold]{deployment.name} on {deployment.topology}: {len(found)} ways fit[/bold]")
        search.show(found, left_out, out)
    if args.plot is not None:
        search.plot(
            found, f"{deployment.name} on {deployment.topology}, decodes at context {deployment.context:,}", args.plot
        )
        console.say(f"wrote {args.plot}")
    return {"candidates": [search.candidate_json(each) for each in found], "left_out": left_out}
