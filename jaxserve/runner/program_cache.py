"""A disk cache of compiled programs: the next start neither traces nor compiles them.

jax's own compilation cache looks a program up by its text, so it must be traced and lowered first, which takes several
times as long as loading it. This cache looks a program up by what determines it: this code, library versions, machine,
devices and settings. It replaces jax's cache. A CPU program that jax has loaded from its own cache cannot be serialized
again (jax 0.10, 0.11).

A program for some devices of a CPU or GPU platform also serves others of them, so replicas compile once. On TPUs the
routes between devices depend on their places, and each set of devices has programs of its own.

Entries are pickles with machine code, in the format of `jax.experimental.serialize_executable`. Nothing is read from a
folder that other users may write to.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
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
import numpy as np
from jax._src.compiler import get_compile_options
from jax.experimental import serialize_executable

from jaxserve.runner import compilations

_log = logging.getLogger(__name__)

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("jaxserve", "sharding", "pallas_kernels")
_NOT_TRACED = tuple(f"jaxserve/{package}" for package in ("demo", "multihost", "planning", "simulate"))
_SUFFIXES = {".py", ".json", ".toml", ".cc", ".h"}
_VERSIONS = ("jax", "jaxlib", "flax", "numpy")
_NOT_COMPILED = re.compile("_cache|_address")  # jax settings that do not affect programs
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


class ProgramCache:
    """Compiled programs in a folder, or in memory for the other replicas of this start.

    Attributes:
      loaded / compiled: number of programs that were found, and that were not.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._held: dict[str, bytes] = {}  # without a folder
        self.loaded = self.compiled = 0

    def get(
        self, made_from: str, devices: Sequence[Any], compile_program: Callable[[], jax.stages.Compiled]
    ) -> jax.stages.Compiled:
        """Load a program, or compile and store it if it is missing or cannot be read.

        Args:
          made_from: all that determines the program besides code, versions and machine.
          devices: that it runs on, in the order of its mesh.
        """
        if not self._is_private():
            _log.warning("%s may be written to by others: no program is loaded from it, and none is kept", self._folder)
            self.compiled += 1
            return compile_program()
        key = f"{surroundings(devices[0])}\n{_places(devices)}\n{made_from}"
        name = hashlib.sha256(key.encode()).hexdigest()
        path = Path(name) if self._folder is None else self._folder / name
        try:
            program = _load(self._held[name] if self._folder is None else path.read_bytes(), devices)
        except (FileNotFoundError, KeyError):
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
            try:
                entry = pickle.dumps((_ids(devices), *serialize_executable.serialize(program)))
                if self._folder is None:
                    self._held[name] = entry
                else:
                    _write(path, entry)
            except Exception as problem:  # a full disk, or a platform whose programs cannot be kept: a start goes on
                _log.warning("a compiled program is not kept: %s", problem)
        return program

    def forget(self) -> None:
        """Free the programs that are held without a folder."""
        self._held.clear()

    def check_kept(self) -> None:
        """Raise ValueError if programs cannot be stored, for callers that only want to store them."""
        assert self._folder is not None
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryFile(dir=self._folder):
                pass
        except OSError as problem:
            raise ValueError(f"the compilation cache {self._folder} cannot be written to: {problem.strerror}") from None
        if not self._is_private():
            raise ValueError(f"the compilation cache {self._folder} may be written to by others: nothing is kept there")

    def _is_private(self) -> bool:
        """Whether only the current user can have written to the folder."""
        if self._folder is None:
            return True
        try:
            about = self._folder.stat()
        except FileNotFoundError:
            return True
        return about.st_uid == os.getuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _load(data: bytes, devices: Sequence[Any]) -> jax.stages.Compiled:
    compiled_for, *entry = pickle.loads(data)
    client = devices[0].client
    if compiled_for == _ids(devices):
        return serialize_executable.deserialize_and_load(*entry, backend=client, execution_devices=devices)
    serialized, in_tree, out_tree = entry
    program, arguments, no_kwargs = _Rebinding(serialized, compiled_for, devices).load()
    return jax.stages.Compiled(program.load(), [], in_tree.unflatten(arguments), out_tree, no_kwargs=no_kwargs)


class _Rebinding(serialize_executable._JaxPjrtUnpickler):
    """Reads a program for other devices of the same kind than it was compiled for.

    jax's own cache shares programs of GPUs in the same way.
    """

    def __init__(self, serialized: bytes, compiled_for: Sequence[int], devices: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(serialized), devices[0].client, devices)
        self.devices_by_id = dict(zip(compiled_for, devices, strict=True))

    def persistent_load(self, pid: Any) -> Any:
        if pid[0] != "exec":
            return super().persistent_load(pid)
        places = np.array([_ids(self.execution_devices)])
        options = get_compile_options(num_replicas=1, num_partitions=places.size, device_assignment=places)
        return self.backend.deserialize_executable(
            pid[1], executable_devices=self.execution_devices, compile_options=options
        )


def _ids(devices: Sequence[Any]) -> list[int]:
    return [device.id for device in devices]


def _places(devices: Sequence[Any]) -> list[int] | int:
    """What of the devices determines a program: places on TPUs, the number elsewhere."""
    return _ids(devices) if devices[0].platform == "tpu" else len(devices)


def _write(path: Path, entry: bytes) -> None:
    """Writes a temporary file and renames it: a file with its name is complete."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial.write_bytes(entry)
        partial.rename(path)
    except OSError:
        with contextlib.suppress(OSError):  # of a folder that cannot be written to at all
            partial.unlink(missing_ok=True)
        raise


def surroundings(device: Any) -> str:
    """What every program depends on: code, versions, flags and machine."""
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
    """The CPU's feature flags, all of which CPU programs use."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = ("model name", "flags", "Features")
    return f"{platform.machine()} {sorted({line for line in lines if line.startswith(named)})}"
