"""pytorch_model.bin: its tensors are read, and nothing that it names is called."""

import os
import pickle
import re
import shutil
import struct
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxserve import weights
from jaxserve.weights import CheckpointError
from jaxserve.weights.checkpoint import StoredTensors
from tests.jaxserve.weights.directories import (
    BLOOM,
    GPT2,
    OPT,
    ORDERED_DICT,
    pickled,
    pickled_tensor,
    shard,
    to_torch,
    torch_file,
    write,
)

OF_TORCH = Path(__file__).parents[2] / "fixtures" / "formats" / "pytorch_model.bin"
NUMBERS = np.arange(24, dtype=np.float32).reshape(4, 6)
TENSOR = pickled_tensor("0", 24, 0, (4, 6), (6, 1))
START, END = b"\x80\x02" + ORDERED_DICT + b"(", b"u."


def read(folder: Path) -> StoredTensors:
    (folder / "config.json").write_text("{}")
    return StoredTensors(folder)


def refusal(folder: Path, pickle: bytes, storages: dict[str, bytes] | None = None, **settings) -> str:
    torch_file(folder / "pytorch_model.bin", pickle, storages or {"0": bytes(96)}, **settings)
    with pytest.raises(CheckpointError) as caught:
        read(folder)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None
    return str(caught.value).removeprefix(str(folder / "pytorch_model.bin"))


def one(tensor: bytes) -> bytes:
    return START + pickled("a") + tensor + END


def test_a_file_of_torch_is_read(tmp_path):
    shutil.copy(OF_TORCH, tmp_path)
    tensors = read(tmp_path)
    expected = {
        "float32": NUMBERS,
        "transposed": NUMBERS.T,
        "part": NUMBERS[1:3, 2:5],
        "repeated": np.broadcast_to(NUMBERS[0], (3, 6)),
        "parameter": NUMBERS,
        "float64": NUMBERS.astype(np.float64),
        "float16": NUMBERS.astype(np.float16),
        "bfloat16": NUMBERS.astype(ml_dtypes.bfloat16),
        "float8_e4m3fn": (NUMBERS % 16).astype(ml_dtypes.float8_e4m3fn),
        "int64": NUMBERS.astype(np.int64),
        "uint8": NUMBERS.astype(np.uint8),
        "uint16": NUMBERS.astype(np.uint16),
        "bool": NUMBERS > 3,
        "scalar": np.float32(3),
        "empty": np.empty((0, 4), np.float32),
    }
    assert set(tensors.names()) == expected.keys()
    for name, values in expected.items():
        assert tensors[name].dtype == values.dtype, name
        np.testing.assert_array_equal(tensors[name].values, values, err_msg=name)
        assert values.size == 0 or not tensors[name].values.flags.writeable
    assert len(tensors.fingerprint()) == 64


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("entries", [BLOOM, GPT2, OPT], ids=lambda e: e["model_type"])
def test_a_model_is_read_from_it(tmp_path, entries, stored):
    model, params = write(tmp_path, entries, stored)
    to_torch(tmp_path / "model.safetensors")
    ours = weights.load(tmp_path, model, jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, ours, params)


def test_shards_are_read_and_their_index_checked(tmp_path):
    model, params = write(tmp_path)
    shard(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        to_torch(file)
    index = (tmp_path / "model.safetensors.index.json").read_text()
    (tmp_path / "model.safetensors.index.json").unlink()
    index = re.sub(r'"(model-\S+)\.safetensors"', r'"pytorch_\1.bin"', index)
    (tmp_path / "pytorch_model.bin.index.json").write_text(index)
    jax.tree.map(np.testing.assert_array_equal, weights.load(tmp_path, model, jnp.float32), params)
    (tmp_path / "pytorch_model.bin.index.json").write_text(index.replace("00003.bin", "00003.pth"))
    with pytest.raises(CheckpointError, match=r"pth, which is not a .safetensors or \.bin file"):
        StoredTensors(tmp_path)


def test_safetensors_come_first(tmp_path):
    write(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"no checkpoint")
    assert [file.name for file in StoredTensors(tmp_path).files] == ["model.safetensors"]


def test_sizes_beyond_32_bits_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 10)  # so that these small ones are written as such
    file = tmp_path / "pytorch_model.bin"
    torch_file(file, one(TENSOR), {"0": NUMBERS.tobytes()})
    data = file.read_bytes()
    data = data[:-10] + b"\xff" * 8 + data[-2:]
    file.write_bytes(data)
    np.testing.assert_array_equal(read(tmp_path)["a"].values, NUMBERS)
    place = data[-34:-26]
    for wrong in (data.replace(b"PK\x06\x06", b"PK\x06\x05"), data.replace(place, b"\xff" * 8)):
        file.write_bytes(wrong)
        with pytest.raises(CheckpointError, match=r"has a damaged zip directory|is truncated"):
            read(tmp_path)


def test_a_member_that_is_said_to_be_longer_is_refused(tmp_path):
    file = tmp_path / "pytorch_model.bin"
    torch_file(file, one(pickled_tensor("0", 10**6, 0, (4, 6), (6, 1))), {"0": bytes(96)})
    file.write_bytes(file.read_bytes().replace(struct.pack("<II", 96, 96), struct.pack("<II", 2**30, 2**30)))
    with pytest.raises(CheckpointError, match=r"member 'archive/data/0' is incomplete"):
        read(tmp_path)


class Runs:
    """Pickled, a call of a function."""

    def __init__(self, function, *arguments) -> None:
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize(
    ("hostile", "named"),
    [
        (Runs(os.system, "touch FOLDER/ran"), "posix system"),
        (Runs(eval, "open('FOLDER/ran', 'w')"), r"\S+ eval"),
        (Runs(getattr, "a", "b"), r"\S+ getattr"),
        (Runs(np.dtype, "f4"), "numpy dtype"),
    ],
)
def test_a_pickle_runs_nothing(tmp_path, hostile, named, protocol):
    function, arguments = hostile.call
    hostile = Runs(function, *(each.replace("FOLDER", str(tmp_path)) for each in arguments))
    message = refusal(tmp_path, pickle.dumps({"a": hostile}, protocol=protocol))
    assert re.match(rf" names '{named}' in its pickle, which may run code; only tensors are read", message), message
    assert not (tmp_path / "ran").exists()


FLOATS = b"ctorch\nFloatStorage\n"
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
DEEP = b")" + b"\x85" * 200_000  # a tuple so deep that its hash would overflow the stack
MALFORMED = {
    "attributes of a constructor": one(REBUILD + b"}" + pickled("__defaults__") + b"NsbN"),
    "a call of a storage type": one(FLOATS + b")R"),
    "a call of a tensor": one(TENSOR + b")R"),
    "too few arguments": one(REBUILD + b")R"),
    "attributes of a tensor": one(TENSOR + b"}b"),
    "a pair of one": b"\x80\x02" + TENSOR + b"\x86.",
    "an item of a text": one(pickled("b") + b"K\x01a"),
    "a size that is no whole number": one(TENSOR.replace(pickled(4), b"G" + struct.pack(">d", 4))),
    "a storage of no dtype": one(TENSOR.replace(FLOATS, b"ctorch.storage\nUntypedStorage\n")),
    "entries in the call of a dictionary": one(ORDERED_DICT[:-2] + b"](" + DEEP + b"K\x01\x86e\x85R"),
    "a persistent id that is no tuple": one(b"K\x01Q"),
    "a persistent id of another kind": one(b"(" + pickled("module") + FLOATS + pickled(("0", "cpu", 4))[1:] + b"Q"),
    "a key that is a tuple": START + b")" + TENSOR + END,
    "a key that is a deep tuple": START + DEEP + TENSOR + END,
    "items of a tensor": START + TENSOR + pickled("a") + TENSOR + b"sss.",
    "an entry of the memo that is not there": one(b"j\xff\xff\xff\x7f"),
    "an empty stack": b"\x80\x02.",
    "an end without a mark": b"\x80\x02}u.",
    "no end": START,
    "no pickle": b"\xff\xfe",
    "a text cut short": one(b"X\xff\xff\xff\x7fa"),
    "a negative size": one(pickled_tensor("0", 24, 0, (-4, 6), (6, 1))),
    "a negative stride": one(pickled_tensor("0", 24, 23, (4, 6), (-6, -1))),
    "strides of other axes": one(pickled_tensor("0", 24, 0, (4, 6), (1,))),
    "more axes than there can be": one(pickled_tensor("0", 24, 0, (1,) * 33, (1,) * 33)),
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_pickle_is_refused(tmp_path, data):
    assert re.match(r" has a malformed pickle \(\w+\)$", refusal(tmp_path, data))


BEYOND = r"has tensor 'a' of shape \[\d+, \d+\], which goes beyond its storage"
REFUSED = {
    "a list": (b"\x80\x02]" + TENSOR + b"a.", r"holds a list where a dictionary of tensors is expected"),
    "a number by name": (one(b"K\x01"), r"has under 'a' a int; only tensors by name are read"),
    "tensors below a name": (
        one(START[2:] + pickled("b") + TENSOR + b"u"),
        r"has under 'a' a dict; only tensors by name are read",
    ),
    "a deep list": (one(b"]" * 50_000 + b"a" * 49_999), r"has under 'a' a list"),
    "an opcode that tensors do not need": (b"\x80\x02(K\x01i__main__\nf\n.", r"has a pickle with INST, which"),
    "an extension": (one(b"\x82\x01"), r"has a pickle with EXT1, which"),
    "a storage that is not there": (one(pickled_tensor("7", 24, 0, (4, 6), (6, 1))), r"has no 'archive/data/7'"),
    "a storage of less": (one(pickled_tensor("0", 25, 0, (4, 6), (6, 1))), r"has 96 bytes in the storage of"),
    "an offset beyond it": (
        one(pickled_tensor("0", 24, 1, (4, 6), (6, 1))),
        BEYOND,
    ),
    "a stride beyond it": (one(pickled_tensor("0", 24, 0, (4, 6), (7, 1))), BEYOND),
    "a shape beyond all memory": (
        one(pickled_tensor("0", 24, 0, (2**40, 2**40), (0, 0))),
        BEYOND,
    ),
}


@pytest.mark.parametrize(("data", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_tensors_by_name_is_refused(tmp_path, data, message):
    assert re.match(" " + message, refusal(tmp_path, data))


def test_a_pickle_takes_bounded_time_and_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxserve.weights.torch_pickle._MAX_OPCODES", 1000)
    assert "more than 1000 operations" in refusal(tmp_path, one(b"]" * 2000))
    monkeypatch.setattr("jaxserve.weights.torch_pickle.MAX_BYTES", 1000)
    assert "has a pickle of 1001 bytes; at most 1000" in refusal(tmp_path, one(pickled("a" * 2000)))


def test_a_compressed_archive_is_refused(tmp_path):
    message = refusal(tmp_path, one(TENSOR), compression=zipfile.ZIP_DEFLATED)
    assert "has a compressed or encrypted member 'archive/data.pkl'" in message


def change(old: bytes, new: bytes):
    return lambda data: data.replace(old, new)


DAMAGED = {
    "cut in its directory": (lambda data: data[:-30], r"is truncated: a zip archive's directory is missing"),
    "cut in a storage": (
        lambda data: data[:200] + data[-500:],
        r"is incomplete|damaged zip directory|zip directory of",
    ),
    "no archive": (lambda _: b"weights" * 9, r"is not a file of torch.save: it is not a zip archive"),
    "of a few bytes": (lambda _: b"PK", r"is not a file of torch.save: it is not a zip archive"),
    "empty": (lambda _: b"", r"is empty"),
    "of torch before 1.6": (
        lambda _: b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.",
        r"is in the format of torch before 1\.6; convert it with torch: torch\.save\(torch\.load\(",
    ),
    "another archive": (change(b"data.pkl", b"docu.txt"), r"is not a file of torch.save: it has no data.pkl"),
    "big-endian": (change(b"little", b"bigbig"), r"has numbers in byte order b'bigbig'; only little is read"),
    "a directory elsewhere": (lambda data: data[:-6] + b"\xff\xff\xff\x7f\0\0", r"has a zip directory of"),
    "members that are no members": (
        lambda data: data[:4] + data[4:].replace(b"PK\x03\x04", b"PK\x03\x05"),
        r"is truncated, or is damaged: member 'archive/byteorder' is incomplete",
    ),
    "half an entry": (lambda data: data[:-10] + b"\x14" + data[-9:], r"is truncated, or is not a file of torch.save"),
    "entries that are no entries": (change(b"PK\x01\x02", b"PK\x01\x03"), r"has a damaged zip directory"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_refused(tmp_path, damage, message):
    file = tmp_path / "pytorch_model.bin"
    torch_file(file, one(TENSOR), {"0": NUMBERS.tobytes()})
    read(tmp_path)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CheckpointError, match=message) as caught:
        StoredTensors(tmp_path)
    assert str(caught.value).startswith(str(file))
