"""Which mesh axis each logical axis of an array is split over, as a value."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jax.sharding import Mesh, PartitionSpec


@dataclass(frozen=True, slots=True)
class ShardingSpec:
    """Logical axis -> mesh axis, or None for an axis that every device holds whole.

    Models name the axes of their parameters ("heads", "ffn", ...); this says what becomes of each name. To try another
    sharding, change an entry.
    """

    rules: Mapping[str, str | None]

    def resolve(
        self,
        axes: tuple[str | None, ...],
        shape: tuple[int, ...],
        mesh: Mesh,
        *,
        name: str = "array",
        counts: Mapping[str, int] | None = None,
    ) -> PartitionSpec:
        """The PartitionSpec of one array.

        Args:
          axes: logical name of each of the array's axes; None for one that is never split.
          shape: its sizes.
          mesh: the devices; axes of the mesh that no rule names hold copies.
          name: what errors call the array.
          counts: how many things a logical axis holds where its size is a multiple of that (heads, of which each takes
            several columns): those are never cut.

        Raises:
          ValueError: a logical axis without a rule, a rule that names no axis of the mesh, two axes of the array on one
            mesh axis, or a size that does not divide.
        """
        assert len(axes) == len(shape), f"{name} has axes {axes} and shape {shape}"
        taken: dict[str, str] = {}
        entries: list[str | None] = []
        for logical, size in zip(axes, shape, strict=True):
            target = None if logical is None else self._target(logical, mesh, name)
            if logical is not None and target is not None:
                if target in taken:
                    raise ValueError(
                        f"{name}: logical axes {taken[target]!r} and {logical!r} are both on mesh axis {target!r}; "
                        "an array can be split over a mesh axis once"
                    )
                taken[target] = logical
                parts = mesh.shape[target]
                count = (counts or {}).get(logical, size)
                if count % parts or size % parts:
                    raise ValueError(
                        f"{name}: axis {logical!r} of size {count} does not divide over mesh axis {target!r} of size "
                        f"{parts}"
                    )
            entries.append(target)
        return PartitionSpec(*entries)

    def _target(self, logical: str, mesh: Mesh, name: str) -> str | None:
        if logical not in self.rules:
            raise ValueError(f"{name}: logical axis {logical!r} has no rule{_instead(logical, self.rules)}")
        target = self.rules[logical]
        if target is not None and target not in mesh.shape:
            raise ValueError(
                f"{name}: logical axis {logical!r} goes to {target!r}, which is no axis of the mesh"
                f"{_instead(target, mesh.axis_names)}"
            )
        return target


def _instead(name: str, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; there are {', '.join(map(repr, names))}" if names else "; there are none"
