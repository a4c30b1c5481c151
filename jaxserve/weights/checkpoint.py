"""Reads a Hugging Face checkpoint directory: its configuration and its tensors.

Files are memory-mapped. A caller copies the slices that it needs to their destination and then frees the mapped pages
(`StoredTensors.release`), so reading needs no further memory.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxserve import models
from jaxserve.models.schema import ModelConfig
from jaxserve.text import tokenizer_files
from jaxserve.weights import quantized_checkpoint, safetensors_file, torch_file
from jaxserve.weights.stored import CheckpointError, StoredTensor

_READERS = {".safetensors": safetensors_file.read, ".bin": torch_file.read}
# File names of a checkpoint in one file, and of the index of one in several files. The first that exists is read.
_SINGLE = ("model.safetensors", "pytorch_model.bin")
_INDEX = tuple(f"{name}.index.json" for name in _SINGLE)
_OTHER_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.safetensors")
_AHEAD = 4 * 2**20  # bytes that are read at once
_SAMPLE = 4096  # bytes of a tensor that go into a fingerprint


class StoredTensors:
    """All tensors of a checkpoint directory, by name.

    Attributes:
      files: the files that hold them, sorted by name.
    """

    def __init__(self, directory: Path) -> None:
        self.files, index, indexed = _find_files(directory)
        self._maps: dict[Path, mmap.mmap] = {}
        self._headers: dict[Path, bytes] = {}
        self._stored: dict[str, StoredTensor] = {}  # as stored, before dequantization
        for file in self.files:
            self._open(file)
        for name, file in indexed.items():
            if name not in self._stored or self._stored[name].file != file:
                raise CheckpointError(f"{index} says that {name!r} is in {file.name}, which has no such tensor")
        quantization = quantized_checkpoint.parse(directory / "config.json", _config(directory))
        self._tensors = quantized_checkpoint.decode(self._stored, quantization)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def names(self) -> tuple[str, ...]:
        """TensorNames of all tensors."""
        return tuple(self._tensors)

    def release(self, tensor: StoredTensor) -> None:
        """Frees the memory of the mapped files of a tensor; the tensor can still be read."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for file in tensor.files:
                self._maps[file].madvise(mmap.MADV_DONTNEED)

    def fingerprint(self) -> str:
        """A digest of file names and sizes, headers, and the first values of each tensor."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{file.name} {file.stat().st_size}\n".encode() + self._headers[file])
        for name in sorted(self._stored):
            values = self._stored[name].values
            digest.update(values.flat[: _SAMPLE // values.itemsize].tobytes())
        return digest.hexdigest()

    def _open(self, file: Path) -> None:
        try:
            with open(file, "rb") as stream:
                if file.stat().st_size == 0:
                    raise CheckpointError(f"{file} is empty")
                content = self._maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
        self._headers[file], tensors = _READERS[file.suffix](file, content)
        for tensor in tensors:
            if tensor.name in self._stored:
                other = self._stored[tensor.name].file
                raise CheckpointError(f"tensor {tensor.name!r} is in both {other} and {file}")
            self._stored[tensor.name] = tensor


def read_ahead(path: str | Path, *, until: Callable[[], bool]) -> None:
    """Reads the tensors' files into the system's cache, until `until()` or all are there."""
    buffer = bytearray(_AHEAD)
    try:
        for file in _find_files(Path(path))[0]:
            with file.open("rb", buffering=0) as opened:
                while not until() and opened.readinto(buffer):
                    pass
    except (CheckpointError, OSError):
        pass  # loading reports it; or the files are Orbax's


def _find_files(directory: Path) -> tuple[tuple[Path, ...], Path, dict[str, Path]]:
    """(files with tensors, index file, file of each tensor according to the index if it exists)."""
    for single, index in zip(_SINGLE, _INDEX, strict=True):
        if (directory / single).is_file():
            return (directory / single,), directory / index, {}
        if (directory / index).is_file():
            break
    else:
        others = sorted(path.name for pattern in _OTHER_PATTERNS for path in directory.glob(pattern))
        found = f"; {others[0]} is not supported" if others else ""
        raise CheckpointError(
            f"{directory} holds neither {' nor '.join(_SINGLE)}, nor the index of several such files{found}"
        )
    index = directory / index
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map of tensor names to files")
    indexed: dict[str, Path] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{index} puts {name!r} in {file!r}, which is not the name of a file beside it")
        if Path(file).suffix not in _READERS:
            raise CheckpointError(f"{index} puts {name!r} in {file}, which is not a {' or '.join(_READERS)} file")
        if not (directory / file).is_file():
            raise CheckpointError(f"{index} puts {name!r} in {file}, which does not exist")
        indexed[name] = directory / file
    return tuple(sorted(set(indexed.values()))), index, indexed


def _config(directory: Path) -> dict[str, Any]:
    """Reads config.json; a missing quantization_config comes from NVIDIA's hf_quant_config.json."""
    entries, other = read_json(directory / "config.json"), directory / "hf_quant_config.json"
    if entries.get("quantization_config") or not other.is_file():
        return entries
    found = read_json(other).get("quantization")
    return entries | {"quantization_config": {"quant_method": "modelopt", **(found if isinstance(found, dict) else {})}}


def read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON object from a file. Raises CheckpointError."""
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from None
    if not isinstance(entries, dict):
        raise CheckpointError(f"{file} does not hold a JSON object")
    return entries


def read_config(path: str | Path) -> ModelConfig:
    """Reads the configuration of a checkpoint directory and checks it against the tokenizer.

    As in transformers, the eos_token_id of generation_config.json overrides that of config.json. The tokenizer's
    eos_token is added to them, because chat templates end messages with it.

    Raises:
      CheckpointError: the directory does not exist, or one of its JSON files is missing or malformed, or the model is
        not supported.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointError(f"{directory} {'is not a directory' if directory.exists() else 'does not exist'}")
    entries = _config(directory)
    quantization = quantized_checkpoint.parse(directory / "config.json", entries)
    generation = directory / "generation_config.json"
    if generation.is_file():
        ends = read_json(generation).get("eos_token_id")
        entries = entries if ends is None else entries | {"eos_token_id": ends}
    try:
        config = dataclasses.replace(models.parse_config(entries), stored=quantization.kept)
    except ValueError as error:
        raise CheckpointError(f"{directory / 'config.json'}: {error}") from None
    try:
        file, ids = tokenizer_files.vocabulary(directory)
        special = tokenizer_files.special_tokens(directory)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    largest = max(ids.values(), default=-1)
    if largest >= config.vocab_size:
        raise CheckpointError(
            f"{file} has token ids up to {largest}, but the model's vocabulary ends at {config.vocab_size - 1} "
            "(vocab_size in config.json)"
        )
    eos, bos = (ids.get(special.get(name, "")) for name in ("eos_token", "bos_token"))
    if eos is not None and eos not in config.eos_token_ids:
        config = dataclasses.replace(config, eos_token_ids=(*config.eos_token_ids, eos))
    if bos is not None and entries.get("bos_token_id") is None:
        config = dataclasses.replace(config, bos_token_id=bos)
    return config
