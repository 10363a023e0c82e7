"""The report of a plan: each figure is computed, and figures that belong together agree."""

import dataclasses
import os
import pty
import re
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

from dtrain.core.chips import CHIPS
from dtrain.core.errors import EnvironmentFault, RecipeError
from dtrain.core.slices import target
from dtrain.plan.money import cost
from dtrain.plan.plan import Plan, quick
from dtrain.plan.report import CHECKS, duration, interval, lines, saving, values, verdict
from dtrain.plan.scale import draw, refuse_undrawable, table
from dtrain.recipe.load import load
from tests.conftest import Dtrain
from tests.plan.test_plan import FRESH, recipe

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(scope="module")
def images() -> Plan:
    """A ViT on v5e-16."""
    return quick(load(RECIPES / "vit-synthetic-v5e-16.yaml", [], 16), target("v5e-16"))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """A decoder on v5p-8, where fsdp lies over two dims of the network."""
    return quick(recipe(tmp_path_factory.mktemp("recipe"), "llama3.2-1b", 2048, 16), target("v5p-8"))


def text(plan: Plan) -> str:
    return "\n".join(lines(plan, FRESH))


@pytest.mark.parametrize("seconds", [0.02, 59.6, 81, 119, 121, 1249, 3599, 3601, 95_000, 1e7])
def test_the_time_and_the_money_of_a_run_agree(images: Plan, seconds: float) -> None:
    """As printed: hours times dollars per hour equal the dollars."""
    money = cost(images.target, seconds / 1000, 0, 64, 1000, None)
    assert money
    assert images.timing
    shown = text(dataclasses.replace(images, money=money))
    amount, unit, total = re.findall(r"take ([\d,.e+]+) (\w+), \$([\d,.]+);", shown)[0]
    hours = float(amount.replace(",", "")) / {"hours": 1, "minutes": 60, "seconds": 3600}[unit]
    assert hours * 19.20 == pytest.approx(float(total.replace(",", "")), rel=0.006, abs=0.006)


def test_a_short_run_is_given_in_seconds() -> None:
    assert duration(81 / 3600) == "81 seconds"
    assert (duration(0.2), duration(26.53)) == ("12 minutes", "26.5 hours")


def test_images_are_counted_as_images(images: Plan) -> None:
    assert images.timing
    shown, rate = text(images), 1024 / images.timing.seconds
    assert f"{rate:,.0f} images/s" in shown
    assert f"${19.20 / 3600 / rate * 1e6:,.2f} a million images" in shown
    assert "tokens" not in shown
    head, row, *_ = table([images.target], [images], FRESH)
    assert "images/s" in head
    assert "$/1e6 images" in head
    assert f"{rate:,.0f}" in row
    assert "tokens_per_second" not in values(images)


@pytest.mark.parametrize("executed", [0.9, 1.0, 1.3])
def test_recomputation_never_lowers_the_utilisation(images: Plan, executed: float) -> None:
    """MFU and HFU use one convention; no HFU is shown for a program that executes fewer FLOPs than it counts."""
    timing = images.timing
    assert timing
    flops = executed * timing.model_flops / images.target.devices
    changed = dataclasses.replace(timing, tally=dataclasses.replace(timing.tally, flops=flops, kernel_flops=0.0))
    assert changed.hfu == pytest.approx(max(executed, 1.0) * changed.mfu)
    assert ("HFU" in text(dataclasses.replace(images, timing=changed))) == (executed > 1)


@pytest.mark.slow
def test_collectives_over_one_axis_of_the_recipe_are_one_row(tokens: Plan) -> None:
    assert tokens.timing
    once = tokens.timing.tally.collectives
    collective = once | {(kind, ("fsdp_y",)): part for (kind, _), part in once.items()}
    tally = dataclasses.replace(tokens.timing.tally, collectives=collective)
    tokens = dataclasses.replace(tokens, timing=dataclasses.replace(tokens.timing, tally=tally))
    assert tokens.timing
    rows = re.findall(r"^  ([a-z-]+) +over (\w+)", text(tokens), re.MULTILINE)
    assert len(rows) == len(set(rows)) > 1
    calls = sum(
        collective.calls for (kind, _), collective in tokens.timing.tally.collectives.items() if kind == "all-gather"
    )
    assert re.search(rf"all-gather +over fsdp +{calls:,.0f} calls", text(tokens))


@pytest.mark.parametrize(("today", "months"), [(date(2026, 4, 30), 0), (date(2026, 5, 1), 7), (date(2027, 1, 1), 15)])
def test_list_prices_older_than_six_months_are_shown_with_a_warning(images: Plan, today: date, months: int) -> None:
    warning = f"list prices are {months} months old"
    assert (warning in "\n".join(lines(images, today))) == bool(months)
    assert (warning in "\n".join(table([images.target], [images], today))) == bool(months)
    own = dataclasses.replace(images, money=cost(images.target, 1.0, 0, 1, 1, price=2.0))
    assert "months old" not in "\n".join(lines(own, today))
    assert "2025-10" in text(images)


def test_no_time_and_no_price_are_shown_for_what_does_not_fit(images: Plan) -> None:
    large = dataclasses.replace(images.memory, peak=int(images.memory.room / 0.68))
    shown = text(dataclasses.replace(images, memory=large, money=None))
    assert "DOES NOT FIT" in shown
    assert not re.search(r"\$|step time|MFU", shown)
    row = list(table([images.target], [dataclasses.replace(images, memory=large, money=None)], FRESH))[1]
    assert "DOES NOT FIT" in row
    assert "%" not in row


def test_arithmetic_alone_does_not_promise_what_a_compiler_may_need(images: Plan) -> None:
    """Compiled peaks were at most 1.3 times those of quick plans; above that, only compiling shows whether it fits."""
    room = images.memory.room
    cases = ((room / 1.31, "fits"), (room / 1.29, "may fit"), (room / 0.7, "may fit"), (room / 0.68, "DOES NOT FIT"))
    for peak, found in cases:
        near = dataclasses.replace(images, memory=dataclasses.replace(images.memory, peak=int(peak)))
        assert verdict(near) == found
        assert ("0.69 to 1.3 times" in text(near)) == (found == "may fit")


def test_a_compiled_program_fits_by_its_peak_and_a_refused_one_does_not(images: Plan) -> None:
    """What a compiler lays out beyond the peak need not fit: libtpu compiles some laid out in 1.8 times the peak."""
    room = int(images.memory.room)
    memory = dataclasses.replace(images.memory, peak=room - 1, arena=2 * room)
    compiled = dataclasses.replace(images, tier="compiled", memory=memory)
    assert verdict(compiled) == "fits"
    refused = dataclasses.replace(compiled, memory=dataclasses.replace(memory, arena=0, refused=room + 2**20))
    assert verdict(refused) == "DOES NOT FIT"
    assert "by the compiler, which refused the program" in text(refused)


@pytest.mark.slow
def test_gpus_are_priced_by_the_machine_and_timed_on_its_network(tmp_path: Path) -> None:
    wanted = recipe(tmp_path, "llama3.2-1b", 2048, 16)
    shown = text(quick(wanted, target("h100-16")))
    assert "a3-highgpu-8g has 12.5 GB/s for each GPU" in shown
    assert "list price of a3-highgpu-8g" in shown
    part = quick(wanted, target("h200-4"))
    assert part.money
    assert part.money.per_hour == pytest.approx(8 * 10.60)
    assert "for the 8 chips of a whole a3-ultragpu-8g" in text(part)


@pytest.mark.slow
def test_one_target_is_drawn(in_process: Dtrain, tmp_path: Path) -> None:
    done = in_process("plan", "vit-synthetic-v5e-16", "--on", "v5e-16", "--quick", "--plot", "one.png")
    assert "wrote one.png" in done.stderr
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("name", "why"), [("nosuch/a.png", "does not exist"), ("a.xls", "not an image")])
def test_a_picture_that_cannot_be_written_is_refused_before_the_plan(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(EnvironmentFault, match=why):
        refuse_undrawable(tmp_path / name)


def test_a_picture_without_a_plan_that_fits_is_refused(images: Plan, tmp_path: Path) -> None:
    large = dataclasses.replace(images, memory=dataclasses.replace(images.memory, peak=10**12))
    for made in ([RecipeError("no")], [dataclasses.replace(images, timing=None)], [large]):
        with pytest.raises(EnvironmentFault, match="nothing to plot"):
            draw(made, tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_experts_that_are_sent_mostly_empty_rows_are_named(tmp_path: Path) -> None:
    """2 of 8 experts on 4 devices: 4 blocks with room for every choice, whatever it is."""

    def report(*options: str) -> str:
        return text(quick(recipe(tmp_path, "mixtral-8x7b", 1024, 16, *options), target("v5p-32")))

    wide = ["mesh={fsdp: 4, expert: 4}"]
    assert "experts without a capacity are sent 4 rows for each that holds a token" in report(*wide)
    assert "rows for each" not in report(*wide, "model.experts.capacity=1.25")
    assert "rows for each" not in report(*wide, "model.experts.capacity=3.0")
    assert "rows for each" not in report("mesh={fsdp: 16}")


@pytest.mark.parametrize("name", CHECKS)
def test_an_interval_is_of_that_chip(name: str) -> None:
    chip = next(chip for chip in CHIPS if chip.name == name)
    found = interval(chip, 2.0)
    assert found
    checks = CHECKS[name]
    assert (found.least, found.most, found.runs) == (2 * checks.least, 2 * checks.most, checks.runs)
    assert 0.5 < checks.least <= checks.most < 2
    assert checks.runs > 1


def test_a_chip_without_published_runs_has_none() -> None:
    assert interval(next(chip for chip in CHIPS if chip.name == "v4"), 2.0) is None
    assert interval(None, 2.0) is None


DEFAULT = "precision.reduce=float32"


@pytest.mark.slow
def test_sums_in_bfloat16_are_named_with_the_time_that_they_save(tmp_path: Path) -> None:
    on = target("v5e-4")
    plan = quick(recipe(tmp_path, "gpt2-124m", 1024, 32, DEFAULT, "engine=shard_map"), on)
    found = saving(plan)
    assert found
    assert 0.02 < found.part < 0.5
    assert plan.timing
    assert found.seconds == pytest.approx(found.part * plan.timing.seconds)
    assert "precision.reduce: compute saves about" in found.text
    assert found.text.endswith("gradients are then summed over devices in bfloat16")
    assert found.values["set"] == "precision.reduce=compute"


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["precision.reduce=compute", "precision={compute: float32}"])
def test_a_setting_that_changes_nothing_is_not_named(tmp_path: Path, setting: str) -> None:
    assert saving(quick(recipe(tmp_path, "gpt2-124m", 1024, 32, DEFAULT, setting), target("v5e-4"))) is None


def test_the_bubble_of_a_pipeline_is_named_with_what_reduces_it() -> None:
    on = target("v5e-8")
    recipe = load(Path(__file__).parents[2] / "recipes" / "decoder-tiny.yaml", ["mesh={pipeline: 2, data: 4}"], 8)
    shown = "\n".join(lines(quick(recipe, on)))
    assert "pipeline of 2 stages, 1 microbatch: 50% of the time is bubble; accumulate: 8 reduces it to 11%" in shown
    plain = load(Path(__file__).parents[2] / "recipes" / "decoder-tiny.yaml", ["mesh={data: 8}"], 8)
    assert "bubble" not in "\n".join(lines(quick(plain, on)))


@pytest.mark.slow
def test_a_terminal_shows_that_a_step_is_compiled(tmp_path: Path) -> None:
    lead, follow = pty.openpty()
    command = [sys.executable, "-m", "dtrain", "plan", "mlp-digits", "--on", "cpu-2"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=follow, text=True) as process:
        printed, _ = process.communicate(timeout=200)
    os.close(follow)
    shown = os.read(lead, 100_000).decode()
    os.close(lead)
    assert printed.startswith("mlp-digits on cpu-2")
    assert "compiling the step for cpu-2" in shown and "compiling" not in printed
