from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FromWorker(_message.Message):
    __slots__ = ("hello", "reached", "vote", "completed", "heartbeat", "failed", "prepared", "join", "carried", "replica")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REACHED_FIELD_NUMBER: _ClassVar[int]
    VOTE_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    JOIN_FIELD_NUMBER: _ClassVar[int]
    CARRIED_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    reached: Reached
    vote: Vote
    completed: Completed
    heartbeat: Heartbeat
    failed: Failed
    prepared: Prepared
    join: Join
    carried: bytes
    replica: int
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., reached: _Optional[_Union[Reached, _Mapping]] = ..., vote: _Optional[_Union[Vote, _Mapping]] = ..., completed: _Optional[_Union[Completed, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., prepared: _Optional[_Union[Prepared, _Mapping]] = ..., join: _Optional[_Union[Join, _Mapping]] = ..., carried: _Optional[bytes] = ..., replica: _Optional[int] = ...) -> None: ...

class FromMaster(_message.Message):
    __slots__ = ("welcome", "agreed", "phase", "plan", "heartbeat", "stop", "prepare", "hold", "release", "challenge", "profile", "carried", "replica")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    AGREED_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    CARRIED_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    agreed: Agreed
    phase: Phase
    plan: Plan
    heartbeat: Heartbeat
    stop: Stop
    prepare: Prepare
    hold: Hold
    release: Release
    challenge: Challenge
    profile: bool
    carried: bytes
    replica: int
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., agreed: _Optional[_Union[Agreed, _Mapping]] = ..., phase: _Optional[_Union[Phase, _Mapping]] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., prepare: _Optional[_Union[Prepare, _Mapping]] = ..., hold: _Optional[_Union[Hold, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., challenge: _Optional[_Union[Challenge, _Mapping]] = ..., profile: _Optional[bool] = ..., carried: _Optional[bytes] = ..., replica: _Optional[int] = ...) -> None: ...

class Fact(_message.Message):
    __slots__ = ("field", "value")
    FIELD_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    field: str
    value: str
    def __init__(self, field: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    def __init__(self, nonce: _Optional[bytes] = ...) -> None: ...

class Challenge(_message.Message):
    __slots__ = ("nonce", "proof")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    proof: bytes
    def __init__(self, nonce: _Optional[bytes] = ..., proof: _Optional[bytes] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("host", "facts", "proof")
    HOST_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    host: int
    facts: _containers.RepeatedCompositeFieldContainer[Fact]
    proof: bytes
    def __init__(self, host: _Optional[int] = ..., facts: _Optional[_Iterable[_Union[Fact, _Mapping]]] = ..., proof: _Optional[bytes] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("refusal",)
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    refusal: str
    def __init__(self, refusal: _Optional[str] = ...) -> None: ...

class Reached(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: str
    def __init__(self, step: _Optional[str] = ...) -> None: ...

class Vote(_message.Message):
    __slots__ = ("about", "value", "problem")
    ABOUT_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    about: str
    value: int
    problem: str
    def __init__(self, about: _Optional[str] = ..., value: _Optional[int] = ..., problem: _Optional[str] = ...) -> None: ...

class Agreed(_message.Message):
    __slots__ = ("about", "value", "problem")
    ABOUT_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    about: str
    value: int
    problem: str
    def __init__(self, about: _Optional[str] = ..., value: _Optional[int] = ..., problem: _Optional[str] = ...) -> None: ...

class Phase(_message.Message):
    __slots__ = ("deadline_seconds",)
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    deadline_seconds: float
    def __init__(self, deadline_seconds: _Optional[float] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("oldest",)
    OLDEST_FIELD_NUMBER: _ClassVar[int]
    oldest: _containers.RepeatedCompositeFieldContainer[Unfinished]
    def __init__(self, oldest: _Optional[_Iterable[_Union[Unfinished, _Mapping]]] = ...) -> None: ...

class Unfinished(_message.Message):
    __slots__ = ("replica", "sequence", "stage")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    replica: int
    sequence: int
    stage: int
    def __init__(self, replica: _Optional[int] = ..., sequence: _Optional[int] = ..., stage: _Optional[int] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("sequence", "stage", "launching", "cause")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    LAUNCHING_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    stage: int
    launching: bool
    cause: str
    def __init__(self, sequence: _Optional[int] = ..., stage: _Optional[int] = ..., launching: _Optional[bool] = ..., cause: _Optional[str] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("cause",)
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    cause: str
    def __init__(self, cause: _Optional[str] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "text", "field")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: str
    field: str
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ..., field: _Optional[str] = ...) -> None: ...

class Prepare(_message.Message):
    __slots__ = ("number", "grammar")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    number: int
    grammar: Grammar
    def __init__(self, number: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ...) -> None: ...

class Prepared(_message.Message):
    __slots__ = ("number", "problem")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    number: int
    problem: str
    def __init__(self, number: _Optional[int] = ..., problem: _Optional[str] = ...) -> None: ...

class Hold(_message.Message):
    __slots__ = ("request_id", "sampling")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    sampling: Sampling
    def __init__(self, request_id: _Optional[str] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("sequence", "bucket", "admissions", "chunks", "table_changes", "sampler", "scoring", "drafts", "feeds", "block_copies", "pooled")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    ADMISSIONS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    TABLE_CHANGES_FIELD_NUMBER: _ClassVar[int]
    SAMPLER_FIELD_NUMBER: _ClassVar[int]
    SCORING_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    FEEDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COPIES_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    bucket: int
    admissions: _containers.RepeatedCompositeFieldContainer[Admission]
    chunks: Chunks
    table_changes: Changes
    sampler: int
    scoring: bool
    drafts: _containers.RepeatedScalarFieldContainer[int]
    feeds: int
    block_copies: _containers.RepeatedCompositeFieldContainer[Copy]
    pooled: Ranges
    def __init__(self, sequence: _Optional[int] = ..., bucket: _Optional[int] = ..., admissions: _Optional[_Iterable[_Union[Admission, _Mapping]]] = ..., chunks: _Optional[_Union[Chunks, _Mapping]] = ..., table_changes: _Optional[_Union[Changes, _Mapping]] = ..., sampler: _Optional[int] = ..., scoring: _Optional[bool] = ..., drafts: _Optional[_Iterable[int]] = ..., feeds: _Optional[int] = ..., block_copies: _Optional[_Iterable[_Union[Copy, _Mapping]]] = ..., pooled: _Optional[_Union[Ranges, _Mapping]] = ...) -> None: ...

class Ranges(_message.Message):
    __slots__ = ("first", "end")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    first: _containers.RepeatedScalarFieldContainer[int]
    end: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, first: _Optional[_Iterable[int]] = ..., end: _Optional[_Iterable[int]] = ...) -> None: ...

class Copy(_message.Message):
    __slots__ = ("source", "target")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    source: int
    target: int
    def __init__(self, source: _Optional[int] = ..., target: _Optional[int] = ...) -> None: ...

class Chunks(_message.Message):
    __slots__ = ("row", "start", "length", "samples")
    ROW_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    row: _containers.RepeatedScalarFieldContainer[int]
    start: _containers.RepeatedScalarFieldContainer[int]
    length: _containers.RepeatedScalarFieldContainer[int]
    samples: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, row: _Optional[_Iterable[int]] = ..., start: _Optional[_Iterable[int]] = ..., length: _Optional[_Iterable[int]] = ..., samples: _Optional[_Iterable[int]] = ...) -> None: ...

class Changes(_message.Message):
    __slots__ = ("row", "column", "block")
    ROW_FIELD_NUMBER: _ClassVar[int]
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    row: _containers.RepeatedScalarFieldContainer[int]
    column: _containers.RepeatedScalarFieldContainer[int]
    block: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, row: _Optional[_Iterable[int]] = ..., column: _Optional[_Iterable[int]] = ..., block: _Optional[_Iterable[int]] = ...) -> None: ...

class Admission(_message.Message):
    __slots__ = ("row", "request_id", "tokens", "prompt_length", "blocks", "sampling", "endings")
    ROW_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ENDINGS_FIELD_NUMBER: _ClassVar[int]
    row: int
    request_id: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    prompt_length: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    endings: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, row: _Optional[int] = ..., request_id: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ..., prompt_length: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., endings: _Optional[_Iterable[int]] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "sample_index", "bias_token", "bias", "min_tokens", "bad_words", "grammar", "ignore_eos", "typical_p")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    BIAS_TOKEN_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_P_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    sample_index: int
    bias_token: _containers.RepeatedScalarFieldContainer[int]
    bias: _containers.RepeatedScalarFieldContainer[float]
    min_tokens: int
    bad_words: _containers.RepeatedCompositeFieldContainer[Run]
    grammar: Grammar
    ignore_eos: bool
    typical_p: float
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., sample_index: _Optional[int] = ..., bias_token: _Optional[_Iterable[int]] = ..., bias: _Optional[_Iterable[float]] = ..., min_tokens: _Optional[int] = ..., bad_words: _Optional[_Iterable[_Union[Run, _Mapping]]] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., ignore_eos: _Optional[bool] = ..., typical_p: _Optional[float] = ...) -> None: ...

class Run(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class Completed(_message.Message):
    __slots__ = ("sequence", "result")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    result: Result
    def __init__(self, sequence: _Optional[int] = ..., result: _Optional[_Union[Result, _Mapping]] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("tokens", "logprobs", "top", "score_logprobs", "score_top", "pooled_width", "pooled")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    SCORE_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SCORE_TOP_FIELD_NUMBER: _ClassVar[int]
    POOLED_WIDTH_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    top: Table
    score_logprobs: _containers.RepeatedScalarFieldContainer[float]
    score_top: Table
    pooled_width: int
    pooled: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., top: _Optional[_Union[Table, _Mapping]] = ..., score_logprobs: _Optional[_Iterable[float]] = ..., score_top: _Optional[_Union[Table, _Mapping]] = ..., pooled_width: _Optional[int] = ..., pooled: _Optional[_Iterable[float]] = ...) -> None: ...

class Table(_message.Message):
    __slots__ = ("width", "ids", "logprobs")
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    width: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, width: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Recording(_message.Message):
    __slots__ = ("version", "reason", "fingerprint", "settings", "n_blocks", "n_rows", "rows", "entries", "replica")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    N_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    N_ROWS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    version: int
    reason: str
    fingerprint: str
    settings: str
    n_blocks: int
    n_rows: int
    rows: _containers.RepeatedCompositeFieldContainer[Row]
    entries: _containers.RepeatedCompositeFieldContainer[Entry]
    replica: int
    def __init__(self, version: _Optional[int] = ..., reason: _Optional[str] = ..., fingerprint: _Optional[str] = ..., settings: _Optional[str] = ..., n_blocks: _Optional[int] = ..., n_rows: _Optional[int] = ..., rows: _Optional[_Iterable[_Union[Row, _Mapping]]] = ..., entries: _Optional[_Iterable[_Union[Entry, _Mapping]]] = ..., replica: _Optional[int] = ...) -> None: ...

class Row(_message.Message):
    __slots__ = ("admission", "computed")
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    admission: Admission
    computed: int
    def __init__(self, admission: _Optional[_Union[Admission, _Mapping]] = ..., computed: _Optional[int] = ...) -> None: ...

class Entry(_message.Message):
    __slots__ = ("plan", "landed", "tokens", "logprobs", "seconds")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    LANDED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    plan: Plan
    landed: bool
    tokens: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    seconds: float
    def __init__(self, plan: _Optional[_Union[Plan, _Mapping]] = ..., landed: _Optional[bool] = ..., tokens: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., seconds: _Optional[float] = ...) -> None: ...
