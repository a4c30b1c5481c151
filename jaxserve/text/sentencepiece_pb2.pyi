from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SentencepieceModel(_message.Message):
    __slots__ = ("pieces", "trainer", "normalizer")
    PIECES_FIELD_NUMBER: _ClassVar[int]
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    NORMALIZER_FIELD_NUMBER: _ClassVar[int]
    pieces: _containers.RepeatedCompositeFieldContainer[Piece]
    trainer: Trainer
    normalizer: Normalizer
    def __init__(self, pieces: _Optional[_Iterable[_Union[Piece, _Mapping]]] = ..., trainer: _Optional[_Union[Trainer, _Mapping]] = ..., normalizer: _Optional[_Union[Normalizer, _Mapping]] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("text", "score", "kind")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    text: str
    score: float
    kind: int
    def __init__(self, text: _Optional[str] = ..., score: _Optional[float] = ..., kind: _Optional[int] = ...) -> None: ...

class Trainer(_message.Message):
    __slots__ = ("kind", "space_after", "byte_fallback", "unknown")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SPACE_AFTER_FIELD_NUMBER: _ClassVar[int]
    BYTE_FALLBACK_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    kind: int
    space_after: bool
    byte_fallback: bool
    unknown: int
    def __init__(self, kind: _Optional[int] = ..., space_after: _Optional[bool] = ..., byte_fallback: _Optional[bool] = ..., unknown: _Optional[int] = ...) -> None: ...

class Normalizer(_message.Message):
    __slots__ = ("charsmap", "dummy_prefix", "single_spaces", "escapes_spaces")
    CHARSMAP_FIELD_NUMBER: _ClassVar[int]
    DUMMY_PREFIX_FIELD_NUMBER: _ClassVar[int]
    SINGLE_SPACES_FIELD_NUMBER: _ClassVar[int]
    ESCAPES_SPACES_FIELD_NUMBER: _ClassVar[int]
    charsmap: bytes
    dummy_prefix: bool
    single_spaces: bool
    escapes_spaces: bool
    def __init__(self, charsmap: _Optional[bytes] = ..., dummy_prefix: _Optional[bool] = ..., single_spaces: _Optional[bool] = ..., escapes_spaces: _Optional[bool] = ...) -> None: ...
