"""Constants of the latency model are found again in the times that they give."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest

from ekiden.planner.calibration import Calibration, calibration
from ekiden.planner.catalogue import geometry
from ekiden.planner.devices import devices
from ekiden.planner.fitting import Point, fit, minimise, start
from ekiden.planner.hardware import gpu
from ekiden.planner.memory import Replica, card_of
from ekiden.planner.steps import Stepper

H100 = gpu("h100_sxm")
REPLICA = Replica(geometry=geometry("Llama-3.1-8B"), card=card_of(H100))
PROMPTS = (16, 64, 256, 1024, 4096)
TOGETHER = ((1, 56), (4, 56), (16, 56), (64, 56), (1, 4000), (16, 4000))
TRUTH = {
    "memory_share": 0.7,
    "kv_share": 0.5,
    "compute_share": 0.6,
    "attention_share": 0.4,
    "step_s": 3e-3,
    "sequence_s": 40e-6,
    "request_s": 12e-3,
}


def machine(**told: float) -> Calibration:
    return msgspec.structs.replace(calibration("vllm"), device=H100, **told)


def times(told: Calibration, noise: float = 0.0) -> list[Point]:
    stepper = Stepper(REPLICA, devices(H100, per_host=1, interconnect="pcie"), told)
    chance = random.Random(1)

    def seen(seconds: float) -> float:
        return seconds * (1 + chance.uniform(-noise, noise))

    return [
        *(
            Point(
                what="ttft",
                tokens=tokens,
                seconds=seen(told.request_s + stepper.prompt(tokens).total),
            )
            for tokens in PROMPTS
        ),
        *(
            Point(
                what="itl",
                tokens=tokens,
                sequences=count,
                seconds=seen(stepper.decode(count, tokens).total),
            )
            for count, tokens in TOGETHER
        ),
    ]


def test_times_without_noise_are_foretold_within_two_percent_from_constants_that_were_far_off() -> (
    None
):
    found = fit(times(machine(**TRUTH)), REPLICA, machine())
    assert max(found.errors(found.foretold)) < 0.02
    assert found.calibration.compute_share == pytest.approx(TRUTH["compute_share"], rel=0.2)
    assert found.calibration.request_s == pytest.approx(TRUTH["request_s"], rel=0.2)


def test_what_a_fit_has_not_seen_is_told_apart_from_what_it_has() -> None:
    points = times(machine(**TRUTH))
    points[0] = msgspec.structs.replace(points[0], seconds=points[0].seconds * 3)
    found = fit(points, REPLICA, machine())
    assert found.errors(found.unseen)[0] > found.errors(found.foretold)[0]
    assert found.calibration.median_error == pytest.approx(
        float(np.median(found.errors(found.unseen))), abs=1e-4
    )


def test_noise_of_some_percent_is_not_made_more_of() -> None:
    truth = machine(**TRUTH)
    found = fit(times(truth, noise=0.05), REPLICA, machine())
    clean = [point.seconds for point in times(truth)]
    errors = [abs(a / b - 1) for a, b in zip(found.foretold, clean, strict=True)]
    assert float(np.median(errors)) < 0.05


def test_constants_of_which_the_points_say_nothing_stay_as_they_were() -> None:
    found = fit(times(machine(**TRUTH)), REPLICA, machine()).calibration
    assert (found.nvlink_share, found.expert_share) == (
        calibration("vllm").nvlink_share,
        calibration("vllm").expert_share,
    )


def test_a_peak_is_made_such_that_the_longest_prompt_takes_its_usual_share() -> None:
    truth = machine()
    points = times(truth)
    longest = max(points, key=lambda point: (point.what == "ttft", point.tokens))
    slow = msgspec.structs.replace(H100, bf16_tflops=H100.bf16_tflops / 1000)
    begun = start(slow, longest, REPLICA, truth)
    assert begun.device is not None
    assert begun.device.bf16_tflops == pytest.approx(H100.bf16_tflops, rel=0.3)


def test_the_least_of_a_sum_of_squares_is_found() -> None:
    """Rosenbrock's valley: straight descent does not get through it in so few rounds."""

    def valley(at: np.ndarray) -> np.ndarray:
        return np.array([10 * (at[1] - at[0] ** 2), 1 - at[0]])

    assert minimise(valley, np.array([-1.2, 1.0])) == pytest.approx([1.0, 1.0], abs=1e-3)
