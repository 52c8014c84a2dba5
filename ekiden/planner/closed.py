"""A closed loop: so many clients, each asking again as soon as it is answered.

That is how published benchmarks are taken, not how people ask (``queueing.py`` has that). A request
in the loop is decoded beside all the others and is held up by each of their prompts, so the time
of a token and the number of requests being decoded follow from one another.
"""

from __future__ import annotations

import msgspec

from ekiden.planner.steps import Stepper

ROUNDS = 12
"""Of the fixed point; each takes at least half of what is missing."""


class Loop(msgspec.Struct, frozen=True, kw_only=True):
    """Means of a closed loop, in seconds."""

    ttft: float
    tpot: float
    running: float
    """Requests being decoded."""
    most: float
    """Requests for which there is room."""


def closed_loop(stepper: Stepper, *, prompt: int, output: int, clients: int) -> Loop:
    """``clients`` requests of ``prompt`` and ``output`` tokens under way at any time.

    Raises:
        SetupError: as ``memory``.
    """
    first = stepper.prompt(prompt)
    context = prompt + output / 2
    most = room(stepper, context)
    bound = min(float(clients), most)
    running = bound
    tpot = 0.0
    for _ in range(ROUNDS):
        alone = stepper.decode(running, context).total
        tpot = alone + running / output * stepper.added(prompt, 0, running, context)
        busy = output * tpot
        running = min(bound, clients * busy / (busy + first.total))
    told = stepper.told
    ttft = told.request_s + first.total * (told.passes + told.opening * (bound + 1) / 2)
    if clients > bound:
        ttft += (clients - bound) / bound * (output * tpot + ttft)
    return Loop(ttft=ttft, tpot=tpot, running=running, most=most)


def room(stepper: Stepper, context: float) -> float:
    """Sequences of ``context`` tokens that are decoded at once: what KV and limits allow; at least
    one, which engines let pass what is left."""
    limits = stepper.memory.limits
    return max(1.0, min(stepper.tokens / context, stepper.memory.dp * limits.max_num_seqs))
