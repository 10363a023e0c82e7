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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dtrain import beat
from dtrain.errors import DtrainError, EnvironmentFault, Exhausted
from dtrain.folder import Folder, overwrite, saved_steps
from dtrain.launch import google, roll
from dtrain.launch.seat import Seat, seat_of

PREEMPTED = 75
FINAL = {0, *range(2, Exhausted.exit_code + 1)}
"""Exit codes after which another start would end the same way."""
TICK = 1.0
SAID = 10.0
"""Seconds between what is said while nothing changes."""
QUIET = 120.0
"""Seconds in which the other hosts have said how they ended."""
Told = dict[str, Any]


def main() -> int:
    """Keep the run of one job; its exit code, 0 where another start is not wanted."""
    path = Path(sys.argv[1])
    told = json.loads(path.read_text())
    host = Host(told, path.parent, seat_of(told))
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
    _said: tuple[float, str] = (0.0, "")
    _lines: list[bytes] = field(default_factory=list)
    _shipped: float = 0.0
    _counted: float = -SAID
    _since: float = field(default_factory=time.monotonic)

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
            self._say("waiting", f"preempted, step {self._saved()} saved", soon=True)
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
            try:
                google.ask(method, service, path.replace("ZONE", self.seat.zone))
            except EnvironmentFault as error:
                print(f"not given back: {error.message}", flush=True)

    def _gathered(self) -> int | None:
        """Wait until all hosts are heard; an exit code where the run has ended meanwhile."""
        while not self.asked:
            heard = roll.read(self.place, self.told["launch"])
            elsewhere = roll.ended(heard)
            if elsewhere:
                self.stopped = f"ended on {elsewhere.host}: {elsewhere.what}"
                return elsewhere.code
            if self._stop():
                self.stopped = "asked to stop"
                return PREEMPTED
            there = sum(time.time() - mark.at < roll.FRESH for mark in heard.values() if mark.rank != self.seat.rank)
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
        reader = threading.Thread(target=self._hear, daemon=True)
        reader.start()
        while self.child.poll() is None:
            reason = "" if self.asked else self._reason()
            if reason:
                print(f"{reason}: it is asked to save and leave", flush=True)
                self.leave()
            sign = beat.read(self.run.beat(self.seat.rank * self.told["processes"]))
            self._say("running", roll.where(asdict(sign) if sign else None, self.run.read_record(), time.time()))
            self._ship()
            time.sleep(TICK)
        reader.join(5)
        self._ship(last=True)
        return self.child.returncode if self.child.returncode >= 0 else 128 - self.child.returncode

    def _ended(self, code: int) -> int:
        """What an exit code means here: over, or to be started again."""
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
        if google.metadata("instance/preempted") == "TRUE":
            return "the machine is being preempted"
        if (google.metadata("instance/maintenance-event") or "NONE") != "NONE":
            return "the machine is being maintained"
        self.stopped = "asked to stop" if self._stop() else self._spent()
        return self.stopped

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

    def _saved(self) -> int:
        return next(iter(saved_steps(self.run.checkpoints)), -1)

    def _say(self, state: str, what: str, code: int | None = None, soon: bool = False) -> None:
        """Leave a mark, where there is something new or it is time."""
        now, words = time.monotonic(), f"{state} {what}"
        if code is None and not soon and now - self._said[0] < (TICK if words != self._said[1] else SAID):
            return
        self._said = (now, words)
        mark = roll.Mark(
            self.told["launch"],
            self.seat.rank,
            self.seat.name,
            time.time(),
            state,
            what,
            code,
            self._saved(),
            self.deaths,
        )
        try:
            mark.write(self.place)
        except OSError as error:
            print(f"nothing can be said in {self.place}: {error.strerror}", flush=True)

    def _hear(self) -> None:
        assert self.child
        assert self.child.stdout
        for line in self.child.stdout:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
            self._lines.append(line)

    def _ship(self, last: bool = False) -> None:
        """Pass on what was printed: soon at first, then every half minute."""
        now = time.monotonic()
        apart = min(30.0, 2.0 + (now - self._since) / 20)
        if not self._lines or (now - self._shipped < apart and not last):
            return
        lines, self._lines, self._shipped = self._lines, [], now
        name = f"{self.told['launch']}-{self.seat.rank:05d}-{time.time_ns() // 10**6:013d}.txt"
        (self.place / "log").mkdir(exist_ok=True)
        overwrite(self.place / "log" / name, b"".join(lines).decode(errors="replace"))


if __name__ == "__main__":
    sys.exit(main())
