"""From a number of tokens to days and dollars."""

import dataclasses
import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtrain.cli.plan_bill import amount, hours
from dtrain.core.errors import RecipeError
from dtrain.core.shipped import find
from dtrain.core.slices import target
from dtrain.plan.bill import MAY_FIT, Bill, Wanted, bills, targets, what_if
from dtrain.plan.bill_report import bill_lines, bill_values, what_if_lines
from dtrain.plan.rates import Rates, Reliability, read_rates
from dtrain.plan.report import CHECKS
from dtrain.recipe.load import load
from tests.conftest import Dtrain

QUIET = {"say": lambda _: None}


def test_amounts_are_read_as_people_write_them() -> None:
    assert [amount(text, "--tokens") for text in ("2T", "300b", "1.5e12", "200k", "$1,000,000", "7")] == [
        2e12, 3e11, 1.5e12, 2e5, 1e6, 7.0
    ]  # fmt: skip
    assert [hours(text, "--deadline") for text in ("30d", "12h", "90m", "2w", "1d12h", "1d 12h")] == [
        720, 12, 1.5, 336, 36, 36
    ]  # fmt: skip
    for text in ("", "T", "2X", "-3", "0", "1,00", "nan", "1e99"):
        with pytest.raises(RecipeError, match="--tokens"):
            amount(text, "--tokens")
    for text in ("", "30", "d", "3x", "0h", "1d-2h"):
        with pytest.raises(RecipeError, match="--deadline"):
            hours(text, "--deadline")


def simulated(work: float, interval: float, run: Reliability, random: np.random.Generator) -> float:
    """The wall time of so many seconds of steps, with failures drawn at random."""
    wall, saved = 0.0, 0.0
    failing = random.exponential(1 / run.failures)
    while saved < work:
        piece = min(interval, work - saved) + run.stall
        if failing > piece:
            wall, failing, saved = wall + piece, failing - piece, saved + piece - run.stall
        else:
            wall += failing + run.restart
            failing = random.exponential(1 / run.failures)
    return wall


@pytest.mark.parametrize("mean", [3600.0, 20_000.0])
def test_the_loss_by_failures_is_that_of_a_simulation(mean: float) -> None:
    run, random = Reliability(1 / mean, stall=20.0, restart=200.0), np.random.default_rng(0)
    for interval in (300.0, run.best_interval):
        found = np.mean([simulated(2e5, interval, run, random) for _ in range(60)]) / 2e5
        assert run.stretch(interval) == pytest.approx(found, rel=0.02)


def test_the_best_interval_loses_least() -> None:
    run = Reliability(1 / 10_000, stall=5.0, restart=60.0)
    least = min(run.stretch(interval) for interval in np.geomspace(10, 10_000, 400))
    assert run.stretch(run.best_interval) == pytest.approx(least, rel=1e-3)
    assert Reliability(1 / 10, stall=5.0, restart=60.0).stretch(100.0) == math.inf


def bill_of(rates: Rates = Rates(), wanted: Wanted = Wanted(tokens=1e12), **changes: Any) -> Bill:  # noqa: B008
    recipe = load(find("decoder-tiny"), ["batch=256", *(f"{key}={value}" for key, value in changes.items())])
    [found], failed = bills(recipe, [target("v5e-16")], 1, wanted, rates, **QUIET)
    assert not failed
    return found


def test_a_bill_is_steps_times_their_time_and_the_price_of_the_chips() -> None:
    found = bill_of(**{"data.test": 0.0})
    timing = found.plan.timing
    assert timing and timing.tokens == 256 * 128
    assert found.steps == math.ceil(1e12 / timing.tokens)
    calm = dataclasses.replace(found, rates=Rates(failures=0.0, storage=0.0))
    stall = calm.reliability(0.0).stall
    assert calm.plan.checkpoint == pytest.approx(
        12 * found.plan.parameters, rel=1e-3
    )  # float32 parameters and AdamW's moments
    assert stall == pytest.approx(calm.plan.checkpoint / 4 / 6e9)  # four hosts
    range_of = CHECKS["v5e"]
    least, most = (
        found.steps * part * timing.seconds / 3600 * (1 + stall / 600) for part in (range_of.least, range_of.most)
    )
    assert calm.hours == pytest.approx((least, most))
    assert calm.dollars == pytest.approx((16 * 1.20 * least, 16 * 1.20 * most))
    assert found.hours[0] > calm.hours[0]
    assert found.failures == pytest.approx((2.0e-5 * 16 * found.hours[0], 1.24e-4 * 16 * found.hours[1]))


def test_a_checkpoint_of_adapters_is_without_its_base() -> None:
    words = ["init={run: base}", "lora={rank: 2, targets: ['blocks.mlp.*']}", "batch=256"]
    [found], _ = bills(load(find("decoder-tiny"), words), [target("v5e-1")], 1, Wanted(tokens=1e9), Rates(), **QUIET)
    assert 0 < found.plan.checkpoint < 0.4 * 4 * found.plan.parameters < bill_of().plan.checkpoint


def test_a_run_that_fails_faster_than_it_recovers_meets_no_limit() -> None:
    found = bill_of(Rates(failures=100.0))
    assert (found.goodput, found.misses(Wanted())) == ((0.0, 0.0), ["never ends"])
    assert any("never ends" in line for line in bill_lines([found], [], Wanted()))
    assert bill_values(found, Wanted())["hours"] == [None, None]


def test_every_rate_changes_the_bill(tmp_path: Path) -> None:
    base = bill_of()
    assert base.dollars
    for text, more in (
        ("prices: {v5e: 2.40}", "dollars"),
        ("failures: 1e-3", "hours"),
        ("restart: 500", "hours"),
        ("staging: 1e-4", "hours"),
        ("upload: 1e-5", "hours"),
        ("storage: 3.0", "dollars"),
    ):
        (tmp_path / "rates.yaml").write_text(f"date: 2026-11-01\nwhat: spot\n{text}\n")
        other = dataclasses.replace(base, rates=read_rates(tmp_path / "rates.yaml"))
        assert other.dollars and other.dollars[0] > base.dollars[0]
        assert (other.hours[0] > base.hours[0]) == (more == "hours")
    assert base.plan.target.chip
    assert other.rates.source(base.plan.target.chip).startswith("on-demand list price")
    (tmp_path / "rates.yaml").write_text("date: 2026-11-01\nwhat: spot\nprices: {v5e: 1}\n")
    assert read_rates(tmp_path / "rates.yaml").source(base.plan.target.chip) == "spot, 2026-11-01"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("restrat: 3", "did you mean 'restart'"),
        ("prices: {v5x: 1}", "there is no such chip"),
        ("spot: {v5x: 1}", "spot.v5x: there is no such chip"),
        ("date: yesterday", "is no date"),
        ("restart: -1", "restart"),
        ("[1]", "expected a mapping"),
    ],
)
def test_a_mistake_in_the_rates_is_found(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "rates.yaml").write_text(text + "\n")
    with pytest.raises(RecipeError, match=message):
        read_rates(tmp_path / "rates.yaml")


def test_the_time_between_saves_is_that_of_the_recipe() -> None:
    assert bill_of().interval == 600
    step = bill_of().step.least
    assert bill_of(**{"checkpoint.every": 7}).interval == pytest.approx(7 * step)
    only = bill_of(**{"checkpoint.minutes": 0})
    assert only.interval == pytest.approx(only.steps * step)


def test_limits_are_held_at_the_most_that_is_expected() -> None:
    found = bill_of()
    assert found.dollars
    middle = sum(found.hours) / 2
    for wanted, expected in (
        (Wanted(hours=found.hours[1] * 1.01), []),
        (Wanted(hours=middle), ["may be late"]),
        (Wanted(hours=found.hours[0] / 2), ["late"]),
        (Wanted(dollars=found.dollars[1] * 1.01), []),
        (Wanted(dollars=found.dollars[0] / 2, hours=1e-9), ["late", "costs more"]),
    ):
        assert found.misses(wanted) == expected


def test_sizes_of_a_family_are_tried_from_the_smallest_that_is_in_time() -> None:
    model = "model={kind: decoder, vocab: 256, context: 512, layers: 2, width: 1024, heads: 8, remat: full}"
    recipe = load(find("decoder-tiny"), [model, "data.length=512", "batch=128", "precision.compute=bfloat16"])

    def planned(wanted: Wanted, names: str = "v5e") -> dict[str, Bill]:
        found, _ = bills(recipe, targets(names, 1), 1, wanted, Rates(), **QUIET)
        return {bill.plan.target.name: bill for bill in found}

    [single] = planned(Wanted(tokens=1e11), "v5e-1").values()
    hurried = planned(Wanted(tokens=1e11, hours=single.hours[1] / 6))
    first = next(iter(hurried.values()))
    assert single.hours[1] / 12 < first.hours[1] < single.hours[1] / 6  # the smallest that is in time is the cheapest
    assert not first.misses(Wanted(hours=single.hours[1] / 6))
    assert {"v5e-1", "v5e-4"}.isdisjoint(hurried) or hurried["v5e-1"].misses(Wanted(hours=single.hours[1] / 6))
    assert list(hurried)[-1] == "v5e-1"  # planned, and late
    assert {getattr(one, "name", "") for one in targets("", 1)} >= {"v5e", "v5p", "h100"}


def test_what_if_changes_one_thing_at_a_time() -> None:
    base = bill_of(Rates(spot={"v5e": 0.5}, spot_failures=0.01))
    assert base.plan.timing
    others = dict(what_if(base, QUIET["say"]))
    assert {"spot machines", "batch=512", "batch=128", "precision.compute=bfloat16"} < set(others)
    assert "precision.matmul=int8" in others  # twice as fast on v5e
    assert any(text.startswith("mesh ") for text in others) and any("shard_map" in text for text in others)
    for text, other in others.items():
        assert isinstance(other, Bill) and other.plan.timing, text
        assert other.steps * other.plan.timing.tokens == pytest.approx(base.steps * base.plan.timing.tokens, rel=1e-3)
    spot, half = others["spot machines"], others["batch=128"]
    assert isinstance(spot, Bill) and isinstance(half, Bill)
    assert spot.per_hour == pytest.approx(16 * 0.5)
    assert spot.goodput[0] < base.goodput[0]
    assert half.steps == 2 * base.steps


def test_what_cannot_be_planned_is_named_with_the_reason() -> None:
    recipe = load(find("decoder-tiny"), ["batch=4"])
    found, failed = bills(recipe, [target("v5e-256")], 1, Wanted(tokens=1e9), Rates(), **QUIET)
    assert not found
    assert failed == ["v5e-256: a batch of 4 does not split over the 256 devices of v5e-256"]

    pictures = load(find("mlp-digits"))
    with pytest.raises(RecipeError, match="have no tokens"):
        bills(pictures, [target("v5e-1")], 1, Wanted(tokens=1e9), Rates(), **QUIET)


def test_the_command_prints_the_bill_and_says_if_a_limit_is_missed(in_process: Dtrain) -> None:
    plain = in_process("plan", "decoder-tiny", "--tokens", "1B", "--on", "v5e-4", "--deadline", "30d")
    assert "v5e-4 (4 v5e chips, 2x2): 488,282 steps of 2,048 tokens, 1,000,001,536 tokens in all" in plain.stdout
    assert "loses least (Young/Daly)" in plain.stdout
    values = json.loads(in_process("plan", "decoder-tiny", "--tokens", "1B", "--on", "v5e-4", "--json").stdout)
    [bill] = values["bills"]
    assert (bill["target"], bill["tokens"], bill["misses"]) == ("v5e-4", 1_000_001_536, [])
    words = ["plan", "decoder-tiny", "mesh={data: 1, tensor: 2}", "--tokens", "1B", "--on", "v5e-8", "--slices", "2"]
    several = in_process(*words).stdout
    assert "\n2 x v5e-8  " in several
    [named] = re.findall(r"next: dtrain (plan) RECIPE (.*) mesh='(.*)'   \(compiles", several)
    again = in_process(named[0], *words[1:3], *named[1].split(), f"mesh={named[2]}", "--quick").stdout
    assert "on 2 x v5e-8 (16 v5e chips, 2x4): fits" in again
    missed = in_process("plan", "decoder-tiny", "--tokens", "1T", "--on", "v5e-4", "--budget", "1", code=3)
    assert "costs more" in missed.stdout
    assert "sure to meet the limits" in missed.stderr
    for wrong in (
        ["--search"],
        ["--price", "2"],
        ["--against", "x"],
        ["--out", "x"],
        ["--within", "1"],
        ["--jobs", "2"],
    ):
        assert "cannot be combined" in in_process("plan", "decoder-tiny", "--tokens", "1B", *wrong, code=2).stderr
    assert "goes with" in in_process("plan", "decoder-tiny", "--price-file", "x.yaml", code=2).stderr


@pytest.mark.slow
def test_a_run_records_the_plan_of_its_step_for_the_report(dtrain: Dtrain, tmp_path: Path) -> None:
    plan = json.loads(dtrain("plan", "mlp-digits", "name=a", "--on", "v5e-1", "--quick", "--json").stdout)
    folder = tmp_path / "runs" / "a" / "plans"
    folder.mkdir(parents=True)
    (folder / "v5e-1-compiled.json").write_text(json.dumps(plan | {"device_kinds": ["cpu"], "step_seconds": 1e-4}))
    done = dtrain("run", "mlp-digits", "name=a", "epochs=3")
    assert "planned 0.1 ms a step (v5e-1, quick), measured" in done.stderr
    record = json.loads((tmp_path / "runs" / "a" / "run.json").read_text())
    assert record["planned"] == {"target": "v5e-1", "tier": "quick", "step_s": 1e-4, "dollars_hour": 1.2}
    assert "spent at $1.20 an hour, $0.00 planned for the steps (v5e-1, quick): " in dtrain("report", "a").stdout


@pytest.mark.nightly
def test_another_remat_policy_is_taken_where_that_of_the_recipe_does_not_fit() -> None:
    recipe = load(find("llama3-8b-pretrain-v5p-128"), ["model.remat=none", "engine=jit", "batch=512"])
    [bill], failed = bills(recipe, [target("v5p-128")], 1, Wanted(tokens=1e12), Rates(), **QUIET)
    assert not failed
    assert bill.plan.fits
    assert bill.changes.keys() == {"model"}
    remat = bill.changes["model"]["remat"]
    assert remat == bill.plan.recipe.model.remat  # pyright: ignore[reportAttributeAccessIssue]
    shown = list(bill_lines([bill], [], Wanted(tokens=1e12)))
    (word,) = re.findall(r"(model\.remat=[^ ].*?)   \(", "\n".join(shown))
    assert f"{MAY_FIT}, with {word}" in shown[1]
    (override,) = shlex.split(word)
    assert load(find("llama3-8b-pretrain-v5p-128"), [override]).model == bill.plan.recipe.model


@pytest.mark.nightly
def test_sizes_that_are_too_small_are_named() -> None:
    recipe = load(find("llama3-8b-pretrain-v5p-128"), ["model.preset=llama3.2-1b", "batch=64"])
    found, failed = bills(recipe, targets("v5e", 1)[:4], 1, Wanted(tokens=1e9), Rates(), **QUIET)
    smallest = min(bill.plan.target.chips for bill in found)
    assert failed == [f"v5e-1 to v5e-{smallest // 2}: too small for the run"]


def test_evaluations_take_a_third_of_the_time_of_a_training_example() -> None:
    """Twice a ninth of the rows that are trained on, by default; then what the recipe says."""
    base = bill_of(**{"evaluate.every": 0})
    assert base.evaluations == (1, pytest.approx(1 / 9 / 3))
    assert bill_of(**{"evaluate.every": "null"}).evaluations == (2, pytest.approx(2 / 9 / 3))
    assert bill_of(**{"evaluate.every": "null", "data.test": 0.001}).evaluations == (10, pytest.approx(10 / 999 / 3))
    assert bill_of(**{"evaluate.every": 7}).evaluations is None  # of texts, how many is not known
    tokens = {"data": "{kind: tokens, files: [x.bin], length: 128, test: 0.001}"}
    often = bill_of(**tokens, **{"evaluate.every": 1_000_000})
    assert often.evaluations == (31, pytest.approx(31 / 999 / 3))
    less = bill_of(**{"data.test": 0.0, "evaluate.every": 0})
    assert less.evaluations == (0, 0.0)
    assert base.hours[0] == pytest.approx(less.hours[0] * (1 + 1 / 27))
    named = bill_of(**{"data.test_files": "[x.txt]"})
    assert named.evaluations is None
    assert any("not counted    evaluation, " in line for line in bill_lines([named], [], Wanted()))


def test_epochs_say_how_often_the_same_examples_are_evaluated() -> None:
    epochs = {"steps": "null", "evaluate.every": 0, "optimizer.schedule": "constant"}
    once = bill_of(wanted=Wanted(), **epochs, epochs=1)
    often = bill_of(wanted=Wanted(), **epochs, epochs=4)
    assert (once.passes, often.passes) == (1, 4)
    assert once.evaluations and often.evaluations
    assert often.evaluations[1] == pytest.approx(once.evaluations[1] / 4)
    assert bill_of(wanted=Wanted(tokens=1e12), **epochs, epochs=4).passes == 1


def test_files_of_tokens_are_read_before_the_first_step() -> None:
    words = {"data": "{kind: tokens, files: [x.bin], length: 128, dtype: uint32, test: 0.5}"}
    every: dict[str, Any] = {"evaluate.every": 0}
    found, texts = bill_of(**words, **every), bill_of(**{"data.test": 0.5}, **every)
    assert found.plan.timing
    assert found.read_bytes == pytest.approx(found.steps * found.plan.timing.tokens * 4 / 0.5)
    assert texts.read_bytes == 0
    assert found.hours[0] - texts.hours[0] == pytest.approx(found.read_bytes / 1e9 / 3600)
    slow = dataclasses.replace(found, rates=Rates(upload=0.1))
    assert slow.read == pytest.approx(10 * found.read)
    assert any("a data.cache that all hosts share divides that by their number, 4" in line
               for line in bill_lines([found], [], Wanted()))  # fmt: skip


def test_what_only_may_fit_meets_no_limit_surely() -> None:
    """A quick plan that fits by less than what compilers took beyond such plans."""
    found = bill_of()
    full = dataclasses.replace(found.plan.memory, peak=int(0.95 * found.plan.memory.room))
    close = dataclasses.replace(found, plan=dataclasses.replace(found.plan, memory=full))
    assert close.plan.fits and not close.plan.surely_fits
    assert (found.misses(Wanted()), close.misses(Wanted())) == ([], [MAY_FIT])
    shown = list(bill_lines([found, close], [], Wanted()))
    assert shown[2].endswith(f"  {MAY_FIT}") and not shown[1].endswith(MAY_FIT)
    assert list(what_if_lines(found, [("as full", close)]))[-1].endswith("+0%, may fit")
    assert bill_values(close, Wanted())["misses"] == [MAY_FIT]
