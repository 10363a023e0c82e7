"""Plans made in processes of their own: several at once, and one whose compiler dies takes nobody with it."""

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

from dtrain.core.errors import DtrainError, EnvironmentFault
from dtrain.core.parent import exit_with_caller
from dtrain.core.slices import Target
from dtrain.plan.plan import Plan, plan, quick
from dtrain.recipe.recipe import Recipe

Outcome = Plan | DtrainError


@dataclass(frozen=True)
class PlanJob:
    """One plan to be made."""

    recipe: Recipe
    target: Target
    quick: bool = False
    price: float | None = None

    def make(self) -> Outcome:
        """The plan, or why there is none."""
        try:
            return (quick if self.quick else plan)(self.recipe, self.target, self.price)
        except DtrainError as error:
            return error


def outcomes(jobs: Sequence[PlanJob], workers: int) -> Iterator[tuple[int, Outcome]]:
    """The number of each job with what came of it, as they are done.

    Where the caller stops listening, or is interrupted, the processes are ended.
    """
    context, waiting = multiprocessing.get_context("spawn"), list(enumerate(jobs))
    running: dict[Any, tuple[int, BaseProcess]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                number, job = waiting.pop(0)
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(job, theirs), daemon=True)
                process.start()
                theirs.close()
                running[ours] = (number, process)
            for ready in wait(list(running)):
                number, process = running.pop(ready)
                yield number, _received(ready, process)
    finally:
        for _, process in running.values():
            process.kill()


def _received(ready: Any, process: BaseProcess) -> Outcome:
    try:
        found = ready.recv()
    except EOFError:
        process.join()
        code = process.exitcode or 0
        reason = f"signal {-code}" if code < 0 else f"exit code {code}"
        return EnvironmentFault(
            f"the compiler died ({reason})", "it may lack memory: `dtrain doctor`; --quick compiles nothing"
        )
    process.kill()  # it has said all; on its way out libtpu would complain of a lesser signal
    process.join()
    if isinstance(found, Exception) and not isinstance(found, DtrainError):
        raise found
    return found


def _work(job: PlanJob, back: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides when to stop
    exit_with_caller()
    with suppress(OSError):
        os.nice(5)
    try:
        found = job.make()
    except Exception as error:
        found = error
    with suppress(BrokenPipeError):  # nobody listens any more
        back.send(found)
