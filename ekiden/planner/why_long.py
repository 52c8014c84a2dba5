"""What is said of very long prompts: chunks first, then context parallelism, computed."""

from __future__ import annotations

import msgspec

from ekiden.planner.decision import Decision
from ekiden.planner.evaluate import prompt_servers
from ekiden.planner.layout import cuts_prompts
from ekiden.planner.options import AGGREGATED
from ekiden.planner.reasons import milliseconds
from ekiden.planner.steps import Stepper

LONG_PROMPT = 32_768
"""Tokens from which a prompt is called long: its attention costs as much as its matrices."""


def long_prompts(decision: Decision) -> str:
    """Where a prompt is very long, what it takes and what CP would bring; else empty."""
    longest = max(kind.prompt for kind in decision.asked.work.kinds)
    if longest < LONG_PROMPT:
        return ""
    layout = decision.chosen.layouts[0]
    stepper = decision.asked.stepper(layout, decision.chosen.form)
    said = f"Prompts of {longest} tokens are computed in chunks of {stepper.chunk}"
    if decision.chosen.kind == AGGREGATED:
        said += ", so that others get their tokens meanwhile"
    if layout.cp > 1:
        return f"{said}. {_cut(decision, longest)}"
    return f"{said}. One takes {_alone(stepper, longest)}. {_not_cut(decision, longest)}"


def _alone(stepper: Stepper, tokens: int) -> str:
    return milliseconds(stepper.prompt(tokens).total)


def _cut(decision: Decision, longest: int) -> str:
    """What CP, which was chosen, brings to a long prompt."""
    asked, form = decision.asked, decision.chosen.form
    layout = decision.chosen.layouts[0]
    whole = msgspec.structs.replace(layout, cp=1)
    with_cp, without = asked.stepper(layout, form), asked.stepper(whole, form)
    share = with_cp.prompt(longest).communication_share
    return (
        f"Context parallelism cuts each over {layout.cp} groups of GPUs: {layout} takes "
        f"{_alone(with_cp, longest)} for one, {share:.0%} of it communication, where {whole} would "
        f"take {_alone(without, longest)}. That is for prefill; decode does without."
    )


def _not_cut(decision: Decision, longest: int) -> str:
    """What CP would bring to a long prompt, and why it was not chosen."""
    asked, form = decision.asked, decision.chosen.form
    if not cuts_prompts(asked.geometry):
        return (
            "Context parallelism does not go with linear attention, whose layers hand a state from "
            "each token to the next."
        )
    now = asked.stepper(decision.chosen.layouts[0], form).prompt(longest).total
    servers = prompt_servers(asked, form)
    if not servers:
        return (
            "Context parallelism, which cuts a prompt over GPUs, has no room here beside a replica "
            "that decodes."
        )
    best = min((one.stepper for one in servers), key=lambda one: one.prompt(longest).total)
    one, split = best.replica.layout, best.prompt(longest)
    takes = f"{milliseconds(split.total)} on {one} ({one.gpus} GPUs)"
    if split.total >= now:
        return (
            f"Context parallelism, which cuts a prompt over GPUs, would not be quicker: {takes}, "
            f"{split.communication_share:.0%} of it communication."
        )
    met = "the objectives are met without" if decision.met else "it does not meet them either"
    return (
        "Context parallelism, which cuts a prompt over the GPUs of a prefill pool, would take "
        f"{takes}; {met}."
    )
