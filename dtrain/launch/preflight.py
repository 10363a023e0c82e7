"""What stands in the way of a start, read from what the hosts answer."""

from collections.abc import Collection, Sequence

from dtrain.launch.fanout import Answer

SKEW = 5.0
"""Seconds by which a clock may differ from this machine's, besides what the time between request and answer hides."""


def in_the_way(looked: Sequence[Answer], seen: Collection[int], runs: str) -> list[str]:
    """Every problem, each with its host: of one alone first, then between them; `seen` are the ranks whose marks the
    first host has in its folder of runs."""
    problems = [f"{one.machine.name}: {one.reply.problem}" for one in looked if one.reply.problem]
    heard = [one for one in looked if not one.reply.problem]
    problems += [f"{one.machine.name}: {line}" for one in heard for line in one.reply.problems]
    problems += [
        f"{one.machine.name} has {package} {version}, {heard[0].machine.name} has {heard[0].reply.versions[package]}"
        for one in heard[1:]
        for package, version in one.reply.versions.items()
        if version != heard[0].reply.versions[package]
    ]
    apart = [one.machine.name for one in looked if one.machine.rank not in seen and not problems]
    shared = f"{runs} of {looked[0].machine.name}: it must be one shared folder"
    return problems + [f"{name} does not write into the {shared}" for name in apart]


def skewed(looked: Sequence[Answer]) -> list[str]:
    """Hosts whose clocks are off, compared with the time at which each was asked."""
    off = {one.machine.name: one.reply.time - one.asked for one in looked}
    wrong = [one.machine.name for one in looked if abs(off[one.machine.name]) > one.uncertainty + SKEW]
    if len(wrong) == len(looked) > 1:
        return [f"this machine's clock differs from those of all hosts, by {min(off.values()):+.0f} s and more"]
    return [f"the clock of {name} is {off[name]:+.0f} s off; times in its log are wrong" for name in wrong]
