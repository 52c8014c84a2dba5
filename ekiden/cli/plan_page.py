"""A plan as people read it: what, why, the sums, what lost, and how to deploy it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

WIDTH = 100
_SHOWN = 14
"""Options that lost which are shown; ``--json`` has all of them."""
_UNFIT = 4
"""Of those that do not fit."""
_COMMANDS = 2
"""Command lines of a host which are shown where there are many, and hosts."""
_FEW_KINDS = 4
"""Kinds of requests which are each shown."""
_GIB = 1 << 30


def page(plan: dict[str, Any]) -> str:
    """The report as text."""
    parts = [
        _head(plan),
        _section("Why", _bullets(plan["why"])),
        *(_section(_memory_title(one), _memory(one)) for one in plan["memory"]),
    ]
    if plan["chosen"]["latency"] and not plan["chosen"]["latency"]["limit"]:
        parts.append(_section("Latency", _latency(plan)))
        parts.append(_section("Throughput and cost", _cost(plan)))
        parts.append(_section("If one GPU fails", _bullets(_failure(plan))))
    parts += [
        _section("What lost, and why", _lost(plan)),
        _section("Measure first", _bullets(plan["measure_first"])),
        _section("Deploy", _deploy(plan)),
        _section("How far to believe this", _bullets(_certainty(plan))),
    ]
    return "\n\n".join(part for part in parts if part)


def _section(title: str, lines: Iterator[str] | list[str]) -> str:
    text = "\n".join(lines)
    return f"{title}\n{text}" if text else ""


def _wrapped(text: str, indent: str = "  ", first: str | None = None) -> str:
    return textwrap.fill(
        text, WIDTH, initial_indent=indent if first is None else first, subsequent_indent=indent
    )


def _bullets(sentences: list[str]) -> list[str]:
    return [_wrapped(sentence, "    ", "  - ") for sentence in sentences]


def _head(plan: dict[str, Any]) -> str:
    asked = plan["asked"]
    work = asked["workload"]
    kinds = _kinds([f"{kind['prompt']}/{kind['output']}" for kind in work["kinds"]])
    rate = f"{work['rate']:g} requests/s" if work["rate"] else "as many requests as it serves"
    if spare := asked["spare_replicas"]:
        rate += f" with {spare} replica{'s' * (spare > 1)} of each pool lost"
    upto = "up to " if work["name"].startswith("trace ") else ""
    share = work["prefix_share"]
    cached = f", {upto}{share:.0%} of prompts cached" if share else ""
    stated = ", ".join(
        f"{name.upper().replace('_', ' ')} {_time(most)}"
        for name, most in asked["objectives"].items()
    )
    names = asked["assumed"]
    which = f"{names[0].upper()} " if len(names) == 1 else ""
    own = " and ".join(f"--{name}-p95" for name in names)
    assumed = f" ({which}assumed: state your own with {own})" if names else ""
    shape = f"{asked['gpus_per_host']} x {asked['gpu']}"
    hosts = f"{asked['hosts']} hosts of {shape}" if asked["hosts"] > 1 else shape
    there = asked["gpus_per_host"] * asked["hosts"]
    return "\n".join(
        (
            _verdict(plan, there),
            f"  model       {asked['geometry']}, {asked['parameters']:,} parameters"
            + _active(asked),
            f"  devices     {hosts}, {asked['interconnect']}"
            + (f", {asked['network_gbps']:g} GB/s a GPU between hosts" * (asked["hosts"] > 1)),
            f"  workload    {work['name']}: {kinds} tokens of prompt/output, {rate}{cached}",
            f"  objectives  {stated}{assumed}",
        )
    )


def _verdict(plan: dict[str, Any], there: int) -> str:
    chosen = plan["chosen"]
    if chosen["refused"]:
        return f"NOT MET, nothing fits; nearest: {chosen['name']}"
    verdict = "" if plan["met"] else "NOT MET, nearest: "
    return f"{verdict}{chosen['name']} ({chosen['gpus']} of {there} GPUs)"


def _kinds(lengths: list[str]) -> str:
    if len(lengths) <= _FEW_KINDS:
        return ", ".join(lengths)
    return f"{len(lengths)} kinds from {lengths[0]} to {lengths[-1]}"


def _active(asked: dict[str, Any]) -> str:
    if asked["active_parameters"] == asked["parameters"]:
        return ""
    return f", of which a token meets {asked['active_parameters']:,}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "without end"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


_TERMS = {
    "weights": "weights",
    "activations": "activations of a chunk",
    "sampler": "sampling",
    "context": "CUDA context and kernels",
    "communication": "communication buffers",
    "graphs": "captured graphs",
}


def _memory_title(one: dict[str, Any]) -> str:
    return f"Memory of a {one['pool']} GPU, in bytes (rank {one['rank']}, the tightest)"


def _memory(one: dict[str, Any]) -> Iterator[str]:
    limits = one["limits"]
    yield _row("card", one["card"])
    yield _row(f"usable, {limits['utilization']:.0%}", one["usable"])
    for name, label in _TERMS.items():
        if one[name]:
            yield _row(f"- {label}", one[name])
    yield _row("= left for KV", one["kv"])
    yield _wrapped(
        f"{one['kv_token']:,} bytes a token and GPU: {one['kv_tokens']:,} tokens, "
        f"{one['blocks']:,} blocks of {one['block_size']}, in a replica. Limits: "
        f"max_model_len {limits['max_model_len']}, max_num_seqs {limits['max_num_seqs']}, "
        f"max_num_batched_tokens {limits['chunk']}."
    )


def _row(label: str, size: int) -> str:
    return f"  {label:<28} {size:>18,}   {size / _GIB:8.2f} GiB"


def _latency(plan: dict[str, Any]) -> Iterator[str]:
    latency, stated = plan["chosen"]["latency"], plan["asked"]["objectives"]
    yield f"  {'':<6} {'P50':>12} {'P95':>12} {'P99':>12}"
    decodes = latency["tpot_p50"] is not None
    for what in ("ttft", "tpot") if decodes else ("ttft",):
        cells = " ".join(f"{_time(latency[f'{what}_p{q}']):>12}" for q in (50, 95, 99))
        goals = [
            f"P{name[-2:]} {_time(most)}" for name, most in stated.items() if name.startswith(what)
        ]
        yield f"  {what.upper():<6} {cells}" + (f"   wanted: {', '.join(goals)}" if goals else "")
    if decodes:
        sequences = f"{max(1.0, latency['running']):.0f} of at most {latency['most']:.0f}"
        yield _parts(f"a decode step, {sequences} sequences", latency["decode"])
    yield _parts("a mean prompt, alone", latency["prefill"])
    if not decodes:
        yield f"  prompts take {latency['prefill_load']:.0%} of the time; answers have one token"
        return
    extra = f"  prompts take {latency['prefill_load']:.0%} of "
    if plan["chosen"]["kind"] == "aggregated":
        yield f"{extra}the time, and hold a token up by at most {_time(latency['stall'])}"
    else:
        yield (
            f"{extra}prefill's time; KV takes {latency['link_load']:.1%} of the link and delays "
            f"the second token by {_time(latency['transfer'])}"
        )


_PARTS = ("weights", "attention", "communication", "overhead", "idle")


def _parts(label: str, split: dict[str, float]) -> str:
    shown = [name for name in _PARTS if split[name] or name == "communication"]
    parts = ", ".join(f"{name} {split[name] / split['total']:.0%}" for name in shown)
    return f"  {label}: {_time(split['total'])} = {parts}"


def _cost(plan: dict[str, Any]) -> Iterator[str]:
    cost, chosen = plan["cost"], plan["chosen"]
    asked_for = plan["asked"]["workload"]["rate"]
    served = "asked for" if asked_for and plan["met"] else "the most within the objectives"
    written = f"{cost['output_tokens_per_s']:,.0f} tokens/s written"
    yield f"  {_figure(chosen['rate'])} requests/s ({served}), {written}"
    if room := plan["headroom"]:
        told = [f"TTFT P95 {_time(room['ttft_p95'])}"]
        told += [f"TPOT P95 {_time(room['tpot_p95'])}"] if room["tpot_p95"] else []
        yield f"  at {_figure(room['rate'])}, which leaves a tenth as headroom: {', '.join(told)}"
    line = f"  {chosen['gpus']} GPU-hour{'s' * (chosen['gpus'] != 1)} an hour"
    if cost["gpu_hours_per_million_tokens"] is not None:
        line += f", {cost['gpu_hours_per_million_tokens']:.3g} for a million tokens written"
    yield line
    if cost["price_per_hour"] is not None:
        each = cost["price_per_hour"] / chosen["gpus"]
        money = f"  at {each:g} for each of them, {cost['price_per_hour']:,.2f} an hour"
        if cost["price_per_million_tokens"] is not None:
            money += f", {cost['price_per_million_tokens']:.3g} for a million tokens written"
        yield money


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _failure(plan: dict[str, Any]) -> list[str]:
    pools = plan["failure"]["pools"]
    said = [_loss(one, alone=len(pools) == 1) for one in pools]
    return [*said[:-1], f"{said[-1]} {plan['failure']['then']}".strip()]


def _loss(pool: dict[str, Any], *, alone: bool) -> str:
    """What one lost GPU of a pool takes with it."""
    gpus = f"{pool['gpus']} GPU{'s' * (pool['gpus'] > 1)}"
    head = (
        f"A replica of {gpus} stops with it"
        if alone
        else f"{pool['pool']}: {gpus} stop{'s' * (pool['gpus'] == 1)} with it"
    )
    if pool["share"] < 1:
        return f"{head}, and {1 - pool['share']:.0%} of its pool goes on."
    if pool["pool"] == "prefill":
        return f"{head}, and decode replicas compute prompts themselves until it is back."
    return f"{head}, and nothing is served until it is back."


def _lost(plan: dict[str, Any]) -> Iterator[str]:
    shown = _worth_showing(plan)[:_SHOWN]
    for one in shown:
        yield _wrapped(f"{one['name']}: {one['why']}", "      ", "  - ")
    if more := len(plan["lost"]) - len(shown):
        yield f"  - {more} more, for reasons of the same kinds: --json has them all"


def _worth_showing(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """All of the chosen format, but few that do not fit; of any other the first, its best."""
    seen: set[str] = set()
    found, unfit = [], 0
    for one in plan["lost"]:
        if one["weights"] == plan["chosen"]["weights"]:
            unfit += bool(one["refused"])
            found += [one] if not one["refused"] or unfit <= _UNFIT else []
        elif one["weights"] not in seen:
            found.append(one)
        seen.add(one["weights"])
    return found


def _deploy(plan: dict[str, Any]) -> Iterator[str]:
    deploy = plan["deploy"]
    if deploy["blocked"]:
        yield _wrapped(f"{deploy['blocked']}.")
        if not plan["chosen"]["refused"]:
            yield from _servable(deploy["servable"])
        return
    hosts = [lines for lines in deploy["hosts"] if lines]
    for number, lines in enumerate(hosts[:_COMMANDS], 1):
        if len(hosts) > 1:
            yield f"  on host {number}:"
        for line in lines[:_COMMANDS] if len(lines) > _COMMANDS + 1 else lines:
            yield _command(line)
        if len(lines) > _COMMANDS + 1:
            yield f"  ... {len(lines) - _COMMANDS} more: --out DIR writes all of them"
    if len(hosts) > _COMMANDS:
        yield f"  ... and {len(hosts) - _COMMANDS} more hosts"


def _servable(option: dict[str, Any] | None) -> Iterator[str]:
    """What is served in place of a plan that is not."""
    if option is None:
        yield "  Nothing else that was computed is served either."
        return
    best = "The best that is served" if option["works"] else "What is served meets less; nearest"
    yield _wrapped(f"{best}: {option['name']}: {option['compared']}.")
    if option["pin"]:
        yield _wrapped(f"Its plan, with flags: the same question with {option['pin']}.")
    else:
        yield "  No option of a plan pins it: its pools have layouts of their own."


def _command(line: str) -> str:
    """Longer ones on several lines, as a shell takes them."""
    lines = textwrap.wrap(
        line,
        WIDTH - 2,
        break_long_words=False,
        break_on_hyphens=False,
        initial_indent="  ",
        subsequent_indent="      ",
    )
    return " \\\n".join(lines)


def _certainty(plan: dict[str, Any]) -> list[str]:
    sure = plan["certainty"]
    found = f"Latency by the calibration {sure['calibration']}: {sure['source']}"
    if sure["median_error_tpot"] is not None:
        what = "of TPOT there" if sure["shipped"] else "on points that it had not seen"
        found += f"; its median error {what} is {sure['median_error_tpot']:.1%}"
    elsewhere = " It has not been measured on these machines." if sure["shipped"] else ""
    sentences = [f"{found}.{elsewhere}"]
    if sure["recalled"]:
        sentences.append(
            f"Not checked against a data sheet for this GPU: {', '.join(sure['recalled'])}."
        )
    if plan["asked"]["active_parameters"] != plan["asked"]["parameters"]:
        sentences.append(
            "Of mixtures of experts less is published: of 15 measured TPOTs the median is 8% off, "
            "and one in ten more than twice."
        )
    sentences.append("Memory is arithmetic, and off by 1.5% in the median of published logs.")
    if servers := sure["ideal_queue_servers"]:
        sentences.append(
            f"TTFT P99 is P95 since hardly anyone waits: the {servers} that compute prompts are "
            "taken as one ideal queue, where each request goes to one that is free. A router knows "
            "their load a moment late: expect a longer tail, and see --simulate."
        )
    if sure["checkpoint_bytes"]:
        off = sure["counted_bytes"] / sure["checkpoint_bytes"] - 1
        sentences.append(
            f"The checkpoint's headers have {sure['checkpoint_bytes']:,} bytes of tensors; "
            f"{sure['counted_bytes']:,} were counted, {off:+.2%}."
        )
    return sentences
