"""The native call: compiled where a C++ compiler is found, kept in the user's cache folder, loaded and made known to
XLA."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import jax

TARGET = "jaxserve_ragged_attention"
_SYMBOL = "JaxserveRaggedAttention"
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC")
# Levels of the x86-64 ABI, best first, with what the kernels use of each: as Linux names it and as CPUs have it.
_LEVELS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"},
}
_HERE = Path(__file__).parent

_lock = threading.Lock()
_outcome: list[str | None] = []


def refusal() -> str | None:
    """Compiles, loads and registers the call, once in a process; why that cannot be, in words, or None."""
    with _lock:
        if not _outcome:
            _outcome.append(_load())
        return _outcome[0]


def _load() -> str | None:
    try:
        library = ctypes.CDLL(str(compiled(cache_folder())))
    except (OSError, ValueError) as error:
        return str(error)
    handler = jax.ffi.pycapsule(getattr(library, _SYMBOL))
    jax.ffi.register_ffi_target(TARGET, handler, platform="cpu")
    return None


def cache_folder() -> Path:
    """Where what was compiled is kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxserve" / "native"


def level() -> str:
    """The instructions that the CPU here has: a level of the x86-64 ABI, or the name of another kind of machine."""
    machine = platform.machine()
    if machine not in ("x86_64", "AMD64"):
        return machine
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    needed: set[str] = set()
    found = "x86-64"
    for name, features in reversed(_LEVELS.items()):
        needed |= features
        if needed <= flags:
            found = name
    return found


def compiled(folder: Path) -> Path:
    """The library for the CPU here, compiled if the folder does not hold it yet.

    Its name carries the CPU's level, and all that it was made of: a folder may be shared by machines and by versions.
    Any number of processes may ask at once; each sees it whole or not at all.

    Raises:
      ValueError: there is no compiler, or it fails.
      OSError: the folder cannot be written.
    """
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise ValueError(f"no C++ compiler ({', '.join(_COMPILERS)}) to build it with")
    target = level()
    command = [compiler, *_FLAGS, *([f"-march={target}"] if target in ("x86-64", *_LEVELS) else [])]
    include = Path(jax.ffi.include_dir())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    parts = [" ".join(command), version, *(path.read_text() for path in _sources()), *_headers(include)]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    library = folder / f"attention-{target}-{digest}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as workshop:
        made = Path(workshop, library.name)
        done = subprocess.run(
            [*command, "-isystem", str(include), "-o", str(made), str(_HERE / "attention.cc")],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            raise ValueError(f"{compiler} cannot build it: {lines[0].strip() if lines else 'no reason given'}")
        made.replace(library)
    return library


def _sources() -> list[Path]:
    return sorted(path for path in _HERE.iterdir() if path.suffix in (".cc", ".h"))


def _headers(include: Path) -> list[str]:
    return [path.read_text() for path in sorted(include.glob("xla/ffi/api/*.h"))]
