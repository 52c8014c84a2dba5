from ekiden.rpc import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Submit(_message.Message):
    __slots__ = ("request", "prefill")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    request: _common_pb2.Request
    prefill: _containers.RepeatedCompositeFieldContainer[_common_pb2.PrefillCandidate]
    def __init__(self, request: _Optional[_Union[_common_pb2.Request, _Mapping]] = ..., prefill: _Optional[_Iterable[_Union[_common_pb2.PrefillCandidate, _Mapping]]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ServeRequest(_message.Message):
    __slots__ = ("submit", "cancel")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    cancel: Cancel
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ...) -> None: ...

class ServeEvent(_message.Message):
    __slots__ = ("deltas", "completions", "errors")
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    deltas: _containers.RepeatedCompositeFieldContainer[_common_pb2.Delta]
    completions: _containers.RepeatedCompositeFieldContainer[_common_pb2.Completion]
    errors: _containers.RepeatedCompositeFieldContainer[_common_pb2.Error]
    def __init__(self, deltas: _Optional[_Iterable[_Union[_common_pb2.Delta, _Mapping]]] = ..., completions: _Optional[_Iterable[_Union[_common_pb2.Completion, _Mapping]]] = ..., errors: _Optional[_Iterable[_Union[_common_pb2.Error, _Mapping]]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request", "prefill", "local_prefill")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_FIELD_NUMBER: _ClassVar[int]
    request: _common_pb2.Request
    prefill: _containers.RepeatedCompositeFieldContainer[_common_pb2.PrefillCandidate]
    local_prefill: bool
    def __init__(self, request: _Optional[_Union[_common_pb2.Request, _Mapping]] = ..., prefill: _Optional[_Iterable[_Union[_common_pb2.PrefillCandidate, _Mapping]]] = ..., local_prefill: _Optional[bool] = ...) -> None: ...

class GenerateEvent(_message.Message):
    __slots__ = ("delta", "completion")
    DELTA_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    delta: _common_pb2.Delta
    completion: _common_pb2.Completion
    def __init__(self, delta: _Optional[_Union[_common_pb2.Delta, _Mapping]] = ..., completion: _Optional[_Union[_common_pb2.Completion, _Mapping]] = ...) -> None: ...
