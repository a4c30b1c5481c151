"""What a long benchmark has found so far, kept in a file as it comes, so that a run can be cut short and resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.environments import PeerError
from server.commands.bench import report


class Turn(NamedTuple):
    """One piece of work of one engine, which is done once.

    Attributes:
      work: "check", "steps", "capacity" or a load such as "load 0.8".
    """

    shape: str
    dtype: str
    engine: str
    work: str
    round: int


class Ledger:
    """Answers by turn, and what went wrong, written to a file after each.

    Args:
      about: what the run measures; turns of an earlier run are kept only when it measured the same.
      resume: whether to keep the turns that the file holds.
    """

    def __init__(self, path: Path, about: dict[str, Any], *, resume: bool) -> None:
        self.path, self.about = path, json.loads(json.dumps(about))
        self.answers: dict[Turn, dict[str, Any]] = {}
        self.problems: list[str] = []
        self.notes: list[str] = []
        if resume and path.exists():
            kept = json.loads(path.read_text())
            if kept["about"] != self.about:
                raise ValueError(f"{path} is of a run with other settings; leave --resume out to begin anew")
            self.answers = {Turn(*turn): answer for turn, answer in kept["turns"]}

    def do(self, turn: Turn, work: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """The answer of a turn, which is done now unless it is known; None when it failed, which becomes a problem."""
        if turn not in self.answers:
            try:
                answer = work()
            except PeerError as error:
                self.problem(f"{turn.engine}, {turn.shape}, {turn.dtype}, {turn.work}: {error}")
                return None
            self.answers[turn] = answer
            self.write()
        return self.answers[turn]

    def problem(self, line: str) -> None:
        self.problems.append(line)
        self.write()

    def rounds(self, shape: str, dtype: str, engine: str, work: str) -> list[dict[str, Any]]:
        """The answers to the same work in every round that there is."""
        return [answer for turn, answer in self.answers.items() if turn[:4] == (shape, dtype, engine, work)]

    def write(self, **more: Any) -> None:
        result = {"benchmark": "peers", "about": self.about, **more}
        result |= {"notes": self.notes, "problems": self.problems, "turns": list(self.answers.items())}
        report.write_json(self.path, result)
