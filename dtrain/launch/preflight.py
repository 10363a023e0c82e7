"""What stands in the way of a start, read from what the machines say of themselves."""

from collections.abc import Sequence
from statistics import median

from dtrain.launch.fanout import Answer

THERE = "runs here already"
ROOM = 1e9
"""Bytes that must be free where checkpoints go."""
SKEW = 5.0
"""Seconds by which clocks may differ before it is told."""


def in_the_way(looked: Sequence[Answer], met: Sequence[Answer], runs: str) -> list[str]:
    """Every problem, each with its machine: of one alone first, then between them."""
    problems = [f"{one.machine.name}: {one.problem}" for one in looked if one.problem]
    heard = [one for one in looked if not one.problem]
    problems += [f"{one.machine.name}: {line}" for one in heard for line in _alone(one, runs, len(looked))]
    problems += _other_versions(heard)
    if not problems:
        every = [one.machine.rank for one in looked]
        apart = [one.machine.name for one in met if one.problem or one.value["seen"] != every]
        problems += [f"{name} does not see the {runs} of the others: it must be one shared folder" for name in apart]
    return problems


def skewed(looked: Sequence[Answer]) -> list[str]:
    """Machines whose clocks are off."""
    middle = median(one.value["time"] for one in looked)
    return [
        f"the clock of {one.machine.name} is {one.value['time'] - middle:+.0f} s off; its log will read oddly"
        for one in looked
        if abs(one.value["time"] - middle) > SKEW
    ]


def _alone(one: Answer, runs: str, machines: int) -> list[str]:
    found = list(one.value["problems"])
    if machines > 1 and not one.value["resolves"]:
        found.append(f"it does not know its own name, {one.value['host']}: add it to /etc/hosts")
    if one.value.get("free", ROOM) < ROOM:
        found.append(f"{one.value['free'] / 1e9:.1f} GB free in {runs}")
    return found


def _other_versions(heard: Sequence[Answer]) -> list[str]:
    """Where packages differ from those of the first machine."""
    return [
        f"{one.machine.name} has {package} {version}, {heard[0].machine.name} has {heard[0].value['versions'][package]}"
        for one in heard[1:]
        for package, version in one.value["versions"].items()
        if version != heard[0].value["versions"][package]
    ]
