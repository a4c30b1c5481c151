"""The models whose steps are timed, and the sizes of the steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from server.commands.bench.step import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedModel:
    """A known shape (`server.commands.bench.shapes`), and its timed steps.

    Attributes:
      rows: batches of decodes.
      context: tokens that each of them holds.
      prompt: tokens of a prefill.
    """

    shape: str
    rows: tuple[int, ...] = (1, 8, 32, 128)
    context: int = 512
    prompt: int = 4096

    @property
    def cases(self) -> list[Case]:
        """The timed steps."""
        from server.commands.bench.step import Case  # the parent process, which only reads names, has no use for jax

        return [*(Case(decodes=rows, context=self.context) for rows in self.rows), Case(prompt=self.prompt)]


CHOICE = "choice of tokens"  # the job that times the sampler
MODELS = (TimedModel(shape="bloom-560m-250k"), TimedModel(shape="bloom-7b1"), TimedModel(shape="llama-3-8b"))
SMALL_MODELS = (TimedModel(shape="tiny", rows=(1, 3), context=10, prompt=8),)


def timed(small: bool) -> tuple[TimedModel, ...]:
    """The models of a run."""
    return SMALL_MODELS if small else MODELS
