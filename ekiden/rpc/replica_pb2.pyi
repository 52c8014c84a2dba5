from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RankLayout(_message.Message):
    __slots__ = ("tp_rank", "pp_rank", "head_start", "head_stop", "layer_start", "layer_stop")
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    PP_RANK_FIELD_NUMBER: _ClassVar[int]
    HEAD_START_FIELD_NUMBER: _ClassVar[int]
    HEAD_STOP_FIELD_NUMBER: _ClassVar[int]
    LAYER_START_FIELD_NUMBER: _ClassVar[int]
    LAYER_STOP_FIELD_NUMBER: _ClassVar[int]
    tp_rank: int
    pp_rank: int
    head_start: int
    head_stop: int
    layer_start: int
    layer_stop: int
    def __init__(self, tp_rank: _Optional[int] = ..., pp_rank: _Optional[int] = ..., head_start: _Optional[int] = ..., head_stop: _Optional[int] = ..., layer_start: _Optional[int] = ..., layer_stop: _Optional[int] = ...) -> None: ...

class KvLayout(_message.Message):
    __slots__ = ("kind", "dtype", "block_size", "num_layers", "num_kv_heads", "head_dim", "tp", "pp", "ranks")
    KIND_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    TP_FIELD_NUMBER: _ClassVar[int]
    PP_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    dtype: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    tp: int
    pp: int
    ranks: _containers.RepeatedCompositeFieldContainer[RankLayout]
    def __init__(self, kind: _Optional[str] = ..., dtype: _Optional[str] = ..., block_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., tp: _Optional[int] = ..., pp: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[RankLayout, _Mapping]]] = ...) -> None: ...

class ReplicaDescription(_message.Message):
    __slots__ = ("replica_id", "role", "epoch", "version", "wire_version", "model", "model_fingerprint", "tokenizer_fingerprint", "granule", "hash_scheme", "kv", "wires", "endpoints", "max_model_len", "vocab_size", "dtype")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    GRANULE_FIELD_NUMBER: _ClassVar[int]
    HASH_SCHEME_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    WIRES_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    role: str
    epoch: int
    version: str
    wire_version: int
    model: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    granule: int
    hash_scheme: str
    kv: KvLayout
    wires: _containers.RepeatedScalarFieldContainer[str]
    endpoints: _containers.RepeatedScalarFieldContainer[bytes]
    max_model_len: int
    vocab_size: int
    dtype: str
    def __init__(self, replica_id: _Optional[str] = ..., role: _Optional[str] = ..., epoch: _Optional[int] = ..., version: _Optional[str] = ..., wire_version: _Optional[int] = ..., model: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., tokenizer_fingerprint: _Optional[str] = ..., granule: _Optional[int] = ..., hash_scheme: _Optional[str] = ..., kv: _Optional[_Union[KvLayout, _Mapping]] = ..., wires: _Optional[_Iterable[str]] = ..., endpoints: _Optional[_Iterable[bytes]] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., dtype: _Optional[str] = ...) -> None: ...

class AuditRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReadKvRequest(_message.Message):
    __slots__ = ("tokens", "salt")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    salt: str
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., salt: _Optional[str] = ...) -> None: ...

class KvBlock(_message.Message):
    __slots__ = ("rank", "index", "data")
    RANK_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    rank: int
    index: int
    data: bytes
    def __init__(self, rank: _Optional[int] = ..., index: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class AuditReply(_message.Message):
    __slots__ = ("total", "free", "cached", "held", "requests", "sessions", "running", "waiting", "waiting_tokens", "replica_id", "role", "rss_bytes", "stage_idle", "collective_share", "states")
    class StatesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    STAGE_IDLE_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_SHARE_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    total: int
    free: int
    cached: int
    held: int
    requests: int
    sessions: int
    running: int
    waiting: int
    waiting_tokens: int
    replica_id: str
    role: str
    rss_bytes: float
    stage_idle: _containers.RepeatedScalarFieldContainer[float]
    collective_share: float
    states: _containers.ScalarMap[str, int]
    def __init__(self, total: _Optional[int] = ..., free: _Optional[int] = ..., cached: _Optional[int] = ..., held: _Optional[int] = ..., requests: _Optional[int] = ..., sessions: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., replica_id: _Optional[str] = ..., role: _Optional[str] = ..., rss_bytes: _Optional[float] = ..., stage_idle: _Optional[_Iterable[float]] = ..., collective_share: _Optional[float] = ..., states: _Optional[_Mapping[str, int]] = ...) -> None: ...
