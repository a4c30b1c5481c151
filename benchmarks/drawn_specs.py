"""Draws a model family, a mesh and sharding rules from a seed, for what must hold for all of them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import NamedTuple

from jaxserve import models
from sharding import specs

MESHES = (  # of eight devices
    {"data": 2, "tensor": 4},
    {"x": 2, "y": 2, "tensor": 2},
    {"fsdp": 4, "tensor": 2},
    {"stage": 2, "expert": 2, "tensor": 2},
    {"context": 8},
)
IN_LAYERS = ("heads", "ffn", "expert")  # logical axes of which some layers may be split otherwise


class Draw(NamedTuple):
    """A drawn family and the sections of a spec file for it, which may be impossible together."""

    family: str
    sections: Mapping[str, Mapping[str, object]]

    @property
    def text(self) -> str:
        """The spec file."""
        return "".join(
            f"{title}.{key} = {value}\n" for title, each in self.sections.items() for key, value in each.items()
        )


def draw(
    rng: random.Random,
    *,
    whole: tuple[str, ...] = (),
    meshes: tuple[Mapping[str, int], ...] = MESHES,
    exceptions: bool = False,
    parts: tuple[str, ...] = (),
) -> Draw:
    """The next draw: every axis over none, one or two of the mesh's axes; some have gathers and rules of activations.

    Args:
      whole: logical axes that stay whole; with some, there are no gathers and no rules of activations.
      exceptions: whether every second draw has another rule for some layers.
      parts: what the pool is split by, of "rows" and "slots".
    """
    family, mesh = rng.choice(models.families()), rng.choice(meshes)
    free = [axis for axis in mesh if axis != "stage"]

    def target() -> str:
        over = rng.sample(free, rng.choice((0, 1, 1, min(2, len(free)))))
        return repr(over) if over else '"none"'

    heads = target()
    rules = {axis: target() for axis in specs.default(family).rules} | {"heads": heads}
    drawn: dict[str, Mapping[str, object]] = {
        "mesh": mesh,
        "axes": rules | {axis: '"none"' for axis in whole if axis in rules},
        "activations": {axis: target() for axis in ("tokens", "embed") if rng.random() < 0.3},
        "gather": {"weights": target()} if rng.random() < 0.3 else {},
        "pool": {"heads": target()} if rng.random() < 0.2 else {},
        "pad": {"heads": "true", "vocab": "true"},
    }
    if exceptions and rng.random() < 0.5:
        layers, axis = rng.choice(("0", "0-1", "1-1")), rng.choice([each for each in IN_LAYERS if each in rules])
        drawn[f'parameters."layers.{layers}.*"'] = {axis: target()}
    if parts:
        over = rng.sample(free, min(2, len(free)) if len(parts) > 1 else rng.choice((1, 1, min(2, len(free)))))
        first = over[:1] if len(parts) > 1 else over
        by_head = rng.sample(
            rest := [axis for axis in free if axis not in over], min(len(rest), rng.choice((0, 1, 1, 2)))
        )
        drawn["axes"] = {**drawn["axes"], "heads": repr(by_head) if by_head else '"none"'}
        drawn["pool"] = {part: repr(each) for part, each in zip(parts, (first, over[1:]), strict=False) if each}
        if rng.random() < 0.5:
            drawn['parameters."layers.*.out.kernel"'] = {"heads": repr([*by_head, *over])}
    return Draw(family, drawn | {"activations": {}, "gather": {}} if whole else drawn)
