"""What the front tells an engine process when it starts it, and what it is told once the engine is ready."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Self

from jaxserve.config import EngineConfig
from jaxserve.multihost.config import ClusterConfig
from jaxserve.scheduler.limits import Limits
from jaxserve.startup_report import StartupReport

_UNBOUNDED = 2**53


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineJob:
    """What an engine process is to do.

    Attributes:
      model: the checkpoint's folder.
      config: of the engine.
      profile: folder for a jax profiler capture, if one is wanted.
      cluster: this host's place among several; None where it serves alone.
    """

    model: str
    config: EngineConfig
    profile: str | None = None
    cluster: ClusterConfig | None = None

    @classmethod
    def of(
        cls, model: str, config: EngineConfig, profile: str | None = None, cluster: ClusterConfig | None = None
    ) -> Self:
        """The job of an engine whose front counts what waits and refuses what is too much: the engine takes all."""
        config = dataclasses.replace(config, max_queued_requests=_UNBOUNDED, max_queued_tokens=_UNBOUNDED)
        return cls(model=model, config=config, profile=profile, cluster=cluster)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine turned out to be like."""

    report: StartupReport
    limits: Limits
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    @property
    def vocab_size(self) -> int:
        """Of the model."""
        return self.limits.vocab_size
