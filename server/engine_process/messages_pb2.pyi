from jaxserve.multihost import control_pb2 as _control_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FromFront(_message.Message):
    __slots__ = ("start", "submit", "abort", "stop", "profile")
    START_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    start: bytes
    submit: Request
    abort: str
    stop: Empty
    profile: bool
    def __init__(self, start: _Optional[bytes] = ..., submit: _Optional[_Union[Request, _Mapping]] = ..., abort: _Optional[str] = ..., stop: _Optional[_Union[Empty, _Mapping]] = ..., profile: _Optional[bool] = ...) -> None: ...

class FromEngine(_message.Message):
    __slots__ = ("progress", "ready", "refused", "iterations", "failed", "alive_seconds", "prefix_changes", "profiled")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    ITERATIONS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    ALIVE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CHANGES_FIELD_NUMBER: _ClassVar[int]
    PROFILED_FIELD_NUMBER: _ClassVar[int]
    progress: Progress
    ready: bytes
    refused: str
    iterations: Iterations
    failed: str
    alive_seconds: float
    prefix_changes: PrefixChanges
    profiled: Profiled
    def __init__(self, progress: _Optional[_Union[Progress, _Mapping]] = ..., ready: _Optional[bytes] = ..., refused: _Optional[str] = ..., iterations: _Optional[_Union[Iterations, _Mapping]] = ..., failed: _Optional[str] = ..., alive_seconds: _Optional[float] = ..., prefix_changes: _Optional[_Union[PrefixChanges, _Mapping]] = ..., profiled: _Optional[_Union[Profiled, _Mapping]] = ...) -> None: ...

class Empty(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Profiled(_message.Message):
    __slots__ = ("problem", "is_state")
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    IS_STATE_FIELD_NUMBER: _ClassVar[int]
    problem: str
    is_state: bool
    def __init__(self, problem: _Optional[str] = ..., is_state: _Optional[bool] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("what", "done", "total")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    what: str
    done: int
    total: int
    def __init__(self, what: _Optional[str] = ..., done: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("request_id", "prompt", "sampling", "max_tokens", "stop", "stop_token_ids", "bad_words", "ignore_eos", "logprobs", "prompt_logprobs", "priority", "arrival", "cache_salt", "fork_of", "tenant", "share", "pooling")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    FORK_OF_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt: _containers.RepeatedScalarFieldContainer[int]
    sampling: _control_pb2.Sampling
    max_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    ignore_eos: bool
    logprobs: int
    prompt_logprobs: int
    priority: int
    arrival: float
    cache_salt: str
    fork_of: str
    tenant: str
    share: float
    pooling: str
    def __init__(self, request_id: _Optional[str] = ..., prompt: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_control_pb2.Sampling, _Mapping]] = ..., max_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[str]] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., priority: _Optional[int] = ..., arrival: _Optional[float] = ..., cache_salt: _Optional[str] = ..., fork_of: _Optional[str] = ..., tenant: _Optional[str] = ..., share: _Optional[float] = ..., pooling: _Optional[str] = ...) -> None: ...

class Iterations(_message.Message):
    __slots__ = ("received", "loads", "tokens", "others", "records")
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    received: int
    loads: _containers.RepeatedCompositeFieldContainer[Load]
    tokens: TokenColumns
    others: _containers.RepeatedCompositeFieldContainer[Event]
    records: _containers.RepeatedCompositeFieldContainer[Record]
    def __init__(self, received: _Optional[int] = ..., loads: _Optional[_Iterable[_Union[Load, _Mapping]]] = ..., tokens: _Optional[_Union[TokenColumns, _Mapping]] = ..., others: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., records: _Optional[_Iterable[_Union[Record, _Mapping]]] = ...) -> None: ...

class TokenColumns(_message.Message):
    __slots__ = ("request_id", "count", "cached_tokens", "token", "logprob")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    request_id: _containers.RepeatedScalarFieldContainer[str]
    count: _containers.RepeatedScalarFieldContainer[int]
    cached_tokens: _containers.RepeatedScalarFieldContainer[int]
    token: _containers.RepeatedScalarFieldContainer[int]
    logprob: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, request_id: _Optional[_Iterable[str]] = ..., count: _Optional[_Iterable[int]] = ..., cached_tokens: _Optional[_Iterable[int]] = ..., token: _Optional[_Iterable[int]] = ..., logprob: _Optional[_Iterable[float]] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("index", "request_id", "token_ids", "logprobs", "top_logprobs", "prompt_logprobs", "finish_reason", "cached_tokens", "started", "error", "field", "embedding")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    index: int
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    top_logprobs: _containers.RepeatedCompositeFieldContainer[Alternatives]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[Score]
    finish_reason: str
    cached_tokens: int
    started: float
    error: str
    field: str
    embedding: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, index: _Optional[int] = ..., request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., top_logprobs: _Optional[_Iterable[_Union[Alternatives, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[Score, _Mapping]]] = ..., finish_reason: _Optional[str] = ..., cached_tokens: _Optional[int] = ..., started: _Optional[float] = ..., error: _Optional[str] = ..., field: _Optional[str] = ..., embedding: _Optional[_Iterable[float]] = ...) -> None: ...

class Alternatives(_message.Message):
    __slots__ = ("token_ids", "logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Score(_message.Message):
    __slots__ = ("logprob", "alternatives")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    alternatives: Alternatives
    def __init__(self, logprob: _Optional[float] = ..., alternatives: _Optional[_Union[Alternatives, _Mapping]] = ...) -> None: ...

class Record(_message.Message):
    __slots__ = ("replica", "plan", "decodes", "prompt_tokens", "waiting", "schedule_s", "pack_s", "launch_s", "wait_s", "complete_s", "finished_at")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    DECODES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_S_FIELD_NUMBER: _ClassVar[int]
    PACK_S_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_S_FIELD_NUMBER: _ClassVar[int]
    FINISHED_AT_FIELD_NUMBER: _ClassVar[int]
    replica: int
    plan: _control_pb2.Plan
    decodes: int
    prompt_tokens: int
    waiting: int
    schedule_s: float
    pack_s: float
    launch_s: float
    wait_s: float
    complete_s: float
    finished_at: float
    def __init__(self, replica: _Optional[int] = ..., plan: _Optional[_Union[_control_pb2.Plan, _Mapping]] = ..., decodes: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., waiting: _Optional[int] = ..., schedule_s: _Optional[float] = ..., pack_s: _Optional[float] = ..., launch_s: _Optional[float] = ..., wait_s: _Optional[float] = ..., complete_s: _Optional[float] = ..., finished_at: _Optional[float] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running", "waiting", "waiting_tokens", "outstanding_tokens", "slots_used", "slots_cached", "slots_total", "iterations", "prompt_tokens", "generated_tokens", "cached_tokens", "preemptions", "drafted_tokens", "accepted_tokens", "host_seconds", "bucket_seconds", "padding_seconds", "compiled_after_ready", "expected_seconds", "prefill_tokens", "strangers", "host_cache_bytes", "host_cache_blocks", "host_cache_stored", "host_cache_loaded", "host_cache_corrupt")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_USED_FIELD_NUMBER: _ClassVar[int]
    SLOTS_CACHED_FIELD_NUMBER: _ClassVar[int]
    SLOTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    ITERATIONS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BUCKET_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PADDING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMPILED_AFTER_READY_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STRANGERS_FIELD_NUMBER: _ClassVar[int]
    HOST_CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_CACHE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOST_CACHE_STORED_FIELD_NUMBER: _ClassVar[int]
    HOST_CACHE_LOADED_FIELD_NUMBER: _ClassVar[int]
    HOST_CACHE_CORRUPT_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    waiting_tokens: int
    outstanding_tokens: int
    slots_used: int
    slots_cached: int
    slots_total: int
    iterations: int
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    preemptions: int
    drafted_tokens: int
    accepted_tokens: int
    host_seconds: float
    bucket_seconds: float
    padding_seconds: float
    compiled_after_ready: int
    expected_seconds: float
    prefill_tokens: int
    strangers: int
    host_cache_bytes: int
    host_cache_blocks: int
    host_cache_stored: int
    host_cache_loaded: int
    host_cache_corrupt: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., outstanding_tokens: _Optional[int] = ..., slots_used: _Optional[int] = ..., slots_cached: _Optional[int] = ..., slots_total: _Optional[int] = ..., iterations: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., host_seconds: _Optional[float] = ..., bucket_seconds: _Optional[float] = ..., padding_seconds: _Optional[float] = ..., compiled_after_ready: _Optional[int] = ..., expected_seconds: _Optional[float] = ..., prefill_tokens: _Optional[int] = ..., strangers: _Optional[int] = ..., host_cache_bytes: _Optional[int] = ..., host_cache_blocks: _Optional[int] = ..., host_cache_stored: _Optional[int] = ..., host_cache_loaded: _Optional[int] = ..., host_cache_corrupt: _Optional[int] = ...) -> None: ...

class PrefixChanges(_message.Message):
    __slots__ = ("changes",)
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    changes: _containers.RepeatedCompositeFieldContainer[PrefixChange]
    def __init__(self, changes: _Optional[_Iterable[_Union[PrefixChange, _Mapping]]] = ...) -> None: ...

class PrefixChange(_message.Message):
    __slots__ = ("stored", "removed", "cleared")
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    stored: BlocksStored
    removed: BlocksRemoved
    cleared: Empty
    def __init__(self, stored: _Optional[_Union[BlocksStored, _Mapping]] = ..., removed: _Optional[_Union[BlocksRemoved, _Mapping]] = ..., cleared: _Optional[_Union[Empty, _Mapping]] = ...) -> None: ...

class BlocksStored(_message.Message):
    __slots__ = ("digests", "parent", "tokens", "block_size", "salt")
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    parent: bytes
    tokens: _containers.RepeatedScalarFieldContainer[int]
    block_size: int
    salt: str
    def __init__(self, digests: _Optional[_Iterable[bytes]] = ..., parent: _Optional[bytes] = ..., tokens: _Optional[_Iterable[int]] = ..., block_size: _Optional[int] = ..., salt: _Optional[str] = ...) -> None: ...

class BlocksRemoved(_message.Message):
    __slots__ = ("digests",)
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, digests: _Optional[_Iterable[bytes]] = ...) -> None: ...
