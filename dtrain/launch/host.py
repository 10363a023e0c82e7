"""What keeps a run on a host of the cloud, where nobody is asked: python -m dtrain.launch.host JOB

It waits until all hosts are there, runs `dtrain run`, says how it stands and what it prints in the run's folder,
has it save when the machine is about to be taken, when it was asked to stop and when the money is spent, and gives
the machines back when it is over. It ends as the run did; its unit starts it again after 75 and a death.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dtrain import beat
from dtrain.errors import DtrainError, EnvironmentFault, Exhausted, Hung
from dtrain.folder import Folder, overwrite, saved_steps
from dtrain.launch import google, roll
from dtrain.launch.seat import Seat, seat_of
from dtrain.launch.voice import SAID, Voice

PREEMPTED = 75
FINAL = {0, *range(2, Exhausted.exit_code + 1)}
"""Exit codes after which another start would end the same way."""
TICK = 1.0
QUIET = 120.0
"""Seconds in which the other hosts have said how they ended."""
INSIST = 540.0
"""Seconds in which it asks to be taken away, again and again; then it shuts itself down."""
PAUSE = 30.0
Told = dict[str, Any]


def main() -> int:
    """Keep the run of one job; its exit code, 0 where another start is not wanted."""
    path = Path(sys.argv[1])
    try:
        told = json.loads(path.read_text())
        host = Host(told, path.parent, seat_of(told))
    except (DtrainError, OSError, ValueError) as error:  # the unit starts it again
        print(f"this host does not know its place yet: {error}", flush=True)
        return PREEMPTED
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: host.leave())
    try:
        code = host.keep()
    except DtrainError as error:
        print(f"error: {error.message}", flush=True)
        code = host.end(error.exit_code, error.message)
    if host.over:
        host.give_back()
    return code


@dataclass
class Host:
    """One host of a run. `place` is the run's launch folder, which all hosts see."""

    told: Told
    place: Path
    seat: Seat
    child: subprocess.Popen[bytes] | None = None
    asked: bool = False
    """It must go: the machine is taken, or the system ends."""
    stopped: str = ""
    """Why it is over before it is done."""
    over: bool = False
    deaths: int = 0
    reached: int = -1
    """The newest step that was saved when this start began."""
    _counted: float = -SAID

    def __post_init__(self) -> None:
        self.voice = Voice(self.place, self.told["launch"], self.seat)

    @property
    def run(self) -> Folder:
        """The run's own folder."""
        return Folder(self.place.parent)

    def keep(self) -> int:
        """One start of the run, from the first sign of all hosts to its end."""
        before = roll.read(self.place, self.told["launch"]).get(self.seat.rank)
        if before and before.code is not None:  # the machine was started again after the end
            self.over = True
            return 0
        self.reached = self._saved()
        self.deaths = before.deaths if before and before.saved == self.reached else 0
        code = self._gathered()
        if code is not None:
            return self.end(code, self.stopped)
        secrets = {name: google.secret(self.told["project"], name) for name in self.told["environment"]}
        if self.asked:
            return PREEMPTED
        return self._ended(self._ran(secrets))

    def leave(self) -> None:
        """Have the run save and leave; a second signal would end it unsaved."""
        if self.child and not self.asked:
            self.child.terminate()
        self.asked = True

    def end(self, code: int, why: str = "") -> int:
        """Say that it is over for good here; what the unit is told."""
        if code == PREEMPTED and not self.stopped:
            self._say(roll.LEAVING, f"preempted, step {self._saved()} saved", soon=True)
            return PREEMPTED
        self.over = True
        reason = why or str(self.run.read_record().get("reason") or "")
        self._say("ended", f"exit code {code}, step {self._saved()} saved: {reason}".rstrip(": "), code)
        return code if code in FINAL else 0

    def give_back(self) -> None:
        """The first host deletes the machines once all have ended, or none is heard any more."""
        if self.seat.rank:
            return
        end = time.monotonic() + QUIET
        while time.monotonic() < end:
            heard = roll.read(self.place, self.told["launch"])
            if all(rank in heard and heard[rank].code is not None for rank in range(self.seat.hosts)):
                break
            time.sleep(TICK)
        for method, service, path in self.told["give_back"]:
            end = time.monotonic() + INSIST
            while time.monotonic() < end:
                try:
                    google.ask(method, service, path.replace("ZONE", self.seat.zone))
                    break
                except EnvironmentFault as error:
                    print(f"not given back: {error.message}", flush=True)
                    time.sleep(PAUSE)

    def _gathered(self) -> int | None:
        """Wait until all hosts are heard; an exit code where the run has ended meanwhile."""
        while not self.asked:
            heard = roll.read(self.place, self.told["launch"])
            elsewhere = roll.ended(heard)
            if elsewhere:
                self.stopped = f"ended on {elsewhere.host}: {elsewhere.what}"
                return elsewhere.code
            self.stopped = "asked to stop" if self._stop() else self._spent()
            if self.stopped:
                return PREEMPTED
            if self._taken():
                self._say(roll.LEAVING, "the machine is being preempted")
            else:
                there = sum(mark.there() for mark in heard.values() if mark.rank != self.seat.rank)
                self._say("waiting", f"{there + 1} of {self.seat.hosts} hosts are there")
                if there + 1 >= self.seat.hosts:
                    return None
            time.sleep(TICK)
        return PREEMPTED

    def _ran(self, secrets: dict[str, str]) -> int:
        """How `dtrain run` ended; it is watched over, and what it says is passed on."""
        recipe, runs = self.place / "recipe.yaml", self.place.parents[1]
        command = [sys.executable, "-m", "dtrain", "run", str(recipe), "--runs-dir", str(runs), *self.told["arguments"]]
        given = os.environ | secrets | self.seat.environment()
        self.child = subprocess.Popen(command, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        reader = threading.Thread(target=self.voice.hear, args=(self.child.stdout,), daemon=True)
        reader.start()
        while self.child.poll() is None:
            try:
                self._tick()
            except (DtrainError, OSError, ValueError) as error:  # the run is worth more than what is said of it
                print(f"not said: {error}", flush=True)
            time.sleep(TICK)
        reader.join(5)
        with suppress(OSError):
            self.voice.ship(last=True)
        return self.child.returncode if self.child.returncode >= 0 else 128 - self.child.returncode

    def _tick(self) -> None:
        """Have the run leave if it must, and say how it stands."""
        reason = "" if self.asked else self._reason()
        if reason:
            print(f"{reason}: it is asked to save and leave", flush=True)
            self.leave()
        sign = beat.read(self.run.beat(self.seat.rank * self.told["processes"]))
        self._say("running", roll.where(asdict(sign) if sign else None, self.run.read_record(), time.time()))
        self.voice.ship()

    def _ended(self, code: int) -> int:
        """What an exit code means here: over, or to be started again."""
        heard = roll.read(self.place, self.told["launch"])
        missing = [rank for rank in range(self.seat.hosts) if rank not in heard or not heard[rank].there()]
        if code in (Hung.exit_code, Exhausted.exit_code) and set(missing) - {self.seat.rank}:
            self._say("waiting", f"host {missing[0]} is gone, step {self._saved()} saved", soon=True)
            return PREEMPTED  # no fault of the run: it waits for that host
        if code in FINAL:
            return self.end(code)
        if code == PREEMPTED or self.asked:
            return self.end(PREEMPTED)
        self.deaths = 1 + (self.deaths if self._saved() == self.reached else 0)
        if self.deaths > self.told["restarts"]:
            return self.end(Exhausted.exit_code, f"{self.deaths} starts died and saved nothing new")
        self._say("waiting", f"died with exit code {code}, step {self._saved()} saved", soon=True)
        return code

    def _reason(self) -> str:
        """Why the run must leave now, if it must."""
        if self._taken():
            return "the machine is being preempted"
        self.stopped = "asked to stop" if self._stop() else self._spent()
        return self.stopped

    def _taken(self) -> bool:
        """A notice; of maintenance the system itself ends units, when it is time."""
        return google.metadata("instance/preempted") == "TRUE"

    def _stop(self) -> bool:
        return (self.place / f"stop-{self.told['launch']}").exists()

    def _spent(self) -> str:
        """Counted by the first host alone, over all its boots; empty while there is time and money left."""
        if self.seat.rank or self.told["hours"] is None:
            return ""
        path, boot = self.place / "hours.json", Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        hours = json.loads(path.read_text()) if path.exists() else {}
        hours[boot] = float(Path("/proc/uptime").read_text().split()[0]) / 3600
        if time.monotonic() - self._counted > SAID:
            self._counted = time.monotonic()
            overwrite(path, json.dumps(hours))
        spent = sum(hours.values())
        return f"{spent:.1f} of {self.told['hours']:.1f} hours are spent" if spent >= self.told["hours"] else ""

    def _say(self, state: str, what: str, code: int | None = None, soon: bool = False) -> None:
        self.voice.say(state, what, code, self._saved(), self.deaths, soon)

    def _saved(self) -> int:
        return next(iter(saved_steps(self.run.checkpoints)), -1)


if __name__ == "__main__":
    sys.exit(main())
