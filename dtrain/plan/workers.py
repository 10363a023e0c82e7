"""Make plans in separate processes: several at once, and a crash of the compiler ends only its own process."""

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
from dtrain.core.signals import leaving_at_once
from dtrain.core.slices import Target
from dtrain.plan.plan import Plan, plan, quick
from dtrain.recipe.recipe import Recipe

Outcome = Plan | DtrainError


@dataclass(frozen=True)
class PlanJob:
    """One plan to make."""

    recipe: Recipe
    target: Target
    quick: bool = False
    price: float | None = None

    def make(self) -> Outcome:
        """The plan, or the error that prevents it. An interrupt ends the process."""
        try:
            with leaving_at_once():
                return (quick if self.quick else plan)(self.recipe, self.target, self.price)
        except DtrainError as error:
            return error


def outcomes(jobs: Sequence[PlanJob], workers: int) -> Iterator[tuple[int, Outcome]]:
    """Yield the index of each job with its plan or error, in order of completion.

    If the caller closes the generator or is interrupted, the worker processes are killed.
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
        outcome = ready.recv()
    except EOFError:
        process.join()
        code = process.exitcode or 0
        reason = f"signal {-code}" if code < 0 else f"exit code {code}"
        return EnvironmentFault(
            f"the compiler's process ended unexpectedly ({reason})",
            "it may have run out of memory (see `dtrain doctor`); --quick plans without compiling",
        )
    process.kill()  # the result is complete; libtpu logs an error on any signal that it can catch
    process.join()
    if isinstance(outcome, Exception) and not isinstance(outcome, DtrainError):
        raise outcome
    return outcome


def _work(job: PlanJob, connection: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides when to stop
    exit_with_caller()
    with suppress(OSError):
        os.nice(5)
    try:
        outcome = job.make()
    except Exception as error:
        outcome = error
    with suppress(BrokenPipeError):  # the caller has closed its end
        connection.send(outcome)
