"""The job that the front gives an engine process, and facts about an engine that is ready."""

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
    """The settings of an engine process.

    Attributes:
      model: the checkpoint directory.
      config: of the engine.
      profile: directory for captures of jax's profiler, or None.
      cluster: this host's place among several; None where it serves alone.
      log_level: the least level of what it logs.
      kv_events: whether the front wants the changes of the prefix caches.
    """

    model: str
    config: EngineConfig
    profile: str | None = None
    cluster: ClusterConfig | None = None
    log_level: str = "warning"
    kv_events: bool = False

    @classmethod
    def of(
        cls,
        model: str,
        config: EngineConfig,
        profile: str | None = None,
        cluster: ClusterConfig | None = None,
        *,
        log_level: str = "warning",
        kv_events: bool = False,
    ) -> Self:
        """A job without bounds on the engine's queue, because the front bounds its own."""
        config = dataclasses.replace(config, max_queued_requests=_UNBOUNDED, max_queued_tokens=_UNBOUNDED)
        return cls(
            model=model, config=config, profile=profile, cluster=cluster, log_level=log_level, kv_events=kv_events
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Facts about an engine that is ready."""

    report: StartupReport
    limits: Limits
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    @property
    def vocab_size(self) -> int:
        """The vocabulary size of the model."""
        return self.limits.vocab_size
