"""Loads, compiles and links the stages on the devices of one host of several."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxserve import models, startup, weights
from jaxserve.config import EngineConfig
from jaxserve.multihost import distributed
from jaxserve.multihost.channel import ControlChannel
from jaxserve.multihost.config import ClusterConfig, product, shared_by_links
from jaxserve.multihost.probe import choose_links
from jaxserve.multihost.remote_stage import RemoteStage
from jaxserve.runner import kv_cache
from jaxserve.runner.layout import bucket_sizes, for_buckets, lay_out
from jaxserve.runner.links import Link
from jaxserve.runner.lowering import StagePrograms
from jaxserve.runner.pipeline import Stage
from jaxserve.runner.sharded_parameters import parameters_of
from jaxserve.runner.stage import Progress, StageRunner
from jaxserve.weights.checkpoint import StoredTensors
from jaxserve.weights.checksum import PIECE, Checksum
from sharding import mesh, specs
from sharding.fit import check_weights
from sharding.spec import read as read_spec

_COMPARING_SHARE = 0.05  # of the time of a start; so much longer it may take until all weights are compared


class PreparedHost(NamedTuple):
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


def prepare(
    path: str | Path,
    config: EngineConfig,
    cluster: ClusterConfig,
    party: ControlChannel,
    progress: Progress,
    tell: Callable[[str], None],
) -> PreparedHost:
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
    return PreparedHost(parts, links, n_blocks, figures, config)


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
