"""Whether stages work at the same time: a tiny model whose attention sleeps, so that stages need no core while they
"compute", served by the engine in 1, 2, 4, ... stages of one virtual device each."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from jaxserve import models, startup
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from pallas_kernels.api import Backend
from server.commands.bench import machine, report, shapes
from server.commands.bench.progress import Bars

TARGET = 0.85  # of as many times the throughput of one stage as there are stages
_PLATFORM = "cpu"
_WINDOW = 15  # iterations that are timed together
_TARGET_NAME = "jaxserve_sleep"
_SOURCE = """\
#include <chrono>
#include <cstring>
#include <thread>
#include "xla/ffi/api/ffi.h"
namespace ffi = xla::ffi;
static ffi::Error Sleep(int64_t microseconds, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y) {
  std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
  std::memcpy(y->untyped_data(), x.untyped_data(), x.size_bytes());
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxserveSleep, Sleep,
    ffi::Ffi::Bind().Attr<int64_t>("microseconds").Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleeping:
    """A backend that does what another does and then sleeps.

    Attributes:
      microseconds: how long, in every layer.
    """

    inner: Backend
    microseconds: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def attend(self, q: jax.Array, *arguments: Any, **options: Any) -> tuple[jax.Array, Any]:
        out, pool = self.inner.attend(q, *arguments, **options)
        sleep = jax.ffi.ffi_call(_TARGET_NAME, jax.ShapeDtypeStruct(out.shape, out.dtype))
        return sleep(out, microseconds=self.microseconds), pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """What was measured of one number of stages.

    Attributes:
      iterations_per_second: in the median of windows of some iterations, for a machine that has other things to do.
      asleep: share of that time that each stage slept, on average: the rest is bubbles and what is not sleep.
    """

    stages: int
    iterations_per_second: float
    asleep: float


@functools.cache
def compile_sleep() -> str | None:
    """Compiles the sleeping call and makes it known to XLA; why that cannot be, in words, or None."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return "there is no C++ compiler (g++ or clang++) to build the sleeping call with"
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "sleep.cc"), Path(folder, "sleep.so")
        source.write_text(_SOURCE)
        command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{jax.ffi.include_dir()}", "-o"]
        done = subprocess.run([*command, str(library), str(source)], capture_output=True, text=True)
        if done.returncode:
            return f"{compiler} cannot build the sleeping call: {done.stderr.strip().splitlines()[0]}"
        handler = ctypes.CDLL(str(library)).JaxserveSleep
    jax.ffi.register_ffi_target(_TARGET_NAME, jax.ffi.pycapsule(handler), platform=_PLATFORM)
    return None


def make_engine(
    stages: int, num_layers: int, milliseconds: float, iterations: int, config: EngineConfig, bars: Bars
) -> Engine:
    """An engine in whose layers attention sleeps; an iteration sleeps `milliseconds` in all of them together."""
    rows = _plans(stages) * config.max_rows
    settings = dataclasses.replace(
        config,
        dtype="float32",
        stages=stages,
        replicas=1,
        layers_per_stage=None,
        scoring=False,
        buckets=(config.max_rows,),
        block_size=16,
        max_context=iterations + 16,
        slots=rows * (iterations + 32),
    )
    model = models.build(models.parse_config({**shapes.SHAPES["tiny"], "n_layer": num_layers}))
    (programs,), reason = startup.stage_programs(settings, model)
    backend = Sleeping(inner=programs[0].shape.backend, microseconds=round(1e3 * milliseconds / num_layers))
    shape = dataclasses.replace(programs[0].shape, backend=backend)
    programs = [dataclasses.replace(stage, shape=shape) for stage in programs]
    params = model.init(0, jnp.float32)
    return Engine(settings, startup.start(settings, [programs], reason, params, bars, 0.0), None)


def _plans(stages: int) -> int:
    """Plans of disjoint rows that are in flight."""
    return 1 if stages == 1 else stages + 1


def measure(engine: Engine, milliseconds: float, iterations: int) -> Overlap:
    """Decodes with every row of every plan in flight busy."""
    stages, records = len(engine.report.layers_per_stage), []
    plans = _plans(stages)
    sampling = SamplingParams(max_tokens=max(2, iterations // plans), temperature=0.0, ignore_eos=True)
    engine.record(records.append)
    for row in range(plans * engine.config.max_rows):
        engine.submit(Request(request_id=str(row), prompt=(1 + row % 100,), sampling=sampling), lambda _: None)
    while engine.step():
        pass
    ends = [record.finished_at for record in records]
    per_second = _WINDOW / statistics.median(end - start for start, end in zip(ends, ends[_WINDOW:], strict=False))
    return Overlap(stages=stages, iterations_per_second=per_second, asleep=per_second * 1e-3 * milliseconds / stages)


def run(
    counts: Sequence[int],
    milliseconds: float,
    iterations: int,
    config: EngineConfig,
    timeline: Path | None,
    out: Path,
    console: Console,
) -> int:
    """`jaxserve bench stages`: prints throughput by number of stages, against one stage, and writes JSON."""
    if (refusal := compile_sleep()) is not None:
        raise ValueError(refusal)
    counts = sorted({1, *counts})
    _make_devices(counts[-1])
    results = []
    with Bars() as bars:
        for count in counts:
            engine = make_engine(count, counts[-1], milliseconds, iterations, config, bars)
            with engine.timeline() as seen:
                results.append(measure(engine, milliseconds, iterations))
            if timeline is not None:  # the most stages come last
                seen.write(timeline)
    table = Table(title=f"iterations that sleep {milliseconds:g} ms in all stages together", title_justify="left")
    for column in ("stages", "iterations/s", "against one stage", "target", "", "each stage asleep"):
        table.add_column(column, justify="right")
    base = results[0].iterations_per_second
    for result in results:
        speed, target = result.iterations_per_second / base, TARGET * result.stages
        table.add_row(
            str(result.stages),
            f"{result.iterations_per_second:.1f}",
            f"{speed:.2f}x",
            "" if result.stages == 1 else f"{target:.2f}x",
            "" if result.stages == 1 else ("reached" if speed >= target else "missed"),
            f"{result.asleep:.0%}",
        )
    console.print(table)
    result = {"benchmark": "stages", "environment": machine.environment(), "results": results}
    report.write_json(out / "stages.json", result)
    console.print(f"written: {', '.join(map(str, [out / 'stages.json', *([timeline] if timeline else [])]))}")
    return 0


def _make_devices(count: int) -> None:
    """Divides the CPU into so many virtual devices, unless it is already."""
    with contextlib.suppress(RuntimeError):  # jax has begun, with whatever devices there are
        jax.config.update("jax_platforms", _PLATFORM)
        jax.config.update("jax_num_cpu_devices", count)
