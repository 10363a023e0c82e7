"""The rows of `dtrain launch list`, one for each launch record."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dtrain.launch.job import LaunchJob, Row

AT_ONCE = 16
"""Targets that are queried in parallel."""
DAY, HOUR, MINUTE = 86400, 3600, 60


def launches(runs: Path, state: bool) -> list[dict[str, str]]:
    """A row of strings for each record, newest first; with `state`, the targets are queried in parallel."""
    from concurrent.futures import ThreadPoolExecutor

    from dtrain.launch import registry

    records = registry.records(runs)
    if not state:
        return [_row(record, [], "") for record in records]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [_row(record, *answer) for record, answer in zip(records, list(pool.map(_answer, records)), strict=True)]


def _answer(record: "LaunchJob") -> "tuple[list[Row], str]":
    """The target's rows, and the problem if it could not be queried."""
    from dtrain.cli.launch_lookup import target_of
    from dtrain.core.errors import DtrainError

    try:
        return target_of(record).status(record), ""
    except DtrainError as error:
        return [], f"unknown: {error.message.splitlines()[0]}"


def _row(record: "LaunchJob", rows: "list[Row]", problem: str) -> dict[str, str]:
    states = sorted({row.state for row in rows})
    paid = next((row.seconds for row in rows if row.seconds is not None), None)
    cost = f"${paid / HOUR * record.dollars_hour:,.2f}" if paid is not None and record.dollars_hour else ""
    return {
        "name": record.name,
        "target": record.target.get("kind", ""),
        "state": problem or ", ".join(states),
        "owner": record.owner,
        "age": age(time.time() - record.since),
        "cost": cost,
    }


def age(seconds: float) -> str:
    """A duration in its two largest units: 3d 4h, 2h 5m, 12m."""
    whole = max(int(seconds), 0)
    if whole >= DAY:
        return f"{whole // DAY}d {whole % DAY // HOUR}h"
    if whole >= HOUR:
        return f"{whole // HOUR}h {whole % HOUR // MINUTE}m"
    return f"{whole // MINUTE}m"
