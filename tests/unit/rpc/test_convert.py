"""Structs survive the wire unchanged, and the hand-written conversions miss no field."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ekiden.core import errors
from ekiden.core.types import (
    Completion,
    Delta,
    Fallback,
    FinishReason,
    Request,
    SamplingParams,
    TimeSplit,
    TokenLogprobs,
    TokenSources,
    TransferStats,
)
from ekiden.rpc import convert

u31 = st.integers(0, 2**31 - 1)
seconds = st.floats(0, 1e6, allow_nan=False)
text = st.text(max_size=20)
logprob_values = st.floats(-1e3, 0, allow_nan=False)
token_logprobs = st.builds(
    TokenLogprobs, u31, logprob_values, st.lists(st.tuples(u31, logprob_values)).map(tuple)
)


@given(
    st.builds(
        SamplingParams,
        seed=st.integers(0, 2**64 - 1),
        max_tokens=u31,
        temperature=st.floats(0, 2),
        top_p=st.floats(0.01, 1),
        top_k=u31,
        min_p=st.floats(0, 1),
        presence_penalty=st.floats(-2, 2),
        frequency_penalty=st.floats(-2, 2),
        repetition_penalty=st.floats(0.1, 2),
        logit_bias=st.dictionaries(u31, st.floats(-100, 100)),
        min_tokens=u31,
        stop=st.lists(text).map(tuple),
        stop_token_ids=st.lists(u31).map(tuple),
        ignore_eos=st.booleans(),
        logprobs=st.none() | st.integers(0, 20),
        n=st.integers(1, 8),
    ),
    st.lists(u31).map(tuple),
)
def test_a_request_survives_the_wire(sampling: SamplingParams, prompt: tuple[int, ...]) -> None:
    request = Request(
        request_id="r", model="m", prompt=prompt, sampling=sampling, salt="s", priority=-1
    )
    message = convert.request_to_pb(request)
    parsed = type(message).FromString(message.SerializeToString())
    assert convert.request_from_pb(parsed) == request


@given(
    st.builds(
        Delta,
        request_id=text,
        choice=u31,
        tokens=st.lists(u31).map(tuple),
        logprobs=st.lists(token_logprobs).map(tuple),
        finish=st.none() | st.sampled_from(FinishReason),
        stop_reason=st.none() | text | u31,
    )
)
def test_a_delta_survives_the_wire(delta: Delta) -> None:
    assert convert.delta_from_pb(convert.delta_to_pb(delta)) == delta


@given(
    st.builds(
        Completion,
        request_id=text,
        prompt_tokens=u31,
        completion_tokens=u31,
        sources=st.builds(
            TokenSources,
            decode_cache=u31,
            prefill_cache=u31,
            prefill_computed=u31,
            local_computed=u31,
            reason=text,
        ),
        times=st.builds(
            TimeSplit,
            queue_s=seconds,
            prefill_s=seconds,
            transfer_s=seconds,
            first_decode_s=seconds,
            decode_s=seconds,
        ),
        transfer=st.builds(TransferStats, bytes=st.integers(0, 2**63), seconds=seconds, wire=text),
        fallbacks=st.lists(st.builds(Fallback, kind=text, reason=text)).map(tuple),
        prefill_replica=text,
        decode_replica=text,
    )
)
def test_a_completion_survives_the_wire(completion: Completion) -> None:
    assert convert.completion_from_pb(convert.completion_to_pb(completion)) == completion


@pytest.mark.parametrize(
    "error",
    [
        errors.BadRequest("no", field="top_p"),
        errors.NotFound("no model"),
        errors.Overloaded("full", retry_after_s=3.0),
        errors.Unavailable("nobody", retry_after_s=2.0),
        errors.DeadlineExceeded("late"),
        errors.ReplicaFailed("died"),
        errors.InvariantBroken("bug"),
    ],
)
def test_an_error_keeps_its_class_and_status_across_processes(error: errors.EkidenError) -> None:
    back = convert.error_from_pb(convert.error_to_pb("r", error))
    assert (type(back), back.status, back.message) == (type(error), error.status, error.message)
    assert getattr(back, "field", None) == getattr(error, "field", None)
    assert getattr(back, "retry_after_s", None) == getattr(error, "retry_after_s", None)
