"""`dtrain plan` with a number of tokens, a deadline or a budget: which slices train it, and the bill."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from dtrain.cli.arguments import refuse_code
from dtrain.core.errors import EnvironmentFault, RecipeError

Tokens = Annotated[
    str,
    typer.Option(metavar="2T", help="Tokens to train on; shows what trains them, in how many days, for how much."),
]
Deadline = Annotated[str, typer.Option(metavar="30d", help="Longest time for it: 30d, 12h, 1d12h.")]
Budget = Annotated[str, typer.Option(metavar="200k", help="Most dollars for it.")]
PriceFile = Annotated[
    Path | None,
    typer.Option(help="YAML file with prices, spot or committed, and rates of failures: docs/bill.md."),
]
WhatIf = Annotated[
    bool,
    typer.Option("--what-if", help="Also show the first of these with another batch, precision, engine or mesh."),
]

SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
HOURS = {"m": 1 / 60, "h": 1.0, "d": 24.0, "w": 168.0}
NUMBER = r"\d+(?:[_,]\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?"


def amount(text: str, option: str) -> float:
    """A positive number with an optional scale: 2T, 1.5e12, 200k, 1,000,000. RecipeError names the option."""
    found = re.fullmatch(rf"\$?({NUMBER})\s*([kmbgt]?)", text.strip(), re.IGNORECASE)
    value = float(re.sub("[_,]", "", found[1])) * SCALES[found[2].lower()] if found else 0.0
    if not 0 < value < 1e30:
        raise RecipeError(f"{option} {text}: expected a positive number", "e.g. 2T, 300B, 1.5e12, 200k")
    return value


def hours(text: str, option: str) -> float:
    """A duration in hours: 30d, 12h, 90m, 2w, 1d12h. RecipeError names the option."""
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*([mhdw])", text.strip(), re.IGNORECASE)
    value = sum(float(number) * HOURS[unit.lower()] for number, unit in parts)
    if not re.fullmatch(r"(\d+(\.\d+)?\s*[mhdw]\s*)+", text.strip(), re.IGNORECASE) or not 0 < value < 1e6:
        raise RecipeError(f"{option} {text}: expected a duration", "e.g. 30d, 12h, 90m, 2w, 1d12h")
    return value


def show_bills(
    recipe: str,
    overrides: Sequence[str],
    run_code: bool,
    on: str,
    slices: int,
    wanted: tuple[str, str, str],
    price_file: Path | None,
    changes: bool,
    as_json: bool,
) -> int:
    """Print the bills, with `changes` also what changes of the recipe would do to the first.

    The exit code: 3 if nothing that was planned is sure to meet the limits. `wanted`: tokens, deadline and budget as
    text."""
    import json

    from dtrain.core.shipped import find
    from dtrain.plan.bill import Wanted, bills, targets, what_if
    from dtrain.plan.bill_report import bill_lines, bill_values, what_if_lines
    from dtrain.plan.rates import Rates, read_rates
    from dtrain.recipe.load import load

    tokens, deadline, budget = wanted
    limits = Wanted(
        amount(tokens, "--tokens") if tokens else None,
        hours(deadline, "--deadline") if deadline else None,
        amount(budget, "--budget") if budget else None,
    )
    rates = read_rates(price_file) if price_file else Rates()
    chosen = targets(on, slices)
    if not all(getattr(one, "chip", one) for one in chosen):
        raise RecipeError("--on: a bill is of slices or GPUs, not of simulated devices", "e.g. --on v5e,v5p-128")
    loaded = load(find(recipe), overrides)
    refuse_code(loaded.user_code, run_code)

    def say(text: str) -> None:
        typer.echo(text, err=True)

    found, failed = bills(loaded, chosen, slices, limits, rates, say)
    others = what_if(found[0], say) if changes and found else iter(())
    if as_json:
        values = {"bills": [bill_values(bill, limits) for bill in found], "failed": failed}
        if changes:
            values["what_if"] = {
                text: {"failed": bill} if isinstance(bill, str) else bill_values(bill, limits) for text, bill in others
            }
        typer.echo(json.dumps(values, indent=2))
    else:
        for line in bill_lines(found, failed, limits):
            typer.echo(line)
        for line in what_if_lines(found[0], others) if changes and found else ():
            typer.echo(line)
    if not found or found[0].misses(limits):
        typer.echo("nothing that was planned is sure to meet the limits, and to fit", err=True)
        return EnvironmentFault.exit_code
    return 0
