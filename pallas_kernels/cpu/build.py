"""Compiles the native CPU kernels, caches them per user, and registers them with XLA.

A wheel may bring them compiled (`make wheel`).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

ATTENTION = "jaxserve_ragged_attention"
PRODUCT_RUNS, PRODUCT_RUNS_MANY = "jaxserve_runs_product", "jaxserve_runs_product_many"
PRODUCT, PRODUCT_MANY, PRODUCT_FLOAT = "jaxserve_product", "jaxserve_product_many", "jaxserve_product_float"
PRODUCT_INT4, PRODUCT_INT8 = "jaxserve_product_int4", "jaxserve_product_int8"
_SYMBOLS = {
    ATTENTION: "JaxserveRaggedAttention",
    PRODUCT: "JaxserveProduct",
    PRODUCT_RUNS: "JaxserveRunsProduct",
    PRODUCT_MANY: "JaxserveProductMany",
    PRODUCT_FLOAT: "JaxserveProductFloat",
    PRODUCT_INT4: "JaxserveProductInt4",
    PRODUCT_INT8: "JaxserveProductInt8",
}
_SYMBOLS_BF16 = {PRODUCT_RUNS_MANY: "JaxserveRunsProductMany"}  # at the last of the levels below
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fPIC")
_PORTABLE = ("-static-libstdc++", "-static-libgcc", "-s")  # for systems with another C++ library
# Levels of the x86-64 ABI and the CPU flags that each adds, in Linux's names; the last level is our own.
_LEVELS = {
    "x86-64": set(),
    "x86-64-v3": {"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"},
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v4-bf16": {"avx512_bf16", "avx512_vnni"},
}
_HERE = Path(__file__).parent

_lock = threading.Lock()
_outcome: list[str | None] = []


def refusal() -> str | None:
    """Compile, load and register the calls, once per process. Returns why that failed, or None."""
    with _lock:
        if not _outcome:
            _outcome.append(_load())
        return _outcome[0]


def _load() -> str | None:
    try:
        library = _open_shipped() or ctypes.CDLL(str(compiled(cache_folder())))
    except (OSError, ValueError) as error:
        return str(error)
    for target, symbol in _calls().items():
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, symbol)), platform="cpu")
    return None


def _calls() -> dict[str, str]:
    """The library's calls at this machine's level: target -> symbol."""
    return _SYMBOLS | (_SYMBOLS_BF16 if level().endswith("bf16") else {})


def is_shipped() -> bool:
    """Whether the package brings a library that was made from these sources."""
    return _shipped(level()).exists()


def _open_shipped() -> ctypes.CDLL | None:
    """The library of the package, if it is of these sources and fits this system."""
    try:
        return ctypes.CDLL(str(_shipped(level()))) if is_shipped() else None
    except OSError:  # of an older C library
        return None


def cache_folder() -> Path:
    """The folder that keeps compiled libraries."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxserve" / "native"


@functools.cache
def level() -> str:
    """The local CPU's level of the x86-64 ABI, or the name of another kind of machine."""
    machine = platform.machine()
    if machine not in ("x86_64", "AMD64"):
        return machine
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    reached = machine
    for name, added in _LEVELS.items():
        if not added <= flags:
            break
        reached = name
    return reached


def _options(level: str) -> list[str]:
    """The compiler options for a level."""
    if level not in _LEVELS:
        return []
    base = level.removesuffix("-bf16")
    return [f"-march={base}", *(["-mavx512bf16", "-mavx512vnni"] if level != base else [])]


def compiled(folder: Path) -> Path:
    """The library for the local CPU; compiles it if the folder does not have it.

    Its name contains the CPU's level and a hash of its sources, so machines and versions can share a folder. Several
    processes may call this at once; each sees the whole library or none.

    Raises:
      ValueError: there is no compiler, or it fails.
      OSError: the folder cannot be written.
    """
    command, library = _wanted(folder)
    if library.exists():
        return library
    _compile(command, library)
    return library


def _compile(command: list[str], library: Path) -> None:
    """Compiles a library; it is there whole or not at all. Raises ValueError or OSError."""
    folder = library.parent
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as workshop, ThreadPoolExecutor(os.cpu_count()) as compilers:
        include = ["-isystem", jax.ffi.include_dir(), "-c"]
        objects = {str(path): str(Path(workshop, f"{path.stem}.o")) for path in _sources(".cc")}
        list(compilers.map(lambda source: _run([*command, *include, "-o", objects[source], source]), objects))
        made = Path(workshop, library.name)
        _run([*command, "-shared", "-o", str(made), *objects.values()])
        made.replace(library)


def is_compiled() -> bool:
    """Whether `refusal` needs no compiler: the library exists, or nothing can make it."""
    try:
        return bool(_outcome) or is_shipped() or _wanted(cache_folder())[1].exists()
    except ValueError:
        return True


def _wanted(folder: Path) -> tuple[list[str], Path]:
    """The compiler's command and the library it makes; ValueError without a compiler."""
    target = level()
    command = _command(target)
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True).stdout
    return command, folder / f"native-{target}-{_digest(' '.join(command), version)}.so"


def _shipped(target: str) -> Path:
    """Where the package has the library for a level, if it ships one."""
    return _HERE / "prebuilt" / f"native-{target}-{_digest()}.so"


def ship(machine: str = "") -> None:
    """Compiles what a wheel brings, for this kind of machine or another whose compiler is here.

    Args:
      machine: its name, such as aarch64; empty for this machine's.

    Raises:
      ValueError: there is no compiler, or it fails.
      OSError: the folder cannot be written.
    """
    shutil.rmtree(_HERE / "prebuilt", ignore_errors=True)
    own = platform.machine()
    machine = machine or own
    targets = [each for each in _LEVELS if each != "x86-64"] if machine in ("x86_64", "AMD64") else [machine]
    for target in targets:
        _compile([*_command(target, _COMPILERS if machine == own else _cross(machine)), *_PORTABLE], _shipped(target))


def _cross(machine: str) -> tuple[str, ...]:
    """The compilers for another kind of machine, as Linux distributions name them."""
    return (f"{machine.replace('_', '-')}-linux-gnu-g++",)


def _command(target: str, compilers: Sequence[str] = _COMPILERS) -> list[str]:
    """The compiler with its flags for a level. Raises ValueError without a compiler."""
    compiler = next(filter(None, map(shutil.which, compilers)), None)
    if compiler is None:
        raise ValueError(f"no C++ compiler ({', '.join(compilers)}) to build it with")
    return [compiler, *_FLAGS, *_options(target)]


def _digest(*more: str) -> str:
    """A name for the sources, XLA's headers and `more`."""
    sources = [path.read_text() for path in _sources(".cc", ".h")]
    parts = [*more, *sources, *_headers(Path(jax.ffi.include_dir()))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _run(command: list[str]) -> None:
    """Runs a compiler. Raises ValueError with its first error."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise ValueError(f"{command[0]} cannot build it: {lines[0].strip() if lines else 'no reason given'}")


def _sources(*suffixes: str) -> list[Path]:
    return sorted(path for path in _HERE.iterdir() if path.suffix in suffixes)


def _headers(include: Path) -> list[str]:
    return [path.read_text() for path in sorted(include.glob("xla/ffi/api/*.h"))]
