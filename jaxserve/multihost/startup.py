"""Starts one engine from several processes.

Every host joins the others, compares settings, and loads, compiles and links the stages on its own devices. Then host 0
measures the buckets with plans that the workers follow, and serves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxserve import models, startup, weights
from jaxserve.config import EngineConfig
from jaxserve.multihost import control_pb2 as pb
from jaxserve.multihost import distributed
from jaxserve.multihost.channel import ControlChannel
from jaxserve.multihost.config import ClusterConfig, check_settings, facts, place, product, shared_by_links
from jaxserve.multihost.failure import HostFailed, one_line
from jaxserve.multihost.flight_recorder import FlightRecorder
from jaxserve.multihost.follower import ReplicaFollower
from jaxserve.multihost.group import HostGroup
from jaxserve.multihost.master import MasterPipeline
from jaxserve.multihost.probe import choose_links
from jaxserve.multihost.remote_grammars import WorkerGrammars
from jaxserve.multihost.remote_stage import RemoteStage
from jaxserve.multihost.worker import MasterConnection
from jaxserve.profiler import Profiler
from jaxserve.runner import kv_cache
from jaxserve.runner.layout import bucket_sizes, for_buckets, lay_out
from jaxserve.runner.links import Link
from jaxserve.runner.lowering import StagePrograms
from jaxserve.runner.measure import run_once
from jaxserve.runner.pipeline import Pipeline, Stage
from jaxserve.runner.sharded_parameters import parameters_of
from jaxserve.runner.stage import Progress, StageRunner
from jaxserve.startup import EngineParts
from jaxserve.structured_output.compiler import GrammarCompiler
from jaxserve.text import tokenizer_files
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.weights import orbax
from jaxserve.weights.checkpoint import StoredTensors
from jaxserve.weights.checksum import PIECE, Checksum
from sharding import mesh, specs
from sharding.fit import check_weights
from sharding.spec import read as read_spec

_log = logging.getLogger(__name__)

_COMPARING_SHARE = 0.05  # of the time of a start; so much longer it may take until all weights are compared
_MEASURING_DEADLINE = 120.0  # seconds for an iteration that was not measured yet

Tell = Callable[[str], None]


class _Prepared(NamedTuple):
    """What every host has before the first plan: compiled stages, links, figures of the start.

    Attributes:
      stages: of each replica, runners of the stages on this host, and a `RemoteStage` for each of the others.
      links: of each replica.
      figures: for the start-up report, as `startup.finish` takes them.
      config: the settings, with the buckets that are compiled.
    """

    stages: Sequence[Sequence[Stage]]
    links: Sequence[Sequence[Link]]
    n_blocks: int
    figures: dict[str, Any]
    config: EngineConfig


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
        prepared = _prepare(path, config, cluster, group, progress, tell)
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
        prepared = _prepare(path, config, cluster, membership, progress, tell)
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
    path: str | Path, cluster: ClusterConfig, prepared: _Prepared, membership: MasterConnection
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


def _prepare(
    path: str | Path,
    config: EngineConfig,
    cluster: ClusterConfig,
    party: ControlChannel,
    progress: Progress,
    tell: Tell,
) -> _Prepared:
    """Join the jax job, load and compile this host's stages, and link them to the others."""
    started = time.perf_counter()
    model = models.build(weights.read_config(path))
    spec = specs.default(model.config.family)
    if config.sharding is not None:
        spec = read_spec(config.sharding, spec)
    party.reached("connecting devices")
    with party.coordinator() as address:
        distributed.join(cluster, address)
    dtype = startup.compute_dtype(config)
    platform, replicas, reason = jax.local_devices()[0].platform, [], ""
    for meshes in mesh.make_meshes(config.stage_axes, config.stages, config.replicas, _devices(config, cluster)):
        programs, reason = lay_out(config, model, meshes, spec, dtype=dtype, platform=platform)
        replicas.append(programs)
    here = [stage for programs in replicas for stage in programs if stage.mesh.local_devices]
    party.reached("reading weights")
    checksum = Checksum(StoredTensors(Path(path)).files)
    for stage in here:
        device = stage.mesh.local_devices[0]
        free = kv_cache.free_weight_bytes(device, config.num_devices)
        check_weights(parameters_of(stage).values(), free, f"{device.device_kind} device")
    cache = startup.program_cache(config)  # and jax's own, for programs that span several hosts
    config, buckets_reason = startup.settled_buckets(config, replicas[0])
    sizes, read = bucket_sizes(config), 0
    replicas = [for_buckets(programs, sizes) for programs in replicas]
    whole: dict[int, Any] = {}  # weights of stages that are wholly on this host; other replicas copy them

    def count(nbytes: int) -> None:
        nonlocal read
        read += nbytes

    def stage_of(index: int, stage: StagePrograms) -> StageRunner | RemoteStage:
        if not stage.mesh.local_devices:
            return RemoteStage(stage, sizes)
        alone = len(stage.mesh.local_devices) == stage.mesh.size  # the stage's programs run on this host alone
        if (params := whole.get(index) if alone else None) is None:
            params = weights.load(
                path, stage.model, dtype, place=_own(stage), quantize=stage.quantize, progress=progress, count=count
            )
        if alone:
            whole[index] = params
        return StageRunner(stage, params, sizes, cache if alone else None)

    parts = [[stage_of(*each) for each in enumerate(programs)] for programs in replicas]
    whole.clear()
    loaded = time.perf_counter()
    stages = [stage for part in parts for stage in part]
    runners = [stage for stage in stages if isinstance(stage, StageRunner)]
    total = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    party.reached(f"{read / 2**20:.2f} of {total / 2**20:.2f} MiB of weights read")
    party.reached("compiling")
    n_blocks = party.agree("blocks", min(startup.pool_blocks(config, runner, ()) for runner in runners))
    for stage in stages:
        stage.compile(n_blocks, progress)
    if cache is not None:
        cache.forget()
    compared = _compare(checksum, _COMPARING_SHARE * (time.perf_counter() - started), cluster, party)
    if cluster.host == 0:
        tell(f"host 0: {compared / 2**20:.2f} of {checksum.total / 2**20:.2f} MiB of weights are the same on all hosts")
    links = choose_links(replicas, sizes, cluster, party, tell, shared_by_links(config, cluster.hosts))
    figures = {
        "attention_reason": reason,
        "buckets_reason": buckets_reason,
        "programs_loaded": 0 if cache is None else cache.loaded,
        "load_seconds": loaded - started,
        "compile_seconds": time.perf_counter() - loaded,
    }
    return _Prepared(parts, links, n_blocks, figures, config)


def _compare(checksum: Checksum, seconds: float, cluster: ClusterConfig, party: ControlChannel) -> int:
    """Compare the weight files of all hosts, as far as all have read them.

    Args:
      seconds: to wait for the rest.

    Returns:
      The number of bytes compared.

    Raises:
      ValueError: they differ.
    """
    pieces = party.agree("pieces of the weights", checksum.wait(seconds))
    mine = checksum.after(pieces)
    expected = party.agree("checksum of the weights", mine if cluster.host == 0 else 2**32)
    problem = "" if mine == expected else "its weight files have other bytes than those of host 0"
    if problems := party.check("weights", problem):
        raise ValueError(problems)
    return min(pieces * PIECE, checksum.total)


def _devices(config: EngineConfig, cluster: ClusterConfig) -> list[Any]:
    """The same number of devices of every host, in the order of the hosts.

    Each stage takes the devices that follow those of the stage before, and each replica those that follow those of the
    replica before.
    """
    each, found = config.num_devices // cluster.hosts, []
    for host in range(cluster.hosts):
        theirs = [device for device in jax.devices() if device.process_index == host]
        if len(theirs) < each:
            raise ValueError(
                f"host {host} has {len(theirs)} devices; {product(config)} over {cluster.hosts} hosts takes {each} of "
                "each"
            )
        found += theirs[:each]
    return found


def _own(stage: StagePrograms) -> weights.Place:
    """Read only this stage's parameters, and on each device only its slices."""
    names, place = parameters_of(stage).keys(), stage.place
    return lambda name, shape, axes: place(name, shape, axes) if name in names else None


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


def _recorder(path: str | Path, cluster: ClusterConfig, prepared: _Prepared, index: int) -> FlightRecorder:
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
