"""From several processes to one engine: they join, compare, connect, load, compile and agree, step by step.

Every host does the same work for the stages it has devices of, so the code is the same; the master measures at the end,
by plans that the others follow, and a worker then follows for good.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxserve import startup, weights
from jaxserve.config import EngineConfig
from jaxserve.multihost import control_pb2 as pb
from jaxserve.multihost import distributed
from jaxserve.multihost.config import ClusterConfig, check_settings, facts
from jaxserve.multihost.failure import HostFailed, one_line
from jaxserve.multihost.flight_recorder import FlightRecorder
from jaxserve.multihost.group import HostGroup
from jaxserve.multihost.master import MasterPipeline
from jaxserve.multihost.prepare import PreparedStages, Tell, prepare
from jaxserve.multihost.remote_grammars import WorkerGrammars
from jaxserve.multihost.worker import MasterConnection
from jaxserve.runner.layout import bucket_sizes
from jaxserve.runner.lowering import StagePrograms
from jaxserve.runner.pipeline import Pipeline
from jaxserve.runner.stage import Progress
from jaxserve.startup import Started
from jaxserve.structured_output.matcher import Grammars
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.weights import orbax

_log = logging.getLogger(__name__)

_MEASURING_DEADLINE = 120.0  # seconds for an iteration whose cost nobody knows yet


class StartedMaster(NamedTuple):
    """What host 0 makes an engine of, and what keeps its iterations."""

    started: Started
    tokenizer: Tokenizer | None
    recorder: FlightRecorder


def lead(
    path: str | Path, config: EngineConfig, cluster: ClusterConfig, *, tell: Tell, progress: Progress = startup.silent
) -> StartedMaster:
    """What `startup.from_checkpoint` does, with the devices of several hosts; on host 0.

    Args:
      tell: is told which host is at which step, a line each.

    Raises:
      ValueError: a setting cannot be, a host has not joined in time or has been started with other settings, versions
        or weights; the message names it.
      HostFailed: a host failed on the way.
    """
    check_settings(config, cluster)
    group = HostGroup(cluster, _facts(path, config, cluster), tell=tell)
    group.listen()
    try:
        group.reached(f"waiting for {cluster.hosts - 1} more at {cluster.control}")
        group.join()
        tokenizer = Tokenizer.from_directory(path)
        prepared = prepare(path, config, cluster, group, progress, tell)
        group.place(_places(prepared.programs))
        pipeline = MasterPipeline(prepared.stages, prepared.links, group, distributed.leave)
        group.agree("ready", 1)
        group.reached("measuring buckets")
        group.phase(_MEASURING_DEADLINE, serving=False)
        started = startup.finish(
            config,
            [pipeline],
            [],
            prepared.n_blocks,
            progress,
            attention_reason=prepared.reason,
            programs_loaded=prepared.programs_loaded,
            load_seconds=prepared.load_seconds,
            compile_seconds=prepared.compile_seconds,
        )
        recorder = _recorder(path, config, cluster, prepared)
        group.on_failure = lambda problem: write_record(recorder, str(problem), tell)
        slowest = max(cost.milliseconds for cost in started.report.buckets) / 1000
        deadline = cluster.deadline(slowest)
        pipeline.serve(deadline, recorder)
        tell(f"all {cluster.hosts} hosts are ready; an iteration has {deadline:g} s")
    except HostFailed:
        raise  # the watchdog ends the hosts
    except BaseException as problem:
        if isinstance(problem, Exception) and not startup.can_be_mended(problem):  # as on any other host
            _log.exception("this host cannot start")
            group.cannot_start(problem)
        group.stop(f"host 0: {str(problem) or type(problem).__name__}")  # of an interrupt there are no words
        raise
    return StartedMaster(started, tokenizer, recorder)


def follow(
    path: str | Path,
    config: EngineConfig,
    cluster: ClusterConfig,
    *,
    tell: Tell,
    alive: Callable[[float], None] = lambda _: None,
    progress: Progress = startup.silent,
) -> None:
    """Works for host 0 until it says that that is enough; any failure ends the process.

    Args:
      alive: called twice a second with the seconds after which a process that calls no more is lost.

    Raises:
      ValueError: a setting cannot be, or the master cannot be reached or refuses this host.
    """
    check_settings(config, cluster)
    membership = MasterConnection(cluster, _facts(path, config, cluster), tell=tell, alive=alive)
    membership.join()
    try:
        prepared = prepare(path, config, cluster, membership, progress, tell)
        places = _places(prepared.programs)
        last = len(prepared.programs) - 1
        pipeline = Pipeline(prepared.stages, prepared.links)
        membership.reached("ready")
        membership.agree("ready", 1)
    except Exception as problem:
        if not startup.can_be_mended(problem):  # what can is said in a line
            _log.exception("this host cannot start")
        membership.fail(f"{type(problem).__name__}: {one_line(problem)}")
        raise
    here = places[cluster.host]
    answers = cluster.host == min(host for host, each in places.items() if last in each)
    recorder = texts = None
    if last in here:
        recorder, texts = _recorder(path, config, cluster, prepared), _texts(path, pipeline)
        membership.on_failure = lambda reason: write_record(recorder, reason, tell)
    membership.follow(pipeline, prepared.n_blocks, stages=here, answers=answers, recorder=recorder, texts=texts)
    distributed.leave()


def _texts(path: str | Path, pipeline: Pipeline) -> WorkerGrammars | None:
    """What holds texts to grammars; nothing without a tokenizer."""
    tokenizer, model = Tokenizer.from_directory(path), pipeline.model.config
    if tokenizer is None:
        return None
    grammars = Grammars(tokenizer, model.vocab_size, model.eos_token_ids)
    grammars.read_ahead()
    return WorkerGrammars(grammars, pipeline.mask_shape)


def write_record(recorder: FlightRecorder, reason: str, tell: Tell) -> None:
    """Writes what the recorder holds, and says where."""
    try:
        tell(f"the last iterations are in {recorder.write(reason)}; `jaxserve replay` runs them again")
    except OSError as problem:
        tell(f"the flight record cannot be written: {problem}")


def _facts(path: str | Path, config: EngineConfig, cluster: ClusterConfig) -> list[tuple[str, str]]:
    if orbax.is_saved(Path(path)):
        raise ValueError(f"{path} was written by `jaxserve convert`; several hosts read Hugging Face directories only")
    files = [Path(path, name) for name in ("config.json", "tokenizer.json")]
    return facts(config, cluster, bucket_sizes(config), weights.fingerprint(path), files)


def _places(programs: Sequence[StagePrograms]) -> dict[int, tuple[int, ...]]:
    """The stages of each host."""
    found: dict[int, list[int]] = {}
    for index, stage in enumerate(programs):
        for host in sorted({device.process_index for device in stage.mesh.devices.flat}):
            found.setdefault(host, []).append(index)
    return {host: tuple(stages) for host, stages in found.items()}


def _recorder(
    path: str | Path, config: EngineConfig, cluster: ClusterConfig, prepared: PreparedStages
) -> FlightRecorder:
    """With everything that a replay on one machine has to know of the engine."""
    shape = prepared.programs[0].shape
    settled = dataclasses.replace(
        config,
        dtype=str(shape.attention.dtype),
        kv_cache_dtype=str(shape.attention.pool_dtype),
        block_size=shape.attention.block_size,
        max_context=shape.max_context,
        slots=prepared.n_blocks * shape.attention.block_size,
        buckets=tuple(bucket_sizes(config)),
        tensor=1,
        stages=1,
        in_flight=None,
        layers_per_stage=None,
        sharding=None,
        compilation_cache=None,
    )
    about = pb.Recording(
        fingerprint=weights.fingerprint(path),
        settings=json.dumps(dataclasses.asdict(settled)),
        n_blocks=prepared.n_blocks,
        n_rows=shape.n_rows,
    )
    return FlightRecorder(
        about, shape.attention.block_size, seconds=cluster.record_seconds, folder=cluster.record_folder
    )
