"""Starts one engine from several processes: join, compare, connect, load, compile, agree.

Every host does this for the stages on its devices, with the same code. At the end the master measures the buckets with
plans that the workers follow. After that, a worker only follows plans.
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
from jaxserve.text import files
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.weights import orbax

_log = logging.getLogger(__name__)

_MEASURING_DEADLINE = 120.0  # seconds for an iteration that was not measured yet


class StartedMaster(NamedTuple):
    """The started model on host 0, and the recorder of its iterations."""

    started: Started
    tokenizer: Tokenizer | None
    recorder: FlightRecorder


def lead(
    path: str | Path, config: EngineConfig, cluster: ClusterConfig, *, tell: Tell, progress: Progress = startup.silent
) -> StartedMaster:
    """Start host 0: does what `startup.from_checkpoint` does, over the devices of several hosts.

    Args:
      tell: called with one line for each step of each host.

    Raises:
      ValueError: a setting is not possible, or a host did not join in time or was started with other settings,
        versions or weights; the message names it.
      HostFailed: a host failed during the start.
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
        group.stop(f"host 0: {str(problem) or type(problem).__name__}")  # an interrupt has no message
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
    """Follow host 0's plans until it stops; any failure ends the process.

    Args:
      alive: called twice per second with the seconds within which the next call must come.

    Raises:
      ValueError: a setting is not possible, or the master cannot be reached or refuses this host.
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
        if not startup.can_be_mended(problem):  # a user's mistake is reported in one line
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
    """The grammar states of this host; None without a tokenizer."""
    tokenizer, model = Tokenizer.from_directory(path), pipeline.model.config
    if tokenizer is None:
        return None
    grammars = Grammars(tokenizer, model.vocab_size, model.eos_token_ids)
    grammars.read_ahead()
    return WorkerGrammars(grammars, pipeline.mask_shape)


def write_record(recorder: FlightRecorder, reason: str, tell: Tell) -> None:
    """Write the recorder's contents to a file and tell its path."""
    try:
        tell(f"the last iterations are in {recorder.write(reason)}; `jaxserve replay` runs them again")
    except OSError as problem:
        tell(f"the flight record cannot be written: {problem}")


def _facts(path: str | Path, config: EngineConfig, cluster: ClusterConfig) -> list[tuple[str, str]]:
    if orbax.is_saved(Path(path)):
        raise ValueError(f"{path} was written by `jaxserve convert`; several hosts read Hugging Face directories only")
    same = [Path(path, name) for name in ("config.json", *files.FILES)]
    return facts(config, cluster, bucket_sizes(config), weights.fingerprint(path), same)


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
    """A recorder with all that a replay on one machine must know of the engine."""
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
