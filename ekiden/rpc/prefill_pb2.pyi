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
    __slots__ = ("start", "reserved")
    START_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    start: PrefillStart
    reserved: Reserved
    def __init__(self, start: _Optional[_Union[PrefillStart, _Mapping]] = ..., reserved: _Optional[_Union[Reserved, _Mapping]] = ...) -> None: ...

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
    __slots__ = ("held_tokens", "offer")
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    held_tokens: int
    offer: bytes
    def __init__(self, held_tokens: _Optional[int] = ..., offer: _Optional[bytes] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("ready", "started", "hand_off", "sealed", "failed")
    READY_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    HAND_OFF_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    ready: Ready
    started: Started
    hand_off: HandOff
    sealed: Sealed
    failed: _common_pb2.Error
    def __init__(self, ready: _Optional[_Union[Ready, _Mapping]] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., hand_off: _Optional[_Union[HandOff, _Mapping]] = ..., sealed: _Optional[_Union[Sealed, _Mapping]] = ..., failed: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("answer_within_s",)
    ANSWER_WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    answer_within_s: float
    def __init__(self, answer_within_s: _Optional[float] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("cached_tokens",)
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    def __init__(self, cached_tokens: _Optional[int] = ...) -> None: ...

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
