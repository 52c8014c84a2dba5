from ekiden.rpc import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ProbeRequest(_message.Message):
    __slots__ = ("decode_replica", "decode_epoch", "prefill_epoch", "offer")
    DECODE_REPLICA_FIELD_NUMBER: _ClassVar[int]
    DECODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PREFILL_EPOCH_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    decode_replica: str
    decode_epoch: int
    prefill_epoch: int
    offer: bytes
    def __init__(self, decode_replica: _Optional[str] = ..., decode_epoch: _Optional[int] = ..., prefill_epoch: _Optional[int] = ..., offer: _Optional[bytes] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("start", "reserved", "lent")
    START_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    LENT_FIELD_NUMBER: _ClassVar[int]
    start: PrefillStart
    reserved: Reserved
    lent: Lent
    def __init__(self, start: _Optional[_Union[PrefillStart, _Mapping]] = ..., reserved: _Optional[_Union[Reserved, _Mapping]] = ..., lent: _Optional[_Union[Lent, _Mapping]] = ...) -> None: ...

class PrefillStart(_message.Message):
    __slots__ = ("request", "decode_replica", "decode_epoch", "prefill_epoch")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    DECODE_REPLICA_FIELD_NUMBER: _ClassVar[int]
    DECODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PREFILL_EPOCH_FIELD_NUMBER: _ClassVar[int]
    request: _common_pb2.Request
    decode_replica: str
    decode_epoch: int
    prefill_epoch: int
    def __init__(self, request: _Optional[_Union[_common_pb2.Request, _Mapping]] = ..., decode_replica: _Optional[str] = ..., decode_epoch: _Optional[int] = ..., prefill_epoch: _Optional[int] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("held_tokens", "offer", "lend_wire", "lend_bytes_per_s")
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    LEND_WIRE_FIELD_NUMBER: _ClassVar[int]
    LEND_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    held_tokens: int
    offer: bytes
    lend_wire: str
    lend_bytes_per_s: float
    def __init__(self, held_tokens: _Optional[int] = ..., offer: _Optional[bytes] = ..., lend_wire: _Optional[str] = ..., lend_bytes_per_s: _Optional[float] = ...) -> None: ...

class Lent(_message.Message):
    __slots__ = ("seal", "refusal")
    SEAL_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    seal: bytes
    refusal: str
    def __init__(self, seal: _Optional[bytes] = ..., refusal: _Optional[str] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("ready", "started", "hand_off", "sealed", "failed", "fetch")
    READY_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    HAND_OFF_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    ready: Ready
    started: Started
    hand_off: HandOff
    sealed: Sealed
    failed: _common_pb2.Error
    fetch: Fetch
    def __init__(self, ready: _Optional[_Union[Ready, _Mapping]] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., hand_off: _Optional[_Union[HandOff, _Mapping]] = ..., sealed: _Optional[_Union[Sealed, _Mapping]] = ..., failed: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., fetch: _Optional[_Union[Fetch, _Mapping]] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("answer_within_s",)
    ANSWER_WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    answer_within_s: float
    def __init__(self, answer_within_s: _Optional[float] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("cached_tokens", "fetched_tokens", "fetched_bytes", "fetch_failure")
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FETCH_FAILURE_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    fetched_tokens: int
    fetched_bytes: int
    fetch_failure: str
    def __init__(self, cached_tokens: _Optional[int] = ..., fetched_tokens: _Optional[int] = ..., fetched_bytes: _Optional[int] = ..., fetch_failure: _Optional[str] = ...) -> None: ...

class Fetch(_message.Message):
    __slots__ = ("offer",)
    OFFER_FIELD_NUMBER: _ClassVar[int]
    offer: bytes
    def __init__(self, offer: _Optional[bytes] = ...) -> None: ...

class HandOff(_message.Message):
    __slots__ = ("deltas", "computed_tokens", "cached_tokens")
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    deltas: _containers.RepeatedCompositeFieldContainer[_common_pb2.Delta]
    computed_tokens: int
    cached_tokens: int
    def __init__(self, deltas: _Optional[_Iterable[_Union[_common_pb2.Delta, _Mapping]]] = ..., computed_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class Sealed(_message.Message):
    __slots__ = ("seal",)
    SEAL_FIELD_NUMBER: _ClassVar[int]
    seal: bytes
    def __init__(self, seal: _Optional[bytes] = ...) -> None: ...
