"""Handle SIGINT and SIGTERM reliably from start to exit of dtrain, whatever the main thread is doing.

Python runs a signal handler only in the main thread and only between two bytecode instructions: not while XLA compiles.
If it interrupts code that holds a lock, such as the import lock, it cannot do anything that needs the lock. Exceptions
that a handler raises are lost in some callbacks. So each signal wakes a thread through a pipe (signal.set_wakeup_fd),
and the thread calls the current reaction, which records the request or ends the process. This module is imported before
all others and imports little, because until `listen` is called a signal has its default effect.
"""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress

Reaction = Callable[[int], object]
"""Called with the number of a signal: in a thread, one call at a time, or in the caller of `held` at its end."""

STOPPED, ABORTED = 75, 130
"""Exit codes."""
WAIT = 0.05
"""Seconds that the main thread waits for a running reaction; not longer, as it may hold a lock the reaction needs."""
SHOW_CURSOR = b"\x1b[?25h"


def ignore(_number: int) -> None:
    """Reaction after the exit code is decided: do nothing."""


def leave_unstarted(number: int) -> None:
    """Reaction of `dtrain run` while there is nothing to save: exit with code 75."""
    name = signal.Signals(number).name
    leave(STOPPED, f"stopped: {name}: stopped before the first step\nhint: run the same command again to start it\n")


def leave_interrupted(_number: int) -> None:
    """Reaction of the other commands: exit with code 130."""
    leave(ABORTED, "")


def leave(code: int, text: str) -> None:
    """Print the text and end the process at once, because a normal exit while a thread runs XLA code may crash."""
    with suppress(OSError):
        os.write(2, (SHOW_CURSOR if os.isatty(2) else b"") + text.encode())
    os._exit(code)


def _caught(_number: int, _frame: object) -> None:
    """Signal handler that does nothing: Python has already written the signal's number to the pipe."""


class Listener:
    """Catches signals and passes them to `reaction`. Not a dataclass, whose import takes 20 ms."""

    def __init__(self, reaction: Reaction) -> None:
        self.reaction = reaction
        self._lock, self._hold_depth = threading.RLock(), 0
        self._numbers, self._previous = frozenset[int](), {}
        self._pipe, self._wakeup = (-1, -1), -1
        self._noted = False
        self.released = False
        self.began = 0.0
        """`time.perf_counter()` when the command was started; 0 for a listener that another program uses."""

    def start(self, numbers: Sequence[int]) -> None:
        """Install the handlers and start the thread. Only the main thread can do this."""
        self._pipe, self._numbers = os.pipe(), frozenset(numbers)
        for end in self._pipe:
            os.set_blocking(end, False)
        self._wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        self._previous = {number: signal.signal(number, _caught) for number in numbers}
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    def stop(self) -> None:
        """Restore the previous handlers and end the thread."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._pipe[1])  # ends the thread

    def renew(self) -> None:
        """Install the handlers again after a library has replaced them in C, unnoticed by Python."""
        for number in self._numbers:
            signal.signal(number, _caught)

    def release(self) -> None:
        """Restore Python's default handlers: SIGINT raises KeyboardInterrupt and SIGTERM ends the process.

        A signal that arrived before, and that the thread had no time for, is still reacted to as before.
        """
        for number in self._numbers:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        self._react(-1)
        self.reaction, self.released = self._note, True

    def interrupted(self) -> bool:
        """Whether a signal arrived after `release`, even if a library replaced KeyboardInterrupt by its own error."""
        self._react(WAIT)
        return self._noted

    def _note(self, _number: int) -> None:
        self._noted = True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Delay the reactions to signals until the end of the context."""
        with self._lock:
            self._hold_depth += 1
            try:
                yield
            finally:
                self._hold_depth -= 1
        self._react(WAIT)

    def _watch(self) -> None:
        with suppress(OSError, ValueError):  # the pipe is closed
            while select.select([self._pipe[0]], [], [])[0] and self._react(-1):
                pass
            os.close(self._pipe[0])

    def _react(self, wait: float) -> bool:
        """React to the signals in the pipe; False at its end. `wait`: seconds to wait for the lock, -1 for no limit."""
        if not self._lock.acquire(timeout=wait):
            return True
        try:
            if self._hold_depth:  # the thread that holds the RLock can enter again: leave the pipe for later
                return True
            for number in (numbers := os.read(self._pipe[0], 64)):
                if number in self._numbers:
                    self.reaction(number)
            return bool(numbers)
        except BlockingIOError:
            return True
        finally:
            self._lock.release()


_last_lines: list[tuple[int, str]] = []
"""File descriptor and text that an interrupt prints before it ends the process, of each open `leaving_at_once`."""


@contextmanager
def leaving_at_once(text: str = "interrupted\n", *, stdout: bool = False) -> Iterator[None]:
    """Within this context there is nothing to lose: an interrupt prints the text of the outermost one and ends the
    process. To raise an exception is not safe: JAX's native code may end the process if one is raised inside it."""
    _last_lines.append((1 if stdout else 2, text))
    try:
        yield
    finally:
        _last_lines.pop()


def leave_if_nothing_is_lost(code: int) -> None:
    """End the process if a `leaving_at_once` is open. It may be called from a signal handler."""
    if not _last_lines:
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, RuntimeError):  # RuntimeError: the handler interrupted a write
            stream.flush()
    file, text = _last_lines[0]
    with suppress(OSError):
        os.write(file, text.encode())
    leave(code, "")


at_end: list[Callable[[], object]] = []
"""Functions that `end` calls. They do what an interrupt may have prevented, and raise nothing."""

_listeners: list[Listener] = []
"""The active listener, if any. Module state, because signal handlers belong to the whole process."""


@contextmanager
def held() -> Iterator[None]:
    """Delay the reactions to signals until the end of the context."""
    listener = current()
    with listener.held() if listener else nullcontext():
        yield


def current() -> Listener | None:
    """The active listener of this process; None if there is none."""
    return _listeners[-1] if _listeners else None


def listen(*, run: bool) -> None:
    """Handle signals until the process ends: with `run` SIGINT and `requests`, for the other commands SIGINT alone."""
    _listeners.append(Listener(leave_unstarted if run else leave_interrupted))
    restart_clock()
    _listeners[-1].start((signal.SIGINT, *requests()) if run else (signal.SIGINT,))


@contextmanager
def leaving_silently() -> Iterator[None]:
    """Within this context a signal ends the process at once, without a message: nobody waits for it."""
    listener = _listeners[-1]
    before, listener.reaction = listener.reaction, lambda _: leave(STOPPED, "")
    try:
        yield
    finally:
        listener.reaction = before


def restart_clock() -> None:
    """Count the time of this process from now on."""
    _listeners[-1].began = time.perf_counter()


def requests() -> tuple[signal.Signals, ...]:
    """The signals that ask a run to save and stop: SIGTERM, and SIGHUP, which a closed terminal or a lost ssh session
    sends, unless it was ignored when the command started (nohup)."""
    hangup = () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGTERM, *hangup)


@contextmanager
def reacting(reaction: Reaction, *, several: bool = False) -> Iterator[None]:
    """Use this reaction from now on: until the process ends if `listen` was called, else within the context.

    A command that handles signals by itself (`Listener.release`) keeps doing so: its runs are not to be resumed.
    `several`: the run has several processes; then SIGTERM is left to the preemption handler of jax.distributed.
    """
    listener = current()
    if listener or threading.current_thread() is not threading.main_thread():
        if listener and not listener.released:
            listener.reaction = reaction
        yield
        return
    listener = Listener(reaction)
    listener.start((signal.SIGINT,) if several else (signal.SIGINT, *requests()))
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
        listener.stop()


def renew() -> None:
    """Catch the signals again after a library has replaced the handlers."""
    listener = current()
    if listener:
        listener.renew()


def settle() -> None:
    """Ignore all further signals, because the exit code is decided."""
    listener = current()
    if listener:
        listener.reaction = ignore
        listener.renew()


def end(code: int) -> None:
    """Flush stdout and stderr and end the process without interpreter shutdown, which may crash inside XLA."""
    settle()
    for function in at_end:
        function()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
