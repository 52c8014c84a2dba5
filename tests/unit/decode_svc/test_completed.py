"""A public call may leave fields out; what it does not leave out is taken as it is."""

from __future__ import annotations

from decode_svc.service import _completed
from ekiden.core.types import Request, SamplingParams
from ekiden.rpc import common_pb2 as pb
from ekiden.rpc.convert import request_to_pb


def test_a_seed_of_zero_is_a_seed() -> None:
    sampling = SamplingParams(seed=0, max_tokens=1)
    message = request_to_pb(Request(request_id="r", model="m", prompt=(1,), sampling=sampling))
    assert _completed(message, "m").sampling.seed == 0


def test_what_is_left_out_is_drawn_once_a_call() -> None:
    message = pb.Request(prompt=[1], sampling=pb.SamplingParams(max_tokens=1))
    one, other = _completed(message, "m"), _completed(message, "m")
    assert one.model == "m"
    assert one.request_id != other.request_id
    assert one.sampling.seed != other.sampling.seed
