"""Starts one engine from several processes.

Every host joins the others, compares settings, and loads, compiles and links the stages on its own devices. Then host 0
measures the buckets with plans that the workers follow, and serves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxserve import startup, weights
from jaxserve.config import EngineConfig
from jaxserve.multihost import control_pb2 as pb
from jaxserve.multihost import distributed
from jaxserve.multihost.config import ClusterConfig, check_settings, facts, place
from jaxserve.multihost.failure import HostFailed, one_line
from jaxserve.multihost.flight_recorder import FlightRecorder
from jaxserve.multihost.follower import ReplicaFollower
from jaxserve.multihost.group import HostGroup
from jaxserve.multihost.master import MasterPipeline
from jaxserve.multihost.preparation import PreparedHost, prepare
from jaxserve.multihost.remote_grammars import WorkerGrammars
from jaxserve.multihost.worker import MasterConnection
from jaxserve.profiler import Profiler
from jaxserve.runner.layout import bucket_sizes
from jaxserve.runner.measure import run_once
from jaxserve.runner.pipeline import Pipeline
from jaxserve.runner.stage import Progress
from jaxserve.startup import EngineParts
from jaxserve.structured_output.compiler import GrammarCompiler
from jaxserve.text import tokenizer_files
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.weights import orbax

_log = logging.getLogger(__name__)

_MEASURING_DEADLINE = 120.0  # seconds for an iteration that was not measured yet

Tell = Callable[[str], None]


def lead(
    path: str | Path, config: EngineConfig, cluster: ClusterConfig, *, tell: Tell, progress: Progress = startup.silent
) -> tuple[EngineParts, Tokenizer | None, list[FlightRecorder]]:
    """Start host 0: does what `startup.from_checkpoint` does, over the devices of several hosts.

    Args:
      tell: called with one line for each step of each host.

    Returns:
      The started model, its tokenizer, and the recorder of each replica's iterations.

    Raises:
      ValueError: a setting is not possible, or a host did not join in time or was started with other settings,
        versions or weights; the message names it.
      HostFailed: a host failed during the start.
    """
    check_settings(config, cluster)
    group = HostGroup(cluster, _facts(path, config, cluster), tell=tell)
    group.listen()
    try:
        group.reached(f"waiting for {cluster.hosts - 1} more at {cluster.coordinator}")
        group.join()
        tokenizer = Tokenizer.from_directory(path)
        prepared = prepare(path, config, cluster, group, progress, tell)
        config = prepared.config
        each = zip(prepared.stages, prepared.links, group.place(place(config, cluster.hosts)), strict=True)
        pipelines = [MasterPipeline(stages, links, hosts, distributed.leave) for stages, links, hosts in each]
        group.agree("ready", 1)
        group.reached("measuring buckets")
        group.phase(_MEASURING_DEADLINE, serving=False)
        started = startup.finish(config, pipelines, [], prepared.n_blocks, progress, **prepared.figures)
        for pipeline in pipelines[1:]:  # its devices connect to each other now, not within the first request's deadline
            run_once(pipeline, prepared.n_blocks)
        recorders = [_recorder(path, cluster, prepared, index) for index in range(config.replicas)]
        group.on_failure = lambda problem: write_records(recorders, str(problem), tell)
        slowest = max(cost.milliseconds for cost in started.report.buckets) / 1000
        deadline = cluster.deadline(slowest)
        group.phase(deadline, serving=True)
        for pipeline, recorder in zip(pipelines, recorders, strict=True):
            pipeline.serve(recorder)
        tell(f"all {cluster.hosts} hosts are ready; an iteration has {deadline:g} s")
    except HostFailed:
        raise  # the watchdog ends all hosts
    except BaseException as problem:
        if isinstance(problem, Exception) and not startup.is_user_error(problem):  # as on any other host
            _log.exception("this host cannot start")
            group.cannot_start(problem)
        group.stop(f"host 0: {str(problem) or type(problem).__name__}")  # an interrupt has no message
        raise
    return started, tokenizer, recorders


def follow(
    path: str | Path,
    config: EngineConfig,
    cluster: ClusterConfig,
    *,
    tell: Tell,
    alive: Callable[[float], None] = lambda _: None,
    progress: Progress = startup.silent,
    profiler: Profiler | None = None,
) -> None:
    """Follow host 0's plans until it stops; any failure ends the process.

    Args:
      alive: called twice per second with the seconds within which the next call must come.
      profiler: captures when host 0 says so; None where no folder was given for it.

    Raises:
      ValueError: a setting is not possible, or the master cannot be reached or refuses this host.
    """
    check_settings(config, cluster)
    membership = MasterConnection(cluster, _facts(path, config, cluster), tell=tell, alive=alive, profiler=profiler)
    membership.join()
    try:
        prepared = prepare(path, config, cluster, membership, progress, tell)
        membership.followers, recorders = _followers(path, cluster, prepared, membership)
        if recorders:
            membership.on_failure = lambda reason: write_records(recorders, reason, tell)
        membership.reached("ready")
        membership.agree("ready", 1)
    except Exception as problem:
        if not startup.is_user_error(problem):  # a user's mistake is reported in one line
            _log.exception("this host cannot start")
        membership.fail(f"{type(problem).__name__}: {one_line(problem)}")
        raise
    with contextlib.closing(profiler) if profiler is not None else contextlib.nullcontext():
        membership.follow()
    distributed.leave()
    membership.left()


def _followers(
    path: str | Path, cluster: ClusterConfig, prepared: PreparedHost, membership: MasterConnection
) -> tuple[dict[int, ReplicaFollower], list[FlightRecorder]]:
    """A follower of each replica with devices here, and their recorders."""
    followers, recorders, config, compiler = {}, [], prepared.config, None
    for index, placed in enumerate(place(config, cluster.hosts)):
        here = placed.get(cluster.host)
        if here is None:
            continue
        pipeline = Pipeline(prepared.stages[index], prepared.links[index])
        recorder = grammars = None
        sampling = [host for host, stages in placed.items() if config.stages - 1 in stages]
        if cluster.host in sampling:
            recorder = _recorder(path, cluster, prepared, index)
            recorders.append(recorder)
            compiler = compiler or _grammar_compiler(path, pipeline)
            grammars = None if compiler is None else WorkerGrammars(compiler, pipeline.mask_shape)
        followers[index] = ReplicaFollower(
            (index, config.replicas),
            pipeline,
            prepared.n_blocks,
            membership,
            stages=here,
            answers=cluster.host == min(sampling),
            recorder=recorder,
            grammars=grammars,
        )
    return followers, recorders


def _grammar_compiler(path: str | Path, pipeline: Pipeline) -> GrammarCompiler | None:
    """Compiles grammars on this host; None without a tokenizer."""
    tokenizer, model = Tokenizer.from_directory(path), pipeline.model.config
    if tokenizer is None:
        return None
    compiler = GrammarCompiler(tokenizer, model.vocab_size, model.eos_token_ids)
    compiler.load_vocabulary_in_background()
    return compiler


def write_records(recorders: Sequence[FlightRecorder], reason: str, tell: Tell) -> None:
    """Write each recorder's contents to a file and tell its path."""
    for recorder in recorders:
        try:
            tell(f"the last iterations are in {recorder.write(reason)}; `jaxserve replay` runs them again")
        except OSError as problem:
            tell(f"the flight record cannot be written: {problem}")


def _facts(path: str | Path, config: EngineConfig, cluster: ClusterConfig) -> list[tuple[str, str]]:
    if orbax.is_saved(Path(path)):
        raise ValueError(f"{path} was written by `jaxserve convert`; several hosts read Hugging Face directories only")
    same = [Path(path, name) for name in ("config.json", *tokenizer_files.TOKENIZER_FILES)]
    return facts(config, cluster, bucket_sizes(config), weights.fingerprint(path), same)


def _recorder(path: str | Path, cluster: ClusterConfig, prepared: PreparedHost, index: int) -> FlightRecorder:
    """A recorder of a replica that describes the engine to a replay on one machine."""
    shape, several = prepared.stages[index][0].programs.shape, prepared.config.replicas > 1
    settled = dataclasses.replace(
        prepared.config,
        dtype=str(shape.attention.dtype),
        kv_cache_dtype=str(shape.attention.pool_dtype),
        block_size=shape.attention.block_size,
        max_context=shape.max_context,
        slots=prepared.n_blocks * shape.attention.block_size,
        buckets=bucket_sizes(prepared.config),
        mesh=None,
        tensor=1,
        stages=1,
        replicas=1,
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
        replica=index if several else None,
    )
    return FlightRecorder(
        about,
        shape.attention.block_size,
        seconds=cluster.record_seconds,
        folder=cluster.record_folder,
        groups=shape.groups.count,
    )
