"""The command lines that bring a plan about, with options that ``ekiden`` has."""

from __future__ import annotations

from ekiden.models.registry import MODELS
from ekiden.planner.decision import Decision
from ekiden.planner.layout import Layout
from ekiden.planner.options import DISAGGREGATED
from ekiden.planner.precision import FLOATS

ON_LOAD = {"fp8": "fp8", "int8": "int8", "int4": "int4"}
"""Formats that the engine makes while it loads, by its name; the others are checkpoints."""
ROLES = ("prefill", "decode")


def blocked(decision: Decision) -> str:
    """Why this engine does not serve the plan yet; empty where it does."""
    geometry = decision.asked.geometry
    if geometry.model_type not in MODELS:
        return (
            f"ekiden does not serve models of type {geometry.model_type} yet: the plan is "
            "arithmetic, without flags"
        )
    if any(one.dp > 1 or one.ep > 1 for one in decision.chosen.layouts):
        return "ekiden has no options for EP and attention-DP yet: the plan is arithmetic"
    if decision.chosen.refused:
        return "nothing fits, so there is nothing to deploy"
    per_host = decision.asked.devices.per_host
    if any(one.gpus > per_host for one in decision.chosen.layouts):
        return "ekiden does not place one replica on several hosts yet: the plan is arithmetic"
    return ""


def pools(decision: Decision) -> dict[str, tuple[int, Layout]]:
    """Replicas and layout by role; a decode pool alone is aggregated serving."""
    chosen = decision.chosen
    roles = ROLES if chosen.kind == DISAGGREGATED else ROLES[1:]
    return dict(zip(roles, zip(chosen.replicas, chosen.layouts, strict=True), strict=True))


def worker(decision: Decision, layout: Layout) -> list[str]:
    """Options of one worker, whatever its role."""
    limits = decision.asked.stepper(layout, decision.chosen.form).replica.resolved
    found = ["--device", "cuda", "-tp", str(layout.tp)]
    if layout.pp > 1:
        found += ["-pp", str(layout.pp)]
    return found + common(decision, limits.max_model_len, limits.max_num_seqs, limits.chunk)


def common(decision: Decision, length: int, sequences: int, chunk: int) -> list[str]:
    form, asked = decision.chosen.form, decision.asked
    found = ["--max-model-len", str(length), "--max-num-seqs", str(sequences)]
    found += ["--max-num-batched-tokens", str(chunk)]
    if asked.limits.utilization is not None:
        found += ["--gpu-memory-utilization", f"{asked.limits.utilization:g}"]
    if form.name in ON_LOAD and form != asked.own:
        found += ["--quantization", ON_LOAD[form.name]]
    if asked.kv_dtype not in ("auto", *FLOATS):
        found += ["--kv-cache-dtype", asked.kv_dtype]
    return found


def up(decision: Decision, model: str) -> list[str]:
    """``ekiden up`` for one host."""
    found = ["ekiden", "up", model, "--device", "cuda"]
    sizes = {role: (0, Layout()) for role in ROLES} | pools(decision)
    for role, (count, layout) in sizes.items():
        found += [f"--{role}", str(count)]
        if count:
            found += [f"--{role}-tp", str(layout.tp)]
            found += [f"--{role}-pp", str(layout.pp)] if layout.pp > 1 else []
    layout = decision.chosen.layouts[-1]
    limits = decision.asked.stepper(layout, decision.chosen.form).replica.resolved
    return found + common(decision, limits.max_model_len, limits.max_num_seqs, limits.chunk)


def serve(decision: Decision, model: str) -> list[list[str]]:
    """``ekiden serve`` of each pool, to be started once for each of its replicas."""
    return [
        ["ekiden", "serve", role, "--model", model, "--redis", "$REDIS_URL", *worker(decision, one)]
        for role, (_, one) in pools(decision).items()
    ]
