"""Compare the step time that a plan predicted with the step time that the run measures."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dtrain.assembly.assemble import Assembly
from dtrain.core.files import read_json
from dtrain.core.run_dir import Folder
from dtrain.core.types import Device, JsonObject
from dtrain.parallel.mesh import mesh_sizes


@dataclass(frozen=True)
class PlanComparison:
    """The step time that a plan predicted."""

    target: str
    tier: str
    """How the step time was obtained: "compiled" from the compiled program, else estimated."""
    step_ms: float

    @property
    def values(self) -> dict[str, float]:
        """Metrics that are logged with the measured values of a step."""
        return {"plan/step_ms": self.step_ms}

    def against(self, measured_ms: float) -> str:
        """One line with the predicted and the measured step time."""
        difference = measured_ms / self.step_ms - 1
        plan = f"planned {self.step_ms:.3g} ms a step ({self.target}, {self.tier})"
        return f"{plan}, measured {measured_ms:.3g} ms: {difference:+.0%}"


def compare_with_plan(place: Folder, assembly: Assembly, devices: Sequence[object]) -> PlanComparison | None:
    """The newest plan for these devices, mesh, engine and batch, preferably a compiled one; None if there is none."""
    plans = []
    for path in sorted((path for path in place.plans.glob("*.json") if path.is_file()), key=_written):
        try:
            plan = read_json(path)
            if isinstance(plan, dict) and _same(plan, assembly, devices) and plan["step_seconds"] > 0:
                plans.append(PlanComparison(str(plan["target"]), str(plan["tier"]), 1e3 * float(plan["step_seconds"])))
        except (OSError, ValueError, TypeError, KeyError, OverflowError):
            continue  # a damaged plan is ignored
    plans.sort(key=lambda plan: plan.tier == "compiled")
    return plans[-1] if plans else None


def _written(path: Path) -> float:
    return path.stat().st_mtime


def _same(plan: JsonObject, assembly: Assembly, devices: Sequence[Device]) -> bool:
    recipe = assembly.recipe
    here = {
        "devices": len(devices),
        "mesh": mesh_sizes(assembly.layout.sizes),
        "engine": recipe.engine.kind,
        "batch": recipe.batch,
        "accumulate": recipe.accumulate,
        "compiler_options": dict(recipe.engine.xla),
    }
    kinds = plan.get("device_kinds", ())
    return all(plan.get(key) == value for key, value in here.items()) and (
        devices[0].device_kind.removeprefix("NVIDIA ") in kinds and "step_seconds" in plan
    )
