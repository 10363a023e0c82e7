"""SIGINT and SIGTERM, from the first lines of dtrain to its last: none is lost, whatever the main thread is doing.

Python calls a signal handler in the main thread alone, between two of its instructions: not while XLA compiles, and
where it interrupts code that holds a lock, also the lock of imports, nothing that needs the lock can be done. An
exception raised by a handler is lost in some callbacks. So each signal wakes a thread, through a pipe, which calls the
current reaction: that notes the request or ends the process. This file is imported before all others and imports
little: until then a signal ends the process as any other.
"""

import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress

Reaction = Callable[[int], object]
"""What is done about the signal of that number; called in a thread, one at a time, or where `held` is left."""

STOPPED, ABORTED = 75, 130
WAIT = 0.05
"""Seconds that the main thread waits for a reaction under way: it may hold what the reaction needs."""
SHOW_CURSOR = b"\x1b[?25h"


def ignore(_number: int) -> None:
    """The reaction where the exit code is decided already."""


def leave_unstarted(number: int) -> None:
    """The reaction of `dtrain run` before it has anything to save."""
    name = signal.Signals(number).name
    leave(
        STOPPED, f"stopped: {name}: stopped before the first step\nhint: run the same command again to start it again\n"
    )


def leave_interrupted(_number: int) -> None:
    """The reaction of the other verbs before they begin."""
    leave(ABORTED, "")


def leave(code: int, text: str) -> None:
    """End the process at once, also while a thread is inside XLA, which does not survive an orderly exit."""
    with suppress(OSError):
        os.write(2, (SHOW_CURSOR if os.isatty(2) else b"") + text.encode())
    os._exit(code)


def _caught(_number: int, _frame: object) -> None:
    """The handler: its number is in the pipe by now."""


class Listener:
    """Catches signals and passes them to `reaction`. An ordinary class: a dataclass takes 20 ms to import."""

    def __init__(self, reaction: Reaction) -> None:
        self.reaction = reaction
        self._lock, self._held = threading.RLock(), 0
        self._numbers, self._before = frozenset[int](), {}
        self._pipe, self._wakeup = (-1, -1), -1
        self._noted = False

    def start(self, numbers: Sequence[int]) -> None:
        """Listen from now on; in the main thread only."""
        self._pipe, self._numbers = os.pipe(), frozenset(numbers)
        for end in self._pipe:
            os.set_blocking(end, False)
        self._wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, _caught) for number in numbers}
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    def stop(self) -> None:
        """Put the handlers of before back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._pipe[1])  # which ends the thread

    def renew(self) -> None:
        """Put the handlers back where a library has replaced them without Python's knowledge."""
        for number in self._numbers:
            signal.signal(number, _caught)

    def release(self) -> None:
        """SIGINT is a KeyboardInterrupt again, and SIGTERM ends the process, as in any program."""
        self.reaction = self._note
        for number in self._numbers:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    def interrupted(self) -> bool:
        """Whether a signal came since `release`: a library may have turned the KeyboardInterrupt into another error."""
        self._take(WAIT)
        return self._noted

    def _note(self, _number: int) -> None:
        self._noted = True

    @contextmanager
    def held(self) -> Iterator[None]:
        """What comes while inside is passed on afterwards."""
        with self._lock:
            self._held += 1
            try:
                yield
            finally:
                self._held -= 1
        self._take(WAIT)

    def _watch(self) -> None:
        with suppress(OSError, ValueError):  # the pipe is closed
            while select.select([self._pipe[0]], [], [])[0] and self._take(-1):
                pass
            os.close(self._pipe[0])

    def _take(self, wait: float) -> bool:
        """React to what is in the pipe; False where nothing will come any more."""
        if not self._lock.acquire(timeout=wait):
            return True
        try:
            if self._held:
                return True
            for number in (numbers := os.read(self._pipe[0], 64)):
                if number in self._numbers:
                    self.reaction(number)
            return bool(numbers)
        except BlockingIOError:
            return True
        finally:
            self._lock.release()


_listeners: list[Listener] = []
"""The one that is at work, where there is one: signals belong to the process as a whole."""


@contextmanager
def held() -> Iterator[None]:
    """A signal that comes while inside is reacted to afterwards."""
    listener = current()
    with listener.held() if listener else nullcontext():
        yield


def current() -> Listener | None:
    """The listener of this process."""
    return _listeners[-1] if _listeners else None


def listen(*, run: bool) -> None:
    """Listen until the process ends. `dtrain run` takes both signals; in other verbs Ctrl-C ends the process."""
    _listeners.append(Listener(leave_unstarted if run else leave_interrupted))
    _listeners[-1].start((signal.SIGINT, signal.SIGTERM) if run else (signal.SIGINT,))


@contextmanager
def reacting(reaction: Reaction, *, several: bool = False) -> Iterator[None]:
    """React so from now on; to the end of the process where `listen` was called, else while inside.

    Of `several` processes that JAX has joined, SIGTERM stays with JAX.
    """
    listener = current()
    if listener or threading.current_thread() is not threading.main_thread():
        if listener:
            listener.reaction = reaction
        yield
        return
    listener = Listener(reaction)
    listener.start((signal.SIGINT,) if several else (signal.SIGINT, signal.SIGTERM))
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
    """The exit code is decided: a signal changes nothing any more."""
    listener = current()
    if listener:
        listener.reaction = ignore
        listener.renew()


def end(code: int) -> None:
    """End the process after all was printed; the interpreter is not taken down, which may crash inside XLA."""
    settle()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
