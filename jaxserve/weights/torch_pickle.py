"""Reads the pickle of a torch file as data, without running code.

Python's unpickler imports and calls any function that a pickle names. This module interprets the opcodes itself, maps
the names of a few torch constructors to its own functions and refuses everything else, so no pickle runs code. Time
and memory are bounded by limits on the pickle's length and the number of opcodes; nothing recurses.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

MAX_BYTES = 32 * 2**20
_MAX_OPCODES = 5_000_000  # about 150,000 tensors
_MAX_AXES = 32
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")


class RefusedFile(ValueError):
    """A file is refused. The message continues a sentence that starts with the file's name."""


class TensorView(NamedTuple):
    """A tensor as a strided view of a storage.

    Attributes:
      storage: name of the storage within the file.
      length: number of entries of the storage.
      offset / shape / strides: in entries.
    """

    storage: str
    dtype: np.dtype
    length: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Storage(NamedTuple):
    name: str
    dtype: np.dtype | None  # None for untyped bytes
    length: int


class _StorageType(NamedTuple):
    dtype: np.dtype | None


class _Constructor(NamedTuple):
    make: Callable[..., Any]


def read(data: bytes) -> dict[str, TensorView]:
    """Reads the tensors of a pickled dictionary, by name. Raises RefusedFile."""
    if len(data) > MAX_BYTES:
        raise RefusedFile(f"has a pickle of {len(data)} bytes; at most {MAX_BYTES} are read")
    machine = _Machine()
    try:
        for count, (opcode, arg, _) in enumerate(pickletools.genops(data)):
            if opcode.name == "STOP":
                break
            if opcode.name not in _STEPS:
                raise RefusedFile(f"has a pickle with {opcode.name}, which tensors do not need")
            if count == _MAX_OPCODES:
                raise RefusedFile(f"has a pickle of more than {_MAX_OPCODES} operations")
            _STEPS[opcode.name](machine, arg)
        found = machine.stack.pop()
    except RefusedFile:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, struct.error) as problem:
        raise RefusedFile(f"has a malformed pickle ({type(problem).__name__})") from None
    if type(found) is not dict:
        raise RefusedFile(f"holds a {type(found).__name__.lower()} where a dictionary of tensors is expected")
    for name, value in found.items():
        if type(name) is not str or type(value) is not TensorView:
            raise RefusedFile(f"has under {str(name)[:80]!r} a {type(value).__name__}; only tensors by name are read")
    return found


class _Machine:
    """The stack and memo of an unpickling machine; `outer` holds the stacks below each mark."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def mark(self, _: None) -> None:
        self.outer.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.outer.pop()
        return items

    def put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def get(self, index: int) -> None:
        self.push(self.memo[index])

    def pop(self, count: int) -> tuple[Any, ...]:
        if count > len(self.stack):
            raise IndexError
        items = tuple(self.stack[len(self.stack) - count :])
        del self.stack[len(self.stack) - count :]
        return items

    def extend(self, items: list[Any]) -> None:
        self.stack[-1].extend(items)  # only lists have extend here

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or any(type(key) not in (str, int) for key in items[::2]):
            raise TypeError
        target.update(zip(items[::2], items[1::2], strict=True))

    def look_up(self, name: str) -> None:
        if name not in _KNOWN:
            raise RefusedFile(
                f"names {name[:200]!r} in its pickle, which may run code; only tensors are read. If you trust the "
                "file, convert it to safetensors (transformers: from_pretrained(DIR), then save_pretrained(OUT))"
            )
        self.push(_KNOWN[name])

    def call(self) -> None:
        constructor, arguments = self.pop(2)
        self.push(constructor.make(*arguments))  # only a _Constructor has make

    def persistent(self) -> None:
        kind, storage, name, _device, length = self.stack.pop()
        if kind != "storage" or type(storage) is not _StorageType or type(name) is not str:
            raise TypeError
        self.push(_Storage(name, storage.dtype, _counts((length,))[0]))

    def build(self) -> None:
        """Ignores the attributes of a dictionary, where torch keeps versions of modules."""
        target, _ = self.pop(2)
        if type(target) is not dict:
            raise TypeError
        self.push(target)


def _counts(values: Any) -> tuple[int, ...]:
    if type(values) is not tuple or any(type(value) is not int or not 0 <= value < 2**62 for value in values):
        raise ValueError
    return values


def _dictionary() -> dict[str, Any]:
    """collections.OrderedDict; later opcodes add its entries."""
    return {}


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> TensorView:
    """torch._utils._rebuild_tensor_v2; the arguments after the strides are gradients and hooks."""
    if type(storage) is not _Storage or storage.dtype is None:
        raise TypeError
    if len(_counts(shape)) != len(_counts(strides)) or len(shape) > _MAX_AXES:
        raise ValueError
    return TensorView(storage.name, storage.dtype, storage.length, _counts((offset,))[0], shape, strides)


def _tensor_of_bytes(
    storage: Any, offset: Any, shape: Any, strides: Any, _gradient: Any, _hooks: Any, dtype: Any, *_: Any
) -> TensorView:
    """torch._utils._rebuild_tensor_v3, for an untyped storage with a dtype."""
    if type(storage) is not _Storage or storage.dtype is not None or not isinstance(dtype, np.dtype):
        raise TypeError
    typed = storage._replace(dtype=dtype, length=storage.length // dtype.itemsize)
    return _tensor(typed, offset, shape, strides)


def _parameter(tensor: Any, *_: Any) -> Any:
    """torch._utils._rebuild_parameter."""
    return tensor


_KNOWN: dict[str, Any] = {
    "collections OrderedDict": _Constructor(_dictionary),
    "torch._utils _rebuild_tensor_v2": _Constructor(_tensor),
    "torch._utils _rebuild_tensor_v3": _Constructor(_tensor_of_bytes),
    "torch._utils _rebuild_parameter": _Constructor(_parameter),
    "torch.storage UntypedStorage": _StorageType(None),
    "torch DoubleStorage": _StorageType(np.dtype(np.float64)),
    "torch FloatStorage": _StorageType(np.dtype(np.float32)),
    "torch HalfStorage": _StorageType(np.dtype(np.float16)),
    "torch BFloat16Storage": _StorageType(np.dtype(ml_dtypes.bfloat16)),
    "torch LongStorage": _StorageType(np.dtype(np.int64)),
    "torch IntStorage": _StorageType(np.dtype(np.int32)),
    "torch ShortStorage": _StorageType(np.dtype(np.int16)),
    "torch CharStorage": _StorageType(np.dtype(np.int8)),
    "torch ByteStorage": _StorageType(np.dtype(np.uint8)),
    "torch BoolStorage": _StorageType(np.dtype(np.bool_)),
} | {f"torch {name}": np.dtype(name) for name in (*_FLOAT8, "uint16", "uint32", "uint64")}

# Opcode name -> function of the machine and the opcode's argument.
_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": lambda machine, _: None,
    "FRAME": lambda machine, _: None,
    "MARK": _Machine.mark,
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"), _Machine.push),
    "BINFLOAT": _Machine.push,
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.since_mark())),
    "TUPLE1": lambda machine, _: machine.push(machine.pop(1)),
    "TUPLE2": lambda machine, _: machine.push(machine.pop(2)),
    "TUPLE3": lambda machine, _: machine.push(machine.pop(3)),
    "APPEND": lambda machine, _: machine.extend(list(machine.pop(1))),
    "APPENDS": lambda machine, _: machine.extend(machine.since_mark()),
    "SETITEM": lambda machine, _: machine.set_items(list(machine.pop(2))),
    "SETITEMS": lambda machine, _: machine.set_items(machine.since_mark()),
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "MEMOIZE": lambda machine, _: machine.put(len(machine.memo)),
    "BINGET": _Machine.get,
    "LONG_BINGET": _Machine.get,
    "GLOBAL": _Machine.look_up,
    "STACK_GLOBAL": lambda machine, _: machine.look_up(" ".join(machine.pop(2))),
    "REDUCE": lambda machine, _: machine.call(),
    "BINPERSID": lambda machine, _: machine.persistent(),
    "BUILD": lambda machine, _: machine.build(),
}
