"""Rivals that run in processes of their own, each with the environment that its users have, and take turns."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

FLAG = "--serve"
Costs = tuple[float, float]
"""(wall, CPU) seconds."""
NAME = sys.argv[2] if sys.argv[1:2] == [FLAG] else ""
"""The rival that this process is; empty in the one that compares."""

if NAME.rpartition(": ")[2].startswith("dtrain"):  # what `dtrain run` sets; the others have what their users have
    from dtrain.parallel.devices import configure_environment

    configure_environment()


def serve(make: Callable[[], Callable[[], Costs]]) -> None:
    """Do the work once for every line of standard input, and print what it cost as JSON."""
    out, sys.stdout = sys.stdout, sys.stderr
    try:
        work = make()
    except ImportError as error:
        print(json.dumps({"absent": str(error)}), file=out, flush=True)
        return
    print(json.dumps({"flags": os.environ.get("XLA_FLAGS") or "none"}), file=out, flush=True)
    for _ in sys.stdin:
        print(json.dumps(work()), file=out, flush=True)


def clocked(work: Callable[[], object]) -> Callable[[], Costs]:
    """The work with the seconds that it takes."""

    def run() -> Costs:
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        return time.perf_counter() - wall, time.process_time() - cpu

    return run


REDUCE = ", -reduce"
"""End of the name of a side of dtrain that runs with another value of the flag that dtrain sets."""


class Rival:
    """One of them."""

    def __init__(self, name: str) -> None:
        flags = "--xla_cpu_experimental_ynn_fusion_type=-reduce" if name.endswith(REDUCE) else ""
        environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
        environment |= {"JAX_PLATFORMS": "cpu"}
        self._process = subprocess.Popen(
            [sys.executable, sys.argv[0], FLAG, name], env=environment | ({"XLA_FLAGS": flags} if flags else {}),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        about = self._answer()
        self.absent, self.flags = about.get("absent", ""), about.get("flags", "")

    def cost(self) -> Costs:
        """Let it work once."""
        assert self._process.stdin
        print(file=self._process.stdin, flush=True)
        wall, cpu = self._answer()
        return wall, cpu

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout
        return json.loads(self._process.stdout.readline() or '{"absent": "it died"}')


def duel(rivals: Mapping[str, Rival], rounds: int) -> dict[str, list[Costs]]:
    """The costs of each in each round, in turns; the first round is a warm-up and is dropped. Closes them."""
    present = {}
    for name, rival in rivals.items():
        if rival.absent:
            print(f"{name}: left out, {rival.absent}", flush=True)
        else:
            present[name] = rival
    found: dict[str, list[Costs]] = {name: [] for name in present}
    for turn in range(rounds + 1):
        for name, rival in present.items():
            cost = rival.cost()
            if turn:
                found[name].append(cost)
    for rival in present.values():
        rival.close()
    return found
