"""From several processes to one engine: they join, compare, connect, load, compile and agree, step by step.

Every host does the same work for the stages it has devices of, so the code is the same; the master measures at the end,
by plans that the others follow, and a worker then follows for good.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax

from jaxserve import models, startup, weights
from jaxserve.config import EngineConfig
from jaxserve.multihost import control_pb2 as pb
from jaxserve.multihost import distributed
from jaxserve.multihost.config import ClusterConfig, check_settings, facts
from jaxserve.multihost.failure import HostFailed, one_line
from jaxserve.multihost.flight_recorder import FlightRecorder
from jaxserve.multihost.group import HostGroup
from jaxserve.multihost.links import BridgeLink, DirectLink, crosses_hosts, make_links, probe
from jaxserve.multihost.master import MasterPipeline
from jaxserve.multihost.remote_grammars import WorkerGrammars
from jaxserve.multihost.remote_stage import RemoteStage
from jaxserve.multihost.worker import MasterConnection
from jaxserve.runner import cache_folder, kv_cache
from jaxserve.runner.layout import bucket_sizes, lay_out
from jaxserve.runner.links import Link
from jaxserve.runner.lowering import StagePrograms
from jaxserve.runner.pipeline import Pipeline, Stage
from jaxserve.runner.program_cache import ProgramCache
from jaxserve.runner.sharded_parameters import parameters_of
from jaxserve.runner.stage import Progress, StageRunner
from jaxserve.startup import Started
from jaxserve.structured_output.matcher import Grammars
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.weights import orbax
from sharding import mesh, specs
from sharding.fit import check_weights
from sharding.spec import read as read_spec

_log = logging.getLogger(__name__)

_MEASURING_DEADLINE = 120.0  # seconds for an iteration whose cost nobody knows yet

Tell = Callable[[str], None]


class _ControlChannel(Protocol):
    """A host's way to the others: a `HostGroup` or a `MasterConnection`."""

    def reached(self, step: str) -> None: ...
    def agree(self, about: str, value: int) -> int: ...


class StartedMaster(NamedTuple):
    """What host 0 makes an engine of, and what keeps its iterations."""

    started: Started
    tokenizer: Tokenizer | None
    recorder: FlightRecorder


class _PreparedStages(NamedTuple):
    """What every host has before the first plan."""

    programs: list[StagePrograms]
    stages: list[Stage]
    links: list[Link]
    n_blocks: int
    reason: str
    programs_loaded: int
    load_seconds: float
    compile_seconds: float


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
        prepared = _prepare(path, config, cluster, group, progress, tell)
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
        prepared = _prepare(path, config, cluster, membership, progress, tell)
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


def _prepare(
    path: str | Path,
    config: EngineConfig,
    cluster: ClusterConfig,
    party: _ControlChannel,
    progress: Progress,
    tell: Tell,
) -> _PreparedStages:
    started = time.perf_counter()
    model = models.build(weights.read_config(path))
    spec = specs.default(model.config.family)
    if config.sharding is not None:
        spec = read_spec(config.sharding, spec)
    party.reached("connecting devices")
    distributed.join(cluster)
    dtype = startup.compute_dtype(config)
    (meshes,) = mesh.make_meshes(config.tensor, config.stages, devices=_devices(config, cluster))
    platform = jax.local_devices()[0].platform
    programs, reason = lay_out(config, model, meshes, spec, dtype=dtype, platform=platform)
    here = [stage for stage in programs if stage.mesh.local_devices]
    party.reached("reading weights")
    for stage in here:
        device = stage.mesh.local_devices[0]
        room = kv_cache.weight_room(device, config.tensor * config.stages)
        check_weights(parameters_of(stage).values(), room, f"{device.device_kind} device")
    startup.program_cache(config)  # jax's own, for programs that several hosts run
    folder = cache_folder.of(config.compilation_cache)
    cache = None if folder is None else ProgramCache(folder)
    sizes, stages, read = bucket_sizes(config), [], 0

    def count(nbytes: int) -> None:
        nonlocal read
        read += nbytes

    for stage in programs:
        if stage not in here:
            stages.append(RemoteStage(stage, sizes))
            continue
        params = weights.load(
            path, stage.model, dtype, place=_own(stage), int8=stage.int8, progress=progress, count=count
        )
        whole = len(stage.mesh.local_devices) == stage.mesh.size  # here, and so are its programs
        stages.append(StageRunner(stage, params, sizes, cache if whole else None))
    loaded = time.perf_counter()
    runners = [stage for stage in stages if isinstance(stage, StageRunner)]
    total = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    party.reached(f"{read / 2**20:.2f} of {total / 2**20:.2f} MiB of weights read")
    party.reached("compiling")
    n_blocks = party.agree("blocks", min(startup.pool_blocks(config, runner, ()) for runner in runners))
    for stage in stages:
        if isinstance(stage, StageRunner):
            stage.compile(n_blocks, progress)
        else:
            stage.compile(n_blocks)
    links = _linked(programs, sizes, cluster, party, tell)
    return _PreparedStages(
        programs=programs,
        stages=stages,
        links=links,
        n_blocks=n_blocks,
        reason=reason,
        programs_loaded=0 if cache is None else cache.loaded,
        load_seconds=loaded - started,
        compile_seconds=time.perf_counter() - loaded,
    )


def _devices(config: EngineConfig, cluster: ClusterConfig) -> list[Any]:
    """As many of every host, in the order of the hosts: each stage takes those that follow the one's before."""
    each, found = config.tensor * config.stages // cluster.hosts, []
    for host in range(cluster.hosts):
        theirs = [device for device in jax.devices() if device.process_index == host]
        if len(theirs) < each:
            raise ValueError(
                f"host {host} has {len(theirs)} devices; tensor {config.tensor} times stages {config.stages} over "
                f"{cluster.hosts} hosts takes {each} of each"
            )
        found += theirs[:each]
    return found


def _own(stage: StagePrograms) -> weights.Place:
    """Has only the stage's own parameters read; of these, devices read their own slices."""
    names, place = parameters_of(stage).keys(), weights.on_mesh(stage.model, stage.mesh, stage.spec)
    return lambda name, shape, axes: place(name, shape, axes) if name in names else None


def _linked(
    programs: Sequence[StagePrograms], sizes: Sequence[int], cluster: ClusterConfig, party: _ControlChannel, tell: Tell
) -> list[Link]:
    """The links, by the way that was asked for or that all hosts found to work."""
    if not crosses_hosts(programs):
        return make_links(programs, "bridge")
    party.reached("linking stages")
    why = "asked for"
    if cluster.links == "bridge":
        way = "bridge"
    else:
        party.agree("compiled", 1)  # together: who is not awaited yet would be taken for one that cannot be reached
        problem = probe(programs)
        way = "direct" if party.agree("direct links", int(problem is None)) else "bridge"
        why = problem or ("as other hosts found" if way == "bridge" else "probed")
        if way == "bridge" and cluster.links == "direct":
            raise ValueError(f"links is direct, which does not work here: {why}")
    links = make_links(programs, way)
    shape = programs[0].shape
    hidden = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in map(programs[0].hidden, sizes)]
    chosen = [jax.ShapeDtypeStruct((2, count), "int32") for count in shape.point_counts(sizes)]
    for link in links:
        if isinstance(link, BridgeLink):
            link.prepare(chosen if link is links[-1] else hidden)
    if cluster.host == 0 or any(isinstance(link, DirectLink | BridgeLink) for link in links):
        tell(f"host {cluster.host}: links between hosts: {way} ({why})")
    return links


def _places(programs: Sequence[StagePrograms]) -> dict[int, tuple[int, ...]]:
    """The stages of each host."""
    found: dict[int, list[int]] = {}
    for index, stage in enumerate(programs):
        for host in sorted({device.process_index for device in stage.mesh.devices.flat}):
            found.setdefault(host, []).append(index)
    return {host: tuple(stages) for host, stages in found.items()}


def _recorder(
    path: str | Path, config: EngineConfig, cluster: ClusterConfig, prepared: _PreparedStages
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
