"""A plan as JSON values."""

from typing import Any

from dtrain.core.chips import PRICED
from dtrain.core.types import JsonObject
from dtrain.plan.capacity import state
from dtrain.plan.plan import Plan
from dtrain.plan.published import interval
from dtrain.plan.report import PARTS, verdict


def values(plan: Plan) -> JsonObject:
    """The plan as JSON values: sizes in bytes, times in seconds."""
    memory, timing, money = plan.memory, plan.timing, plan.money
    smallest = state(memory, plan.target).smallest if plan.tier == "state" else None
    result: dict[str, Any] = {
        "name": plan.recipe.name,
        "target": plan.target.name,
        "slices": plan.target.slices,
        "chips": plan.target.chips,
        "devices": plan.target.devices,
        "device_kinds": list(plan.target.chip.kinds) if plan.target.chip else ["cpu"],
        "tier": plan.tier,
        "mesh": plan.mesh,
        "engine": plan.recipe.engine.kind,
        "batch": plan.recipe.batch,
        "accumulate": plan.recipe.accumulate,
        "compiler_options": dict(plan.recipe.engine.xla),
        "parameters": plan.parameters,
        "fits": plan.fits,
        "verdict": verdict(plan).lower(),
        "memory_bytes": {
            **memory.classes,
            "peak": memory.peak,
            "reserved": memory.arena,
            "needed": memory.needed,
            "room": int(memory.room),
        },
        "replicated_bytes": memory.replicated,
        **({"smallest_slice": smallest.name} if smallest else {}),
        "largest_buffers": [vars(buffer) for buffer in memory.largest],
        "plan_seconds": plan.took,
    }
    if timing:
        tally = timing.tally
        result["step_seconds"] = timing.seconds
        if found := interval(plan.target.chip, timing.seconds):
            result["step_seconds_as_published"] = vars(found)
        result["seconds_by_part"] = {name: tally.parts.get(name, 0.0) for name in PARTS}
        result["examples_per_second"] = timing.examples / timing.seconds
        if timing.tokens:
            result["tokens_per_second"] = timing.tokens / timing.seconds
        result["mfu"], result["hfu"], result["mfu_convention"] = timing.mfu, timing.hfu, timing.convention
        result["bound"] = timing.bound
        result["flops_per_device"] = {"products": tally.flops, "kernels": tally.kernel_flops}
        result["memory_traffic_bytes_per_device"] = tally.moved
        result["network"] = [
            {"kind": kind, "axes": list(axes), **vars(collective)}
            for (kind, axes), collective in tally.collectives.items()
        ]
    if money:
        result["dollars"] = vars(money) | ({"list_price_of": f"{PRICED:%Y-%m}"} if money.listed else {})
    return result
