"""A Hugging Face checkpoint directory: its files, what they hold, and one clear sentence where they are at fault.

Files are mapped, not read: a caller copies the slices it wants straight to where they belong and gives the pages back
(`StoredTensors.release`), so that reading costs no memory of its own.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxserve import models
from jaxserve.models.schema import ModelConfig

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_DTYPES: dict[str, np.dtype] = {
    code: np.dtype(kind)
    for code, kind in {
        "F64": np.float64,
        "F32": np.float32,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "I64": np.int64,
        "I32": np.int32,
        "I16": np.int16,
        "I8": np.int8,
        "U64": np.uint64,
        "U32": np.uint32,
        "U16": np.uint16,
        "U8": np.uint8,
        "BOOL": np.bool_,
    }.items()
}
_WEIGHTS = tuple(_DTYPES[code] for code in ("F64", "F32", "F16", "BF16"))
_MAX_HEADER = 100_000_000  # bytes, as the safetensors library has it
_SAMPLE = 4096  # bytes of a tensor that go into a fingerprint


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, in one sentence that names the file and the tensor at fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor in a file: where it lies, and its values as a view of the mapped file."""

    name: str
    file: Path
    values: np.ndarray

    @property
    def is_float(self) -> bool:
        """Whether the values can be weights."""
        return self.values.dtype in _WEIGHTS


class StoredTensors:
    """All tensors of a checkpoint directory, by name.

    Attributes:
      files: the safetensors files, in the order of their names.
    """

    def __init__(self, directory: Path) -> None:
        self.files, indexed = _find_files(directory)
        self._maps: dict[Path, mmap.mmap] = {}
        self._tensors: dict[str, StoredTensor] = {}
        self._headers: dict[Path, bytes] = {}
        for file in self.files:
            self._open(file)
        for name, file in indexed.items():
            if name not in self._tensors or self._tensors[name].file != file:
                raise CheckpointError(
                    f"{directory / _INDEX} says that {name!r} is in {file.name}, which has no such tensor"
                )

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def names(self) -> tuple[str, ...]:
        """Names of all tensors."""
        return tuple(self._tensors)

    def release(self, tensor: StoredTensor) -> None:
        """Gives back the memory of what was read of a tensor's file; it can be read again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._maps[tensor.file].madvise(mmap.MADV_DONTNEED)

    def fingerprint(self) -> str:
        """A digest of names, shapes, types, sizes and the beginning of each tensor's values."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{file.name} {file.stat().st_size}\n".encode() + self._headers[file])
        for name in sorted(self._tensors):
            values = self._tensors[name].values.reshape(-1)
            digest.update(values[: _SAMPLE // values.itemsize].tobytes())
        return digest.hexdigest()

    def _open(self, file: Path) -> None:
        try:
            size = file.stat().st_size
            with open(file, "rb") as stream:
                length = int.from_bytes(stream.read(8), "little") if size >= 8 else -1
                if not 0 < length <= min(size - 8, _MAX_HEADER):
                    raise CheckpointError(f"{file} is no safetensors file, or was cut short: its header is not whole")
                raw = stream.read(length)
                self._maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
        self._headers[file] = raw
        try:
            header = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{file} is no safetensors file: its header is no JSON ({error})") from None
        if not isinstance(header, dict):
            raise CheckpointError(f"{file} is no safetensors file: its header is no JSON object")
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if name in self._tensors:
                raise CheckpointError(f"tensor {name!r} is in both {self._tensors[name].file} and {file}")
            self._tensors[name] = StoredTensor(name=name, file=file, values=self._view(file, name, entry, 8 + length))

    def _view(self, file: Path, name: str, entry: Any, data_start: int) -> np.ndarray:
        try:
            code, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
            start, stop = (int(offset) for offset in entry["data_offsets"])
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(f"{file}: the header's entry for {name!r} is malformed") from None
        if code not in _DTYPES:
            raise CheckpointError(f"{file}: tensor {name!r} is stored as {code!r}, which is unknown")
        dtype, size = _DTYPES[code], math.prod(shape)
        if min(start, *shape, 0) < 0 or stop - start != size * dtype.itemsize:
            raise CheckpointError(
                f"{file}: the header's entry for {name!r} is malformed: {code}{list(shape)} is not {stop - start} bytes"
            )
        if data_start + stop > len(self._maps[file]):
            missing = data_start + stop - len(self._maps[file])
            raise CheckpointError(
                f"{file} was cut short: tensor {name!r} ends {missing} bytes beyond the end of the file"
            )
        return np.frombuffer(self._maps[file], dtype, size, data_start + start).reshape(shape)


def _find_files(directory: Path) -> tuple[tuple[Path, ...], dict[str, Path]]:
    """The safetensors files of a directory, and what the index (if there is one) says each tensor is in."""
    if (directory / _SINGLE).is_file():
        return (directory / _SINGLE,), {}
    index = directory / _INDEX
    if not index.is_file():
        pickles = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
        if pickles:
            raise CheckpointError(
                f"{directory} holds its weights as {pickles[0]}, which can run code when it is read; convert them to "
                "safetensors first (transformers: from_pretrained(DIR), then save_pretrained(OUT))"
            )
        raise CheckpointError(f"{directory} holds neither {_SINGLE} nor {_INDEX}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map of tensor names to files")
    indexed: dict[str, Path] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{index} puts {name!r} in {file!r}, which is no name of a file beside it")
        if not (directory / file).is_file():
            raise CheckpointError(f"{index} puts {name!r} in {file}, which does not exist")
        indexed[name] = directory / file
    return tuple(sorted(set(indexed.values()))), indexed


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError."""
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from None
    if not isinstance(entries, dict):
        raise CheckpointError(f"{file} holds no JSON object")
    return entries


def read_config(path: str | Path) -> ModelConfig:
    """The configuration of a checkpoint directory, checked against its tokenizer.

    generation_config.json, where there is one, has the last word on which tokens end a text, as in transformers.

    Raises:
      CheckpointError: no such directory, or one of its JSON files is missing, malformed or describes no model that is
        served here.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is no directory" if directory.exists() else f"{directory} does not exist")
    entries = read_json(directory / "config.json")
    generation = directory / "generation_config.json"
    if generation.is_file():
        ends = read_json(generation).get("eos_token_id")
        entries = entries if ends is None else entries | {"eos_token_id": ends}
    try:
        config = models.parse_config(entries)
    except ValueError as error:
        raise CheckpointError(f"{directory / 'config.json'}: {error}") from None
    _check_tokenizer(directory / "tokenizer.json", config)
    return config


def _check_tokenizer(file: Path, config: ModelConfig) -> None:
    if not file.is_file():
        return
    entries = read_json(file)
    try:
        vocabulary = entries["model"]["vocab"]
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        added = [token["id"] for token in entries.get("added_tokens") or []]
        largest = max([*ids, *added], default=-1)
    except (KeyError, TypeError):
        raise CheckpointError(f"{file} has no vocabulary of tokens and their ids") from None
    if largest >= config.vocab_size:
        raise CheckpointError(
            f"{file} has token ids up to {largest}, but the model's vocabulary ends at {config.vocab_size - 1} "
            "(vocab_size in config.json)"
        )
