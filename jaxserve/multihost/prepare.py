"""What every host does before the first plan: join the job, load weights, compile, link."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax

from jaxserve import models, startup, weights
from jaxserve.config import EngineConfig
from jaxserve.multihost import distributed
from jaxserve.multihost.config import ClusterConfig
from jaxserve.multihost.links import BridgeLink, DirectLink, crosses_hosts, make_links
from jaxserve.multihost.probe import probe
from jaxserve.multihost.remote_stage import RemoteStage
from jaxserve.runner import cache_folder, kv_cache
from jaxserve.runner.layout import bucket_sizes, lay_out
from jaxserve.runner.links import Link
from jaxserve.runner.lowering import StagePrograms
from jaxserve.runner.pipeline import Stage
from jaxserve.runner.program_cache import ProgramCache
from jaxserve.runner.sharded_parameters import parameters_of
from jaxserve.runner.stage import Progress, StageRunner
from sharding import mesh, specs
from sharding.fit import check_weights
from sharding.spec import read as read_spec

Tell = Callable[[str], None]


class ControlChannel(Protocol):
    """A host's channel to the others: a `HostGroup` or a `MasterConnection`."""

    def reached(self, step: str) -> None: ...
    def agree(self, about: str, value: int) -> int: ...
    def check(self, about: str, problem: str) -> str: ...


class PreparedStages(NamedTuple):
    """The compiled stages, links and figures that every host has before the first plan."""

    programs: list[StagePrograms]
    stages: list[Stage]
    links: list[Link]
    n_blocks: int
    reason: str
    programs_loaded: int
    load_seconds: float
    compile_seconds: float


def prepare(
    path: str | Path,
    config: EngineConfig,
    cluster: ClusterConfig,
    party: ControlChannel,
    progress: Progress,
    tell: Tell,
) -> PreparedStages:
    """Join the jax job, load and compile this host's stages, and link them to the others."""
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
    startup.program_cache(config)  # jax's own cache, for programs that span several hosts
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
        whole = len(stage.mesh.local_devices) == stage.mesh.size  # the stage's programs run on this host alone
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
    return PreparedStages(
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
    """The same number of devices of every host, in the order of the hosts.

    Each stage takes the devices that follow those of the stage before.
    """
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
    """Read only this stage's parameters, and on each device only its slices."""
    names, place = parameters_of(stage).keys(), weights.on_mesh(stage.model, stage.mesh, stage.spec)
    return lambda name, shape, axes: place(name, shape, axes) if name in names else None


def _linked(
    programs: Sequence[StagePrograms], sizes: Sequence[int], cluster: ClusterConfig, party: ControlChannel, tell: Tell
) -> list[Link]:
    """The links, of the kind that was asked for or that all hosts found to work."""
    if not crosses_hosts(programs):
        return make_links(programs, "bridge")
    party.reached("linking stages")
    way, why = "bridge", "asked for"
    if cluster.links != "bridge":
        party.agree("compiled", 1)  # all at once: a host that still compiles would look unreachable
        way, why = "direct", "probed"
        if problem := probe(programs, party.check):
            distributed.keep_client()
            if cluster.links == "direct":
                raise ValueError(f"links is direct, which does not work: {problem}")
            way, why = "bridge", f"direct links do not work: {problem}"
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
