"""Between the structs of ``ekiden.core.types`` and the messages of ``proto/``.

Rare messages go through the generic ``to_pb``/``from_pb``, which need equal field names; those of
every step are written out, because they are on the hot path.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
from google.protobuf import json_format
from google.protobuf.message import Message

from ekiden.core import errors
from ekiden.core.errors import BadRequest, EkidenError
from ekiden.core.types import (
    Completion,
    Delta,
    Fallback,
    FinishReason,
    PrefillCandidate,
    Request,
    SamplingParams,
    TimeSplit,
    TokenLogprobs,
    TokenSources,
    TransferStats,
)
from ekiden.rpc import common_pb2 as pb

S = TypeVar("S", bound=msgspec.Struct)
M = TypeVar("M", bound=Message)

_FINISH_TO_PB = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}
_FINISH_FROM_PB: dict[int, FinishReason] = {int(v): k for k, v in _FINISH_TO_PB.items()}


def to_pb(struct: msgspec.Struct, message: type[M]) -> M:
    """A message with the struct's fields; nested structs become nested messages."""
    return message(**msgspec.to_builtins(struct, builtin_types=(bytes,)))


def from_pb(message: Message, struct: type[S]) -> S:
    """The struct with the message's fields.

    Raises:
        BadRequest: a field is missing or has a value that the struct refuses.
    """
    data = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    try:
        return msgspec.convert(data, struct, strict=False)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{message.DESCRIPTOR.name}: {error}") from error


def sampling_to_pb(params: SamplingParams) -> pb.SamplingParams:
    return to_pb(params, pb.SamplingParams)


def sampling_from_pb(message: pb.SamplingParams) -> SamplingParams:
    """Absent numbers read as OpenAI's defaults where proto's zero would be another request."""
    return SamplingParams(
        seed=message.seed,
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_p=message.top_p or 1.0,
        top_k=message.top_k,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty or 1.0,
        logit_bias=dict(message.logit_bias),
        min_tokens=message.min_tokens,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        n=message.n or 1,
    )


def request_to_pb(request: Request) -> pb.Request:
    return pb.Request(
        request_id=request.request_id,
        model=request.model,
        prompt=request.prompt,
        sampling=sampling_to_pb(request.sampling),
        salt=request.salt,
        deadline_s=request.deadline_s,
        priority=request.priority,
    )


def request_from_pb(message: pb.Request) -> Request:
    return Request(
        request_id=message.request_id,
        model=message.model,
        prompt=tuple(message.prompt),
        sampling=sampling_from_pb(message.sampling),
        salt=message.salt,
        deadline_s=message.deadline_s or 600.0,
        priority=message.priority,
    )


def candidate_to_pb(candidate: PrefillCandidate) -> pb.PrefillCandidate:
    return pb.PrefillCandidate(
        replica_id=candidate.replica_id, address=candidate.address, epoch=candidate.epoch
    )


def candidate_from_pb(message: pb.PrefillCandidate) -> PrefillCandidate:
    return PrefillCandidate(
        replica_id=message.replica_id, address=message.address, epoch=message.epoch
    )


def _logprobs_to_pb(entry: TokenLogprobs) -> pb.TokenLogprobs:
    top = [pb.TopLogprob(token=token, logprob=value) for token, value in entry.top]
    return pb.TokenLogprobs(token=entry.token, logprob=entry.logprob, top=top)


def _logprobs_from_pb(message: pb.TokenLogprobs) -> TokenLogprobs:
    top = tuple((entry.token, entry.logprob) for entry in message.top)
    return TokenLogprobs(message.token, message.logprob, top)


def delta_to_pb(delta: Delta) -> pb.Delta:
    message = pb.Delta()
    write_delta(delta, message)
    return message


def write_delta(delta: Delta, message: pb.Delta) -> None:
    """Write into an empty message. One that was added to a step's list is not copied into it,
    which takes a third of the time.
    """
    message.request_id = delta.request_id
    message.choice = delta.choice
    message.tokens.extend(delta.tokens)
    message.logprobs.extend(map(_logprobs_to_pb, delta.logprobs))
    if delta.finish is not None:
        message.finish = _FINISH_TO_PB[delta.finish]
    if isinstance(delta.stop_reason, str):
        message.stop_string = delta.stop_reason
    elif delta.stop_reason is not None:
        message.stop_token = delta.stop_reason


def delta_from_pb(message: pb.Delta) -> Delta:
    which = message.WhichOneof("stop_reason")
    if not (which or message.finish or message.logprobs):  # as nearly all are: in half the time
        return Delta(
            request_id=message.request_id, choice=message.choice, tokens=tuple(message.tokens)
        )
    return Delta(
        request_id=message.request_id,
        choice=message.choice,
        tokens=tuple(message.tokens),
        logprobs=tuple(map(_logprobs_from_pb, message.logprobs)),
        finish=_FINISH_FROM_PB.get(message.finish),
        stop_reason=getattr(message, which) if which else None,
    )


def completion_to_pb(completion: Completion) -> pb.Completion:
    return to_pb(completion, pb.Completion)


def completion_from_pb(message: pb.Completion) -> Completion:
    sources, times, transfer = message.sources, message.times, message.transfer
    return Completion(
        request_id=message.request_id,
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        sources=TokenSources(
            decode_cache=sources.decode_cache,
            prefill_cache=sources.prefill_cache,
            prefill_computed=sources.prefill_computed,
            local_computed=sources.local_computed,
            reason=sources.reason,
        ),
        times=TimeSplit(
            queue_s=times.queue_s,
            prefill_s=times.prefill_s,
            transfer_s=times.transfer_s,
            first_decode_s=times.first_decode_s,
            decode_s=times.decode_s,
        ),
        transfer=TransferStats(
            bytes=transfer.bytes,
            seconds=transfer.seconds,
            wire=transfer.wire,
            fetched_tokens=transfer.fetched_tokens,
            fetched_bytes=transfer.fetched_bytes,
        ),
        fallbacks=tuple(Fallback(kind=f.kind, reason=f.reason) for f in message.fallbacks),
        prefill_replica=message.prefill_replica,
        decode_replica=message.decode_replica,
    )


_BY_CODE: dict[str, type[EkidenError]] = {
    cls.code: cls
    for cls in (
        errors.BadRequest,
        errors.NotFound,
        errors.TooLarge,
        errors.Unauthenticated,
        errors.Overloaded,
        errors.Unavailable,
        errors.DeadlineExceeded,
        errors.ReplicaFailed,
        errors.InvariantBroken,
    )
}


def error_to_pb(request_id: str, error: EkidenError) -> pb.Error:
    return pb.Error(
        request_id=request_id,
        code=error.code,
        message=error.message,
        field=getattr(error, "field", None) or "",
        retry_after_s=getattr(error, "retry_after_s", 0.0),
    )


def error_from_pb(message: pb.Error) -> EkidenError:
    """The same class on this side, so that it maps to the same status."""
    cls = _BY_CODE.get(message.code, EkidenError)
    if issubclass(cls, errors.ClientError):
        return cls(message.message, field=message.field or None)
    if issubclass(cls, errors.Overloaded):
        return cls(message.message, retry_after_s=message.retry_after_s or 1.0)
    return cls(message.message)
