"""The layouts that a search tries: meshes of all axes over some devices, and their rules."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jaxserve.planning.deployment import Deployment, model_of, programs
from sharding import axes
from sharding.spec import PADDABLE, Rules, ShardingSpec, Target

_BY_EXPERT = "by expert"  # whole experts on each device, instead of a part of every expert
# Mesh axes beside axes.TENSOR; the pool's rows go over the one before the last, its slots over the last.
_SECOND, _GATHERED, _EXPERT, _ROWS, _SLOTS = "second", "fsdp", "expert", "attn", "context"


class Layout(NamedTuple):
    """One way to place a model on all devices.

    Attributes:
      rules: its changes to the spec, as text.
    """

    deployment: Deployment
    rules: str


class _Split(NamedTuple):
    """How the devices of a stage share its layers.

    Attributes:
      mesh: sizes of its axes; None for the tensor axis alone.
      step: every bucket is a multiple of it.
    """

    mesh: Mapping[str, int] | None
    spec: ShardingSpec
    rules: str
    step: int = 1


def layouts(deployment: Deployment) -> Iterator[Layout]:
    """All layouts: two axes, gathered weights, experts, tokens, the pool, stages and replicas.

    Replicas are the data axis: each has a pool of its own, which copies within a stage do not.
    """
    deployment = _with_one_backend(deployment)
    for devices, stages in _sizes(deployment):
        splits = [*_on_tensor(deployment, devices), *_on_tokens(deployment, devices)]
        for one in _divisors(devices):
            if one < devices:
                splits += _on_two_axes(deployment, one, devices // one)
                splits += _on_the_pool(deployment, one, devices // one)
        yield from (_layout(deployment, devices, stages, split) for split in splits)


def _with_one_backend(deployment: Deployment) -> Deployment:
    """The deployment with the backend that "auto" takes on one device.

    For some layouts it takes a slower one, which the cost model does not tell from it. These are not ranked: the
    backend's reason to refuse them is told.
    """
    if deployment.engine.attention != "auto":
        return deployment
    alone = _layout(deployment, 1, 1, _Split(None, deployment.spec, "")).deployment
    backend = programs(alone)[0].shape.backend.name
    return dataclasses.replace(deployment, engine=dataclasses.replace(deployment.engine, attention=backend))


def tensor_layouts(deployment: Deployment) -> Iterator[Layout]:
    """All layouts with one mesh axis, as `--tensor`, `--stages` and `--replicas` name them."""
    for devices, stages in _sizes(deployment):
        yield from (_layout(deployment, devices, stages, split) for split in _on_tensor(deployment, devices))


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _sizes(deployment: Deployment) -> Iterator[tuple[int, int]]:
    """(devices of a stage, stages) that divide all devices."""
    devices = deployment.topology.num_devices
    for each, stages in itertools.product(range(1, devices + 1), repeat=2):
        if devices % (each * stages) == 0 and stages <= deployment.config.num_layers:
            yield each, stages


def _layout(deployment: Deployment, devices: int, stages: int, split: _Split) -> Layout:
    rows, most = deployment.engine.max_rows, deployment.buckets[-1]
    ladder = {rows, most, *(1 << power for power in range(rows.bit_length()))}
    engine = dataclasses.replace(
        deployment.engine,
        mesh=axes.text_of(split.mesh) if split.mesh else None,
        sharding=None,
        tensor=1 if split.mesh else devices,
        stages=stages,
        replicas=deployment.topology.num_devices // (devices * stages),
        layers_per_stage=None,
        buckets=tuple(sorted({max(-(-size // split.step), 1) * split.step for size in ladder})),
    )
    return Layout(dataclasses.replace(deployment, engine=engine, spec=split.spec), split.rules)


def _on_tensor(deployment: Deployment, tensor: int) -> Iterator[_Split]:
    """Each of the spec's split axes is split, padded if it does not divide, or whole."""
    base, counts = deployment.spec, model_of(deployment.config).axis_sizes()
    if tensor == 1:
        yield _Split(None, base, "")
        return
    split = [axis for axis in PADDABLE if base.rules.get(axis) is not None and axis in counts]
    kv_heads = counts.get("kv_heads", counts["heads"])
    units = {**counts, "heads": 0 if tensor % kv_heads == 0 else kv_heads}  # of heads; repeated KV heads always divide
    ways = [["padded" if units[axis] % tensor else "", "none"] for axis in split]
    if "expert" in counts and counts["expert"] % tensor == 0 and "ffn" in split:
        ways[split.index("ffn")].append(_BY_EXPERT)
    for choice in itertools.product(*ways):
        chosen = {axis: how for axis, how in zip(split, choice, strict=True) if how}
        rules = {**base.rules, **{axis: None for axis, how in chosen.items() if how != "padded"}}
        if chosen.get("ffn") == _BY_EXPERT:
            rules["expert"] = base.rules["ffn"]
        pad = base.pad | {axis for axis, how in chosen.items() if how == "padded"}
        changed = ", ".join(f"{axis} {how}" for axis, how in chosen.items())
        yield _Split(None, dataclasses.replace(base, rules=rules, pad=pad), changed)


def _on_tokens(deployment: Deployment, tensor: int) -> Iterator[_Split]:
    """The hidden states between the layers are split by tokens over the tensor axis."""
    if tensor > 1:
        spec = dataclasses.replace(deployment.spec, activations={"tokens": axes.TENSOR})
        yield _Split(None, spec, "activations by tokens", tensor)


def _on_two_axes(deployment: Deployment, tensor: int, other: int) -> Iterator[_Split]:
    """The tensor axis and another: vocabulary and feed-forward, experts, or gathered weights."""
    base, counts = deployment.spec, model_of(deployment.config).axis_sizes()
    if tensor > 1:
        both: Target = (axes.TENSOR, _SECOND)
        yield _split(base, {_SECOND: other}, tensor, {"vocab": both, "ffn": both}, f"heads over {tensor}")
    if tensor > 1 and counts.get("expert", 1) % other == 0 and "expert" in counts:
        both = (axes.TENSOR, _EXPERT)
        rules: Rules = {"vocab": both, "heads": both, "expert": _EXPERT}
        yield _split(base, {_EXPERT: other}, tensor, rules, f"experts over {other}")
    gathers: dict[str, Any] = {
        "parameters": {**base.parameters, "*norm*": {"embed": None}},
        "gather": (_GATHERED,),
        "activations": {"embed": None},
    }
    yield _split(base, {_GATHERED: other}, tensor, {"embed": _GATHERED}, f"weights gathered over {other}", **gathers)


def _on_the_pool(deployment: Deployment, tensor: int, others: int) -> Iterator[_Split]:
    """The pool's heads over the tensor axis, its rows and slots over others.

    All products are over all of these axes. Experts may go over the axis of the rows.
    """
    base, counts = deployment.spec, model_of(deployment.config).axis_sizes()
    for rows in _divisors(others):
        sizes = {name: size for name, size in ((_ROWS, rows), (_SLOTS, others // rows)) if size > 1}
        every: Target = (axes.TENSOR, *sizes)
        parameters = dict(base.parameters)
        if base.rules.get("heads") is not None and counts["heads"] % (tensor * others) == 0:
            parameters["layers.*.out.kernel"] = {"heads": every}
        told = [*([f"heads over {tensor}"] if tensor > 1 else [])]
        told += [f"{what} over {sizes[name]}" for what, name in (("rows", _ROWS), ("slots", _SLOTS)) if name in sizes]
        pool = {**base.pool, **{what: name for what, name in (("rows", _ROWS), ("slots", _SLOTS)) if name in sizes}}
        more: dict[str, Any] = {"parameters": parameters, "pool": pool}
        yield _split(base, sizes, tensor, {"vocab": every, "ffn": every}, ", ".join(told), **more)
        if "expert" in counts and rows > 1 and counts["expert"] % rows == 0:
            within: Target = (axes.TENSOR, _SLOTS) if _SLOTS in sizes else axes.TENSOR
            rules: Rules = {"vocab": every, "ffn": within, "expert": _ROWS}
            yield _split(base, sizes, tensor, rules, ", ".join([*told, f"experts over {rows}"]), **more)


def _split(
    base: ShardingSpec, others: Mapping[str, int], tensor: int, rules: Mapping[str, Target], told: str, **more: Any
) -> _Split:
    """A mesh of several axes, and the rules that differ from the base's.

    What the base keeps whole stays whole.
    """
    changed = {
        axis: target
        for axis, target in rules.items()
        if base.rules.get(axis) is not None or axis in ("embed", "expert")
    }
    spec = dataclasses.replace(base, rules={**base.rules, **changed}, **more)
    return _Split({**others, axes.TENSOR: tensor}, spec, told)
