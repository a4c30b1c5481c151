"""Sharding specs: a mapping from the logical axes of arrays to mesh axes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from jax.sharding import PartitionSpec

from sharding import axes as mesh_axes
from sharding.parameter_names import check_layers, instead, matches, pattern

Target = str | tuple[str, ...] | None  # a mesh axis, several (the last runs fastest), or none: every device has it all
Rules = Mapping[str, Target]  # logical axis -> mesh axes
Section = Literal["parameters", "activations", "pool"]

ACTIVATION_AXES = ("tokens", "embed")  # axes of the hidden states between the layers
# "rows": the requests, each of which has its blocks in one part of the pool; "slots": those of every block.
POOL_AXES = ("heads", "kv_heads", "rows", "slots")
PADDABLE = ("heads", "kv_heads", "vocab", "ffn")  # these can be padded without a change of the answers

_LISTED = 1024  # largest mesh size that an error lists


class MeshLike(Protocol):
    """A Mesh, an AbstractMesh, or another object with axis names and sizes."""

    @property
    def shape(self) -> Any: ...  # Mapping[str, int]; Any, because type checkers do not match a Mesh's cached_property

    @property
    def axis_names(self) -> tuple[Any, ...]: ...


@dataclass(frozen=True, slots=True)
class ShardingSpec:
    """Rules: logical axis -> mesh axis, several of them, or None for an axis kept whole.

    Models name the axes of their parameters ("heads", "ffn", ...); the spec maps each name to a mesh axis. To try
    another sharding, change an entry. "kv_heads" follow the rule of "heads" unless they have their own.

    Attributes:
      rules: rules for the parameters' axes, and for all axes that the sections below do not name.
      parameters: exceptions: a glob over parameter names (`layers.*.qkv.bias`, or `layers.0-9.*` for ten layers) ->
        rules. The last glob that matches and names an axis wins.
      activations: rules for the hidden states between the layers; without any, the compiler decides.
      pool: rules for the pool of keys and values; other axes follow `rules`. With "rows", requests are split over these
        mesh axes: a part of the pool has the blocks of its own requests, and devices attend to those alone. With
        "slots", those of every block are: devices attend to their own, and add up the results.
      gather: mesh axes whose parts of a layer's parameters are gathered before the layer uses them.
      pad: logical axes (of PADDABLE) whose size may be rounded up until it divides; by default the vocabulary (see
        `padded`).
    """

    rules: Rules
    parameters: Mapping[str, Rules] = field(default_factory=dict)
    activations: Rules = field(default_factory=dict)
    pool: Rules = field(default_factory=dict)
    gather: tuple[str, ...] = ()
    pad: frozenset[str] = frozenset({"vocab"})

    def resolve(
        self,
        axes: tuple[str | None, ...],
        shape: tuple[int, ...],
        mesh: MeshLike,
        *,
        name: str = "array",
        counts: Mapping[str, int] | None = None,
        section: Section = "parameters",
    ) -> PartitionSpec:
        """The PartitionSpec of one array.

        Args:
          axes: logical name of each of the array's axes; None for one that is never split.
          shape: the array's sizes.
          mesh: the devices; arrays are replicated over mesh axes without a rule.
          name: name of the array in errors, matched with the globs of the exceptions.
          counts: number of units that must not be split, by logical axis (a head takes several columns, for example).
          section: the kind of array.

        Raises:
          ValueError: a logical axis has no rule, a rule names an unknown mesh axis, two axes of the array are on one
            mesh axis, or a size does not divide.
        """
        assert len(axes) == len(shape), f"{name} has axes {axes} and shape {shape}"
        rules = self.rules_for(name, section)
        taken: dict[str, str] = {}
        entries: list[Target] = []
        for logical, size in zip(axes, shape, strict=True):
            target = None if logical is None else self._target(rules, logical, mesh, name, section)
            if logical is not None and target is not None:
                for each in names(target):
                    if each in taken:
                        raise ValueError(
                            f"{name}: logical axes {taken[each]!r} and {logical!r} are both on mesh axis {each!r}; "
                            "an array can be split over a mesh axis once"
                        )
                    taken[each] = logical
                count = (counts or {}).get(logical, size)
                if count % parts(target, mesh.shape) or size % parts(target, mesh.shape):
                    raise ValueError(f"{name}: {_uneven(logical, count, target, mesh.shape, logical in self.pad)}")
            entries.append(target)
        return partition(*entries)

    def rules_for(self, name: str, section: Section = "parameters") -> Rules:
        """The rules of one array, exceptions included."""
        if section == "activations":
            return self.activations
        if section == "pool":
            return {**self.rules, **self.pool}
        rules = dict(self.rules)
        for glob, exception in self.parameters.items():
            if matches(name, glob):
                rules.update(exception)
        return rules

    def gathered(self, held: PartitionSpec) -> PartitionSpec:
        """The partition of a layer's parameter where it is used."""
        kept = (tuple(axis for axis in names(target) if axis not in self.gather) for target in held)
        return partition(*kept)

    def padded(self, counts: Mapping[str, int], mesh_shape: Mapping[str, int]) -> dict[str, int]:
        """The sizes of a model's logical axes on the mesh, with padding and repeated KV heads.

        Axes in `pad` are rounded up until they divide. If there is a multiple of devices per KV head, KV heads are
        repeated so that every device has one, and each copy serves a part of the query heads. Over the axes of the
        pool's rows or slots they are not: there, those are split.
        """
        sections = (self.rules, self.pool, *self.parameters.values())
        others = {*names(self.pool.get("rows")), *names(self.pool.get("slots"))}
        of_keys = {axis: size for axis, size in mesh_shape.items() if axis not in others}

        def devices(axis: str) -> int:
            axes, sizes = ((axis, "heads"), of_keys) if axis == "kv_heads" else ((axis,), mesh_shape)
            return math.lcm(*(parts(section.get(each), sizes) for section in sections for each in axes))

        def round_up(axis: str, count: int) -> int:
            return -(-count // devices(axis)) * devices(axis) if axis in self.pad else count

        held = {axis: round_up(axis, count) for axis, count in counts.items()}
        if "kv_heads" in counts:
            kv_heads, group = counts["kv_heads"], counts["heads"] // counts["kv_heads"]
            if devices("kv_heads") % kv_heads == 0:
                held["kv_heads"] = max(kv_heads, devices("kv_heads"))
                group = -(-group * kv_heads // held["kv_heads"])
            elif "heads" in self.pad:
                held["kv_heads"] = -(-kv_heads // devices("kv_heads")) * devices("kv_heads")
            held["heads"] = held["kv_heads"] * group
        return held

    def sections(self) -> dict[str, Rules]:
        """The rules by section of a spec file."""
        exceptions = {f'parameters."{glob}"': rules for glob, rules in self.parameters.items()}
        gather = {"weights": self.gather} if self.gather else {}
        return {
            "axes": self.rules,
            **exceptions,
            "gather": gather,
            "activations": self.activations,
            "pool": self.pool,
        }

    def check_names(self, mesh: MeshLike, parameters: Mapping[str, tuple[str, ...]]) -> None:
        """Raise ValueError, with the nearest name, if a section has an unknown name.

        Args:
          mesh: the devices.
          parameters: the model's parameters: name -> logical axes.
        """
        for title, rules in self.sections().items():
            for logical, target in rules.items():
                for each in names(target):
                    if each not in mesh.shape:
                        raise ValueError(f"[{title}]: {_no_mesh_axis(logical, each, mesh)}")
        for glob, rules in self.parameters.items():
            check_layers(glob, parameters)
            matched = {name: axes for name, axes in parameters.items() if matches(name, glob)}
            if not matched:
                patterns = dict.fromkeys(map(pattern, parameters))
                raise ValueError(f'[parameters."{glob}"] matches no parameter{instead(glob, patterns)}')
            axes = {axis for each in matched.values() for axis in each}
            for logical in rules:
                if logical not in axes:
                    raise ValueError(
                        f'[parameters."{glob}"]: {next(iter(matched))} has no logical axis {logical!r}'
                        f"{instead(logical, sorted(axes))}"
                    )

    def _target(self, rules: Rules, logical: str, mesh: MeshLike, name: str, section: Section) -> Target:
        if section == "activations":
            target = rules.get(logical)
        elif logical in rules:
            target = rules[logical]
        elif logical == "kv_heads" and "heads" in rules:
            target = rules["heads"]
        else:
            raise ValueError(f"{name}: logical axis {logical!r} has no rule{instead(logical, rules)}")
        for each in names(target):
            if each not in mesh.shape:
                raise ValueError(f"{name}: {_no_mesh_axis(logical, each, mesh)}")
        return target


def partition(*targets: Target) -> PartitionSpec:
    """The PartitionSpec of an array whose axes go to these mesh axes."""
    return PartitionSpec(*(target or None for target in targets))


def names(target: Target) -> tuple[str, ...]:
    """The mesh axes of a rule."""
    return () if target is None else (target,) if isinstance(target, str) else target


def parts(target: Target, mesh_shape: Mapping[str, int]) -> int:
    """The number of parts that a rule makes of an axis; 1 over axes that the mesh does not have."""
    return math.prod(mesh_shape.get(each, 1) for each in names(target))


def shown(target: Target, none: str = "none") -> str:
    """A rule's mesh axes as text, such as "tensor" or "x*y"."""
    return "*".join(names(target)) or none


def read(source: str | Path | Mapping[str, Any], base: ShardingSpec) -> ShardingSpec:
    """Reads changes to a base spec from TOML: a file or contents. "none" keeps an axis whole.

        [mesh]                              # sizes of the mesh's axes (see `sharding.axes`)
        fsdp = 2
        tensor = 4
        [axes]                              # the parameters
        vocab = "none"
        ffn = ["tensor", "fsdp"]            # over several mesh axes
        [parameters."layers.*.qkv.bias"]    # exceptions, by a glob over parameter names
        heads = "none"
        [parameters."layers.0-9.*"]         # of these layers
        ffn = "none"
        [gather]                            # mesh axes over which weights of a layer are gathered to use it
        weights = ["fsdp"]
        [activations]                       # between the layers
        tokens = "tensor"
        [pool]                              # keys and values
        heads = "tensor"
        rows = "fsdp"                       # each part has the blocks of its own requests
        slots = "none"                      # of every block: over an axis, a device has its share of a context
        [pad]                               # round up sizes that do not divide
        heads = true

    Raises:
      ValueError: the file cannot be read, or has an unknown name; the message has the nearest one. Mesh axes and globs
        are checked later, when mesh and model are known: `ShardingSpec.check_names`.
    """
    entries, path = mesh_axes.entries(source), mesh_axes.named(source)
    known = ("mesh", "axes", "parameters", "gather", "activations", "pool", "pad")
    for section in entries:
        if section not in known:
            raise ValueError(f"{path}: there is no section [{section}]{instead(section, known)}")

    logical = [*base.rules, *(["kv_heads"] if "heads" in base.rules else [])]

    def rules(title: str, table: Any, axes: Iterable[str]) -> dict[str, Target]:
        return {axis: _mesh_axis(f"{path}: [{title}]", axis, value) for axis, value in _table(path, title, table, axes)}

    exceptions = entries.get("parameters", {})
    if not isinstance(exceptions, dict):
        raise ValueError(f'{path}: parameters is {exceptions!r}; write a section [parameters."layers.*.qkv.bias"]')
    pad = dict.fromkeys(base.pad, True)
    for axis, value in _table(path, "pad", entries.get("pad", {}), PADDABLE):
        if not isinstance(value, bool):
            raise ValueError(f"{path}: [pad] {axis} is {value!r}; it must be true or false")
        pad[axis] = value
    return dataclasses.replace(
        base,
        rules={**base.rules, **rules("axes", entries.get("axes", {}), logical)},
        parameters={
            **base.parameters,
            **{glob: rules(f'parameters."{glob}"', table, logical) for glob, table in exceptions.items()},
        },
        activations={**base.activations, **rules("activations", entries.get("activations", {}), ACTIVATION_AXES)},
        pool={**base.pool, **rules("pool", entries.get("pool", {}), POOL_AXES)},
        gather=names(rules("gather", entries.get("gather", {}), ("weights",)).get("weights", base.gather)),
        pad=frozenset(axis for axis, wanted in pad.items() if wanted),
    )


def _table(path: str, title: str, table: Any, axes: Iterable[str]) -> list[tuple[str, Any]]:
    if not isinstance(table, dict):
        raise ValueError(f"{path}: {title} is {table!r}; write a section [{title}]")
    for axis in table:
        if axis not in axes:
            raise ValueError(f"{path}: [{title}] names unknown logical axis {axis!r}{instead(axis, axes)}")
    return list(table.items())


def _mesh_axis(where: str, axis: str, value: Any) -> Target:
    listed: list[Any] = value if isinstance(value, list) and value else [value]
    if not all(isinstance(each, str) and each for each in listed) or (len(listed) > 1 and "none" in listed):
        raise ValueError(f'{where} {axis} is {value!r}; it must be the name of a mesh axis, a list of names, or "none"')
    return None if listed == ["none"] else listed[0] if len(listed) == 1 else tuple(listed)


def _no_mesh_axis(logical: str, target: str, mesh: MeshLike) -> str:
    others = instead(target, mesh.axis_names)
    return f"logical axis {logical!r} goes to {target!r}, which is not an axis of the mesh{others}"


def _uneven(logical: str, count: int, target: Target, mesh_shape: Mapping[str, int], padded: bool) -> str:
    """The error for a size that does not divide, with mesh sizes that would work."""
    devices, over, several = parts(target, mesh_shape), names(target), len(names(target)) > 1
    named = f"axes {', '.join(map(repr, over))}" if several else f"axis {over[0]!r}"
    sizes = " x ".join(str(mesh_shape[each]) for each in over)
    fits = [str(size) for size in range(1, min(count, _LISTED) + 1) if count % size == 0]
    message = (
        f"axis {logical!r} of size {count} does not divide over mesh {named} of size {sizes}; "
        f"it does for {' x '.join(over)} = {', '.join(fits)}"
    )
    if logical == "kv_heads":
        message += f" and multiples of {count}"
    if logical in PADDABLE and not padded:
        more = -(-count // devices) * devices
        message += f", or padded to {more}, {100 * (more - count) / count:.2g}% more ([pad] {logical} = true)"
    return message
