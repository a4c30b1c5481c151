"""Compiled programs kept between starts, so that the next start neither traces nor compiles them.

jax's own compilation cache finds a program by its text, for which it has to be traced and lowered first: several times
the work of loading it. Here a program is found by what it is made from: this code, the versions of what it calls, the
machine, the devices, and the settings that it was asked for with. So this cache stands in the place of jax's; what jax
loads from its own cannot be kept here, for a program for the CPU that was loaded is no longer whole (jax 0.10, 0.11).

Entries are pickles (jax's own form of a program) that hold machine code: nothing is read from a folder that others
than its owner may write to.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import pickle
import platform
import re
import stat
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from jaxserve.runner import compilations

_log = logging.getLogger(__name__)

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("jaxserve", "sharding", "pallas_kernels")
_NOT_TRACED = tuple(f"jaxserve/{package}" for package in ("demo", "multihost", "plan", "simulate"))
_SUFFIXES = {".py", ".json", ".toml", ".cc", ".h"}
_VERSIONS = ("jax", "jaxlib", "flax", "numpy")
_NOT_COMPILED = re.compile("_cache|_address")  # settings of jax that programs do not depend on
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


class ProgramCache:
    """A folder of compiled programs.

    Attributes:
      loaded / compiled: programs that were found in it, and those that were not.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.loaded = self.compiled = 0

    def get(
        self, made_from: str, devices: Sequence[Any], compile_program: Callable[[], jax.stages.Compiled]
    ) -> jax.stages.Compiled:
        """The program made from this; compiled and kept where it is not there, or cannot be read.

        Args:
          made_from: everything that decides what the program is, but for the code and what surrounds it.
          devices: that it runs on, in the order of its mesh.
        """
        if not self._is_private():
            _log.warning("%s may be written to by others: no program is loaded from it, and none is kept", self._folder)
            self.compiled += 1
            return compile_program()
        path = self._folder / hashlib.sha256(f"{surroundings(devices[0])}\n{made_from}".encode()).hexdigest()
        try:
            program = _load(path, devices)
        except FileNotFoundError:
            pass
        except Exception as problem:  # whatever a broken file or another runtime makes of it
            _log.warning("%s cannot be loaded (%s); the program is compiled anew", path, problem)
        else:
            self.loaded += 1
            return program
        before = compilations.loaded_by_jax()
        program = compile_program()
        self.compiled += 1
        if compilations.loaded_by_jax() == before:
            _keep(path, program)
        return program

    def check_kept(self) -> None:
        """Raises ValueError where no program would be kept: for whoever wants nothing else."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryFile(dir=self._folder):
                pass
        except OSError as problem:
            raise ValueError(f"the compilation cache {self._folder} cannot be written to: {problem.strerror}") from None
        if not self._is_private():
            raise ValueError(f"the compilation cache {self._folder} may be written to by others: nothing is kept there")

    def _is_private(self) -> bool:
        """Whether nobody but the one who runs this could have put a program into the folder."""
        try:
            about = self._folder.stat()
        except FileNotFoundError:
            return True
        return about.st_uid == os.getuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _load(path: Path, devices: Sequence[Any]) -> jax.stages.Compiled:
    entry = pickle.loads(path.read_bytes())
    client = devices[0].client
    return serialize_executable.deserialize_and_load(*entry, backend=client, execution_devices=devices)


def _keep(path: Path, program: jax.stages.Compiled) -> None:
    """Writes a program aside and renames it, so that what bears the name is whole."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        entry = pickle.dumps(serialize_executable.serialize(program))
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial.write_bytes(entry)
        partial.rename(path)
    except Exception as problem:  # a full disk, or a platform whose programs cannot be kept: neither stops a start
        _log.warning("a compiled program is not kept: %s", problem)
        with contextlib.suppress(OSError):  # of a folder that cannot be written to at all
            partial.unlink(missing_ok=True)


def surroundings(device: Any) -> str:
    """What every program depends on besides its own arguments: code, versions, flags, and the machine it runs on."""
    return "\n".join(
        (
            _code(),
            sys.version,
            *(f"{name} {metadata.version(name)}" for name in _VERSIONS),
            *(f"{name}={os.environ.get(name)}" for name in _FLAGS),
            str({name: value for name, value in jax.config.values.items() if not _NOT_COMPILED.search(name)}),
            device.platform,
            device.device_kind,
            device.client.platform_version,
            _processor() if device.platform == "cpu" else "",
        )
    )


@functools.cache
def _code() -> str:
    """A digest of the files that programs are traced from."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        for path in sorted((_ROOT / package).rglob("*")):
            name = path.relative_to(_ROOT).as_posix()
            if path.suffix in _SUFFIXES and not name.startswith(_NOT_TRACED):
                digest.update(f"{name} {path.stat().st_size}\n".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _processor() -> str:
    """What the processor can do: programs for a CPU use all of it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = ("model name", "flags", "Features")
    return f"{platform.machine()} {sorted({line for line in lines if line.startswith(named)})}"
