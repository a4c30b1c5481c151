"""What every test shares: eight virtual devices, and programs that are traced and compiled once in a run."""

import contextlib
import functools
import gc
import importlib.util
import itertools
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

# Before jax starts: a worker for each core takes one core, and so do the processes that tests start. The other flags
# make compilation cheaper; jaxlib 0.11 has no emitters to choose from.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_cpu_multi_thread_eigen=false --xla_cpu_parallel_codegen_split_count=1"
    + " --xla_cpu_use_fusion_emitters=false" * metadata.version("jaxlib").startswith("0.10."),
)

# Before Triton is imported: its kernels are compiled where jax can use GPUs, or compile for them, else interpreted.
os.environ.setdefault(
    "TRITON_INTERPRET", str(int(not any(map(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin")))))
)

import jax
import pytest
from jax._src import lru_cache
from jaxtyping import install_import_hook

from jaxserve.runner import cache_folder

# Rewritten tests are kept, whatever the environment says: every worker would rewrite all of them anew, 7 s of a core.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell ignores Ctrl-C for commands in the background, and so would the processes that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

_COMPILED = Path(__file__).parents[1] / ".pytest_cache" / "compiled"
_MOST_COMPILED = 2 * 2**30  # bytes; a run fills 70 MB

jax.config.update("jax_num_cpu_devices", 8)
# The compilers of accelerators are in environments of their own. What they compile without a device is compiled as
# users compile it, and cannot be read from a cache.
if not any(map(importlib.util.find_spec, ("libtpu", "jax_cuda12_plugin"))):
    # Half of a first run would be compilation, in the processes that tests start as well.
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    jax.config.update("jax_disable_most_optimizations", os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1")
    # All workers share this cache, and later runs find what earlier ones compiled.
    jax.config.update("jax_compilation_cache_dir", str(_COMPILED))
    jax.config.update("jax_compilation_cache_max_size", _MOST_COMPILED)
    # With a bound jax keeps its files from being read while they are written. But it would also read the whole folder
    # before it adds a program, 0.2 s of a core for each of 2,000; `pytest_configure` looks once in a run instead.
    lru_cache.LRUCache._evict_if_needed = lambda self, *, additional_size=0: None
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

_MOST_MAPPINGS = 20_000  # of a process's memory; Linux allows 65,530
_TESTS_BETWEEN = 8  # two counts of them in a module
_finished = itertools.count(1)

# Their functions hold arguments and results to their annotations where CHECK_SHAPES is set, as in `make test`.
SHAPE_CHECKED = (
    "jaxserve.models",
    "jaxserve.sampling.sampler",
    "jaxserve.sampling.selection",
    "jaxserve.sampling.scoring",
    "jaxserve.runner.batch",
    "jaxserve.runner.cpu_products",
    "jaxserve.runner.matmul",
    "pallas_kernels.tpu",
    "pallas_kernels.xla",
    "pallas_kernels.cpu",
    "pallas_kernels.cpu.product",
    "pallas_kernels.gpu",
    "pallas_kernels.int8",
)
if os.environ.get("CHECK_SHAPES"):
    install_import_hook(SHAPE_CHECKED, "beartype.beartype")


@pytest.fixture(scope="module")
def compiled_at_start() -> Iterator[None]:
    """Engines compile before they are ready, as for users: for tests that see how long an iteration takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedPrograms, "lazy", False)
        yield


@pytest.fixture
def optimized() -> Iterator[None]:
    """Compiles as users do, for tests of what the compiler makes."""
    earlier = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", earlier)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, metavar="N", help="repeat the random inputs of a failed conformance test")


def pytest_configure(config: pytest.Config) -> None:
    """Forgets what earlier runs compiled once it takes more than `_MOST_COMPILED`."""
    if hasattr(config, "workerinput") or not _COMPILED.is_dir():
        return
    if sum(path.stat().st_size for path in _COMPILED.iterdir()) > _MOST_COMPILED:
        shutil.rmtree(_COMPILED)


def pytest_collection_finish() -> None:
    """Collections of garbage leave out what has been imported, and are rarer: 5 to 10% of the time of tracing."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


@pytest.fixture(scope="session", autouse=True)
def _keep_out_of_your_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Engines and Triton keep what they compile in a folder of the run, not in the user's cache."""
    folder = tmp_path_factory.mktemp("programs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_folder, "default", lambda: folder)
        patch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))
        yield


class LazyProgram:
    """A program that is compiled when it is first called: a test runs few of those that an engine has."""

    # Compilations are counted by thread, and the engine's own must not have any.
    _compiler = ThreadPoolExecutor(1)

    def __init__(self, compile_program: Callable[[], jax.stages.Compiled]) -> None:
        self._compile = compile_program

    @functools.cached_property
    def program(self) -> jax.stages.Compiled:
        return self._compiler.submit(self._compile).result()

    def __call__(self, *args: Any) -> Any:
        return self.program(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.program, name)


class SharedPrograms:
    """The programs of all engines in this process: a `ProgramCache` in memory."""

    loaded = 0
    lazy = True

    def __init__(self) -> None:
        self._programs: dict[Any, LazyProgram] = {}

    def get(self, made_from: str, devices: Sequence[Any], compile_program: Callable[[], Any]) -> LazyProgram:
        optimized = not jax.config.read("jax_disable_most_optimizations")
        key = (made_from, tuple(device.id for device in devices), optimized)
        program = self._programs.setdefault(key, LazyProgram(compile_program))
        if not self.lazy:
            assert program.program is not None
        return program

    def forget(self) -> None:
        """Keeps them for other engines."""

    def clear(self) -> None:
        """Forgets all programs; engines that are alive keep theirs."""
        self._programs.clear()


def given_costs(pipeline: Any, n_blocks: int, progress: Any) -> Any:
    """Bucket costs that are the same in every run, in place of `measure_buckets`: plans depend on them."""
    from jaxserve.runner.measure import Measured
    from jaxserve.scheduler.buckets import BucketCost

    del n_blocks, progress
    sizes = pipeline.stages[0].buckets
    costs = [BucketCost(size=size, compile_seconds=0.0, milliseconds=1.0 + size / 16) for size in sizes]
    return Measured(costs, 0.0)


@pytest.fixture(scope="session", autouse=True)
def _share_programs() -> Iterator[SharedPrograms]:
    """Engines share the programs of this process, unless they keep them on disk, and their bucket costs are given."""
    from jaxserve import startup

    own, shared = startup.program_cache, SharedPrograms()

    def program_cache(config: Any) -> Any:
        return shared if cache_folder.of(config.compilation_cache) is None else own(config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(startup, "program_cache", program_cache)
        patch.setattr(startup, "measure_buckets", given_costs)
        yield shared


def _forget_programs(shared: SharedPrograms, most_mappings: int) -> None:
    """Forgets what was compiled if this process has more memory mappings.

    A program on a CPU takes some tens of them, and a process with too many crashes when it loads another.
    """
    with contextlib.suppress(OSError), open("/proc/self/maps", "rb") as mappings:
        if sum(1 for _ in mappings) > most_mappings:
            shared.clear()
            jax.clear_caches()
            gc.collect()


@pytest.fixture(scope="module", autouse=True)
def _few_mappings(_share_programs: SharedPrograms) -> Iterator[None]:
    """Starts a module with few mappings."""
    yield
    _forget_programs(_share_programs, _MOST_MAPPINGS)


@pytest.fixture(autouse=True)
def _few_mappings_in_a_module(_share_programs: SharedPrograms) -> Iterator[None]:
    """Some modules have hundreds of tests."""
    yield
    if next(_finished) % _TESTS_BETWEEN == 0:
        _forget_programs(_share_programs, 2 * _MOST_MAPPINGS)
