"""Plans a model on devices that need not be here: `jaxserve.plan`, behind the command."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from jaxserve.config import EngineConfig
from jaxserve.planning import compiled, model_catalog, targets
from jaxserve.planning.deployment import Deployment
from jaxserve.planning.predict import predict
from jaxserve.planning.result import PlanResult
from sharding import axes, devices, specs
from sharding import spec as specification
from sharding.spec import ShardingSpec

Spec = str | Path | Mapping[str, Any] | ShardingSpec
Progress = Callable[[str, int, int], None]
DEFAULT = "default"  # a family's own spec, by name


class ImpossibleSpec(ValueError):
    """One of two specs that are compared is not possible.

    Attributes:
      is_ours: it is the first; the other may be.
    """

    def __init__(self, name: str, problem: ValueError, *, is_ours: bool) -> None:
        super().__init__(f"{name} is not possible: {problem}")
        self.is_ours = is_ours


def plan(
    model: str | Path,
    topology: str,
    *,
    spec: Spec = DEFAULT,
    against: Spec | PlanResult | None = None,
    compile: Literal["topology", "cpu"] | None = None,
    context: int = 1024,
    progress: Progress = lambda what, done, total: None,
    **settings: Any,
) -> PlanResult:
    """Predicts a model's bytes, slots, collectives and milliseconds on devices not here.

    Args:
      model: a name (a wrong one lists them), a config.json or a checkpoint directory.
      topology: the devices, such as "v5p:2x2x4" or "a100-80g:2x8".
      spec: the sharding: "default" is the model family's. A TOML file, or its contents as a dict, changes it, and a
        ShardingSpec replaces it.
      against: compare with another result, or with this spec under the same settings. If it has a mesh, that is in
        place of `tensor` and `mesh`.
      compile: compile the largest bucket for the "topology", or for as many virtual devices of this "cpu", and compare
        with the prediction.
      context: positions behind each decoding row in the predicted iterations.
      progress: called with (step, done, total) while programs are compiled.
      settings: fields of EngineConfig, such as `tensor`, `stages`, `replicas`, `max_rows` and `buckets`. `mesh` may be
        a dict of sizes.

    Raises:
      ValueError: a name or a setting is wrong, or the deployment is not possible; as `jaxserve plan` says it.
    """
    if compile not in (None, "topology", "cpu"):
        raise ValueError(f"compile is {compile!r}; it must be 'topology', 'cpu' or None")
    asked, name = deployment(model, topology, spec=spec, context=context, **settings), _name(spec, "spec")
    if against is None:
        return _result(asked, name, compile, progress)
    if isinstance(against, PlanResult):
        return _result(asked, name, compile, progress).compared_with(against)
    other = deployment(model, topology, context=context, **with_spec(against, settings))
    with _possible(name, is_ours=True):
        result = _result(asked, name, compile, progress)
    name = _name(against, "other")
    with _possible(name, is_ours=False):
        theirs = _result(other, name, compile, progress, if_known=compile == "topology")
        return result.compared_with(theirs)


def deployment(
    model: str | Path, topology: str, *, spec: Spec = DEFAULT, context: int = 1024, **settings: Any
) -> Deployment:
    """What `plan` plans. The arguments are the same."""
    if not isinstance(context, int) or context < 1:
        raise ValueError(f"context is {context!r}; it must be a whole number of at least 1")
    if "sharding" in settings:
        raise ValueError(f"sharding is called spec here: write spec={settings['sharding']!r}")
    where, changes = devices.parse(str(topology)), _changes(spec)
    if (mesh := settings.get("mesh")) is not None:
        settings["mesh"] = axes.text_of(mesh) if isinstance(mesh, Mapping) else str(mesh)
    if isinstance(changes, Mapping):  # a file is for the engine to read, as in every command
        settings["mesh"] = axes.text_of(axes.read(settings.get("mesh"), changes)) or None
    engine = EngineConfig(**settings, sharding=None if isinstance(changes, Mapping) else changes)
    name, config = model_catalog.find(str(model))
    rules = spec if isinstance(spec, ShardingSpec) else specs.default(config.family)
    return Deployment(
        name=name,
        config=config,
        topology=where,
        engine=engine,
        spec=rules if changes is None else specification.read(changes, rules),
        context=context,
    )


def _changes(spec: Spec) -> str | Mapping[str, Any] | None:
    """The file, or its contents, that changes the family's spec."""
    if isinstance(spec, Mapping):
        return spec
    if not isinstance(spec, (str, Path, ShardingSpec)):
        raise ValueError(
            f"spec is {spec!r}; it must be {DEFAULT!r}, a TOML file, its contents as a dict or a ShardingSpec"
        )
    return None if isinstance(spec, ShardingSpec) or spec == DEFAULT else str(spec)


def with_spec(spec: Spec, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with another spec; if it has a mesh, without those for which that stands."""
    found = axes.read(None, _changes(spec))
    instead = {"mesh", "tensor", *(["stages"] if axes.STAGE in found else [])} if found else ()
    return {name: value for name, value in settings.items() if name not in instead} | {"spec": spec}


@contextlib.contextmanager
def _possible(name: str, *, is_ours: bool) -> Iterator[None]:
    """Turns a ValueError into ImpossibleSpec."""
    try:
        yield
    except ValueError as problem:
        raise ImpossibleSpec(name, problem, is_ours=is_ours) from None


def _name(spec: Spec, otherwise: str) -> str:
    """What a spec is called in tables: its file, or `otherwise` without one."""
    return Path(spec).name if isinstance(spec, (str, Path)) else otherwise


def _result(
    asked: Deployment, name: str, compile: str | None, progress: Progress, *, if_known: bool = True
) -> PlanResult:
    """The plan, compiled if wanted. Without `if_known`, only if it has unknown collectives."""
    plan = predict(asked)
    if compile is None or (plan.is_known and not if_known):
        return PlanResult(plan=plan, name=name, predicted=plan)
    predicted = predict(dataclasses.replace(asked, on_cpus=True)) if compile == "cpu" else plan
    where = targets.cpus(plan.num_devices) if compile == "cpu" else targets.devices_of(asked.topology)
    stages = compiled.compile_stages(predicted, where, progress)
    found = compiled.with_compiled(plan, stages, overlap=compile == "topology")
    return PlanResult(plan=found, name=name, predicted=predicted, compiled=tuple(stages))
