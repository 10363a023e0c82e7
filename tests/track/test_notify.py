"""Notifications, received by a test server and a test command."""

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from dtrain.cli import app, launch
from dtrain.core.errors import EnvironmentFault, Locked, NotFinite, RecipeError, Stopped
from dtrain.core.run_dir import Folder
from dtrain.recipe.load import load
from dtrain.runtime import verify
from dtrain.track import notifier as notifiers
from dtrain.track.notifier import Command, Notification, Notifier, Webhook, channels_of, notifying, supervising
from dtrain.track.notify import Notify
from tests.conftest import PACED, Dtrain
from tests.recipe.test_load import GOOD, complaints, write
from tests.train.test_faults import reached, started
from tests.train.test_run import RECIPE, numbers, saved
from tests.waiting import until

CANARY = "canary-7f3a9c51"
HOOK = "track.notify={webhook: DTRAIN_TEST_HOOK}"
NOTHING_FINITE = "optimizer={kind: adamw, lr: 1e4, decay: 0.9}"


@dataclass
class Receiver:
    """An endpoint that stores each POST and responds with `status`, or not at all for None."""

    status: int | None = 200
    url: str = ""
    posted: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def events(self) -> list[str]:
        return [one["event"] for one in self.posted]


@contextmanager
def receiving(status: int | None = 200) -> Iterator[Receiver]:
    receiver = Receiver(status)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            receiver.headers.append(dict(self.headers))
            receiver.posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if receiver.status is None:
                receiver.over.wait(60)
                return
            self.send_response(receiver.status)
            if receiver.status == 302:
                self.send_header("Location", f"/{CANARY}/elsewhere")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        receiver.url = f"http://127.0.0.1:{server.server_port}/services/{CANARY}"
        try:
            yield receiver
        finally:
            receiver.over.set()
            server.shutdown()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as found:
        yield found


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write(tmp_path, RECIPE, "small.yaml")


def place(folder: Path, **record: Any) -> Folder:
    found = Folder(folder / "runs" / "small")
    found.path.mkdir(parents=True, exist_ok=True)
    found.write_record({"state": "running", "step": 8, "steps": 24, "starts": 1, "exit_code": None} | record)
    return found


def sending(folder: Folder, settings: Notify, warnings: list[str] | None = None) -> Notifier:
    return Notifier(settings, folder, (warnings if warnings is not None else []).append, notifiers.LIMIT)


def nowhere_in(folder: Path) -> bool:
    return not [path for path in folder.rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()]


# runs as a user starts them


@pytest.mark.slow
def test_a_webhook_and_a_command_get_the_end_of_a_run(
    dtrain: Dtrain, recipe: Path, tmp_path: Path, receiver: Receiver
) -> None:
    both = "track.notify={webhook: DTRAIN_TEST_HOOK, command: [sh, -c, 'cat > got.json; env > got.env']}"
    done = dtrain("run", recipe, "steps=12", both, DTRAIN_TEST_HOOK=receiver.url, DTRAIN_LAUNCH="ab12")
    (posted,) = receiver.posted
    values = {key: posted[key] for key in ("event", "run", "state", "step", "steps", "exit_code", "launch")}
    assert values == {
        "event": "finished", "run": "small", "state": "finished", "step": 12, "steps": 12, "exit_code": 0,
        "launch": "ab12",
    }  # fmt: skip
    assert posted["text"] == posted["content"] == "small finished: 12 steps"
    assert receiver.headers[0]["Content-Type"] == "application/json"
    assert receiver.headers[0]["User-Agent"].startswith("dtrain/")
    assert json.loads((tmp_path / "got.json").read_text()) == posted
    environment = dict(line.split("=", 1) for line in (tmp_path / "got.env").read_text().splitlines() if "=" in line)
    assert {key: value for key, value in environment.items() if key.startswith("DTRAIN_")} == {
        "DTRAIN_EVENT": "finished", "DTRAIN_RUN": "small", "DTRAIN_STATE": "finished", "DTRAIN_STEP": "12",
        "DTRAIN_REASON": "all steps done", "DTRAIN_EXIT_CODE": "0", "DTRAIN_LAUNCH": "ab12",
    }  # fmt: skip

    dtrain("run", recipe, "steps=12", both, DTRAIN_TEST_HOOK=receiver.url)  # is finished already
    assert len(receiver.posted) == 1
    assert CANARY not in done.stdout + done.stderr
    (tmp_path / "got.env").unlink()
    assert nowhere_in(tmp_path)


@pytest.mark.nightly
def test_a_run_that_is_not_finite_sends_that_it_failed(dtrain: Dtrain, recipe: Path, receiver: Receiver) -> None:
    dtrain("run", recipe, NOTHING_FINITE, HOOK, code=7, DTRAIN_TEST_HOOK=receiver.url)
    (posted,) = receiver.posted
    assert (posted["event"], posted["exit_code"], posted["state"]) == ("failed", 7, "failed")
    assert posted["text"].startswith("small failed (exit code 7): ")
    assert posted["text"].endswith("; nothing saved")


@pytest.mark.slow
def test_a_preempted_run_sends_that_and_where_it_resumes(
    dtrain: Dtrain, recipe: Path, tmp_path: Path, receiver: Receiver
) -> None:
    one = started(tmp_path, "steps=100000", "evaluate.every=0", HOOK, DTRAIN_TEST_HOOK=receiver.url)
    reached(tmp_path / "runs" / "small", 3)
    one.send_signal(signal.SIGTERM)
    one.communicate(timeout=200)
    assert one.returncode == 75
    (posted,) = receiver.posted
    assert (posted["event"], posted["exit_code"], posted["state"]) == ("preempted", 75, "stopped")
    step = posted["step"]
    assert posted["reason"] == f"saved at step {step} of 100000"

    dtrain("run", recipe, f"steps={step + 2}", "evaluate.every=0", HOOK, DTRAIN_TEST_HOOK=receiver.url)
    assert receiver.events == ["preempted", "resumed", "finished"]
    assert (receiver.posted[1]["step"], receiver.posted[1]["steps"]) == (step, step + 2)


@pytest.mark.slow
def test_a_stop_before_the_first_step_is_sent_too(recipe: Path, tmp_path: Path, receiver: Receiver) -> None:
    one = started(tmp_path, HOOK, DTRAIN_TEST_HOOK=receiver.url, DTRAIN_FAULT="sleep@compile")
    until((tmp_path / "runs" / "small" / "lease.json").exists)
    one.send_signal(signal.SIGTERM)
    one.communicate(timeout=200)
    assert one.returncode == 75
    assert [(one["event"], one["exit_code"]) for one in receiver.posted] == [("preempted", 75)]
    assert "before the first step" in receiver.posted[0]["reason"]


@pytest.mark.nightly
def test_the_supervisor_sends_the_end_of_what_it_starts_and_the_run_that_it_resumed(
    dtrain: Dtrain, recipe: Path, receiver: Receiver
) -> None:
    options = ["--restarts", "1", "checkpoint.every=4", HOOK]
    failed = dtrain("run", recipe, *options, code=8, DTRAIN_TEST_HOOK=receiver.url, DTRAIN_FAULT="kill@step:2")
    (posted,) = receiver.posted
    assert (posted["event"], posted["exit_code"], posted["step"]) == ("failed", 8, 0)
    assert "killed by SIGKILL" in posted["reason"]
    assert CANARY not in failed.stdout + failed.stderr

    dtrain("run", recipe, *options, code=8, DTRAIN_TEST_HOOK=receiver.url, DTRAIN_FAULT="kill@step:15")
    assert receiver.events.count("failed") == 2  # of a start that is killed, what it began to send may be lost
    assert receiver.events[-1] == "failed"
    receiver.posted.clear()
    dtrain("run", recipe, *options, DTRAIN_TEST_HOOK=receiver.url)
    dtrain("run", recipe, *options, DTRAIN_TEST_HOOK=receiver.url)  # is finished already
    assert receiver.events == ["resumed", "finished"]


@pytest.mark.nightly
def test_two_processes_send_each_event_once(dtrain: Dtrain, recipe: Path, receiver: Receiver) -> None:
    options = ["--devices", "2", "--processes", "2", "--restarts", "0", HOOK]
    dtrain("run", recipe, *options, "checkpoint.every=4", code=137, DTRAIN_TEST_HOOK=receiver.url,
           DTRAIN_FAULT="kill@step:15/1")  # fmt: skip
    assert (receiver.posted[0]["event"], receiver.posted[0]["step"] in (4, 8, 12)) == ("failed", True)
    assert receiver.posted[0]["reason"] == "a process was killed by SIGKILL"
    dtrain("run", recipe, *options, DTRAIN_TEST_HOOK=receiver.url)
    assert receiver.events == ["failed", "resumed", "finished"]


@pytest.mark.nightly
@pytest.mark.parametrize("status", [None, 500, "down"], ids=["hanging", "failing", "down"])
def test_an_endpoint_that_does_not_answer_changes_nothing_of_the_run(
    dtrain: Dtrain, recipe: Path, tmp_path: Path, status: int | str | None
) -> None:
    dtrain("run", recipe, "name=straight")
    with receiving(status if status != "down" else 200) as there:
        url = f"http://127.0.0.1:9/{CANARY}" if status == "down" else there.url
        done = dtrain("run", recipe, HOOK, "checkpoint.every=12", DTRAIN_TEST_HOOK=url)
        failed = dtrain("run", recipe, "name=bad", NOTHING_FINITE, HOOK, code=7, DTRAIN_TEST_HOOK=url)
    runs = tmp_path / "runs"
    assert saved(runs / "small", 24) == saved(runs / "straight", 24)
    assert numbers(runs / "small") == numbers(runs / "straight")
    for output, event in ((done.stderr, "finished"), (failed.stderr, "failed")):
        assert f"warning: `{event}` was not delivered to the webhook in DTRAIN_TEST_HOOK: " in output
    assert CANARY not in done.stdout + done.stderr + failed.stdout + failed.stderr
    assert nowhere_in(tmp_path)


@pytest.mark.nightly
def test_a_run_whose_hours_are_nearly_over_sends_budget_and_then_stopped(
    dtrain: Dtrain, recipe: Path, receiver: Receiver
) -> None:
    long = ["steps=10000000", "evaluate.every=0", "checkpoint.minutes=0", "track.every=1000"]
    settings = "track.notify={webhook: DTRAIN_TEST_HOOK, share: 0.01}"
    done = dtrain("run", recipe, settings, *long, "--hours", "0.004", DTRAIN_TEST_HOOK=receiver.url, **PACED)
    assert "the time limit of 0.004 hours is reached" in done.stdout + done.stderr
    assert receiver.events == ["budget", "stopped"]
    assert "hours" in receiver.posted[0]["reason"]


@pytest.mark.nightly
def test_what_cannot_be_sent_is_refused_before_the_first_step(dtrain: Dtrain, recipe: Path, tmp_path: Path) -> None:
    refused = dtrain("run", recipe, HOOK, code=3)
    assert "the environment variable DTRAIN_TEST_HOOK is not set" in refused.stderr
    refused = dtrain("run", recipe, "track.notify={command: no-such-program}", "--restarts", "2", code=3)
    assert "no program 'no-such-program' on this machine" in refused.stderr
    assert not (tmp_path / "runs" / "small" / "checkpoints").exists()
    dtrain("run", recipe, HOOK, "--dry-run")


# what is sent


def test_a_reason_is_one_short_line_and_the_url_is_not_in_a_repr(tmp_path: Path, receiver: Receiver) -> None:
    notifier = sending(place(tmp_path), Notify(command=(sys.executable, "-c", "")))
    assert CANARY not in repr(Webhook("HOOK", receiver.url))
    assert CANARY not in repr(notifier)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOOK", f"{receiver.url}\n")
        notifier = sending(place(tmp_path), Notify(webhook="HOOK"))
    notifier.ended(4, "one\ntwo  " + "x" * 2000)
    assert receiver.posted[0]["reason"].startswith("one two x")
    assert len(receiver.posted[0]["reason"]) == notifiers.LONGEST


@pytest.mark.parametrize(
    ("record", "code", "event", "state"),
    [
        ({"state": "finished"}, 0, "finished", "finished"),
        ({"state": "stopped", "reason": "asked to stop", "exit_code": 0}, 0, "stopped", "stopped"),
        ({"state": "stopped"}, 75, "preempted", "stopped"),
        ({"state": "failed"}, 4, "failed", "failed"),
        ({"state": "running"}, 9, "failed", "failed"),
        ({"state": "aborted"}, 130, None, None),
        ({"state": "running"}, 6, None, None),
    ],
)
def test_an_exit_code_is_one_event(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, record: Any, code: int, event: str, state: str
) -> None:
    monkeypatch.setenv("HOOK", receiver.url)
    notifier = sending(place(tmp_path, **record), Notify(webhook="HOOK"))
    notifier.ended(code, "")
    assert [(one["event"], one["state"]) for one in receiver.posted] == ([(event, state)] if event else [])


def test_only_the_events_that_are_asked_for_are_sent(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK", receiver.url)
    notifier = sending(place(tmp_path), Notify(webhook="HOOK", on=("failed",)))
    notifier.resumed(8, 24)
    notifier.ended(75, "")
    assert not receiver.posted
    sending(place(tmp_path), Notify(webhook="HOOK", on=("failed",))).ended(7, "")
    assert receiver.events == ["failed"]


def test_a_resume_is_sent_once_and_a_start_at_step_0_is_none(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK", receiver.url)
    notifier = sending(place(tmp_path), Notify(webhook="HOOK"))
    for step in (0, 8):  # the second is a rollback
        notifier.resumed(step, 24)
    notifier.join()
    assert not receiver.posted


def test_a_share_of_the_limit_is_sent_once_in_all_starts_of_a_launch(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK", receiver.url)

    def start(*shares: float) -> None:
        notifier = sending(place(tmp_path), Notify(webhook="HOOK", share=0.5))
        for share in shares:
            notifier.spent(share, "its time limit of 12 hours")
        notifier.join()

    start(0.1, 0.4999)
    assert not receiver.posted
    start(0.4, 0.5, 0.6)
    start(0.7)  # started again after a preemption
    (posted,) = receiver.posted
    assert (posted["event"], posted["share"], posted["state"]) == ("budget", 0.5, "running")
    assert posted["text"] == "small has used 50% of its time limit of 12 hours"
    start(0.2, 0.9)  # a longer limit
    assert len(receiver.posted) == 2
    monkeypatch.setenv("DTRAIN_LAUNCH", "another")
    start(0.95)
    assert len(receiver.posted) == 3


def test_a_process_under_a_supervisor_leaves_the_end_to_it(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK", receiver.url)
    monkeypatch.setenv("DTRAIN_PARENT", str(os.getpid()))
    here, settings, warnings = place(tmp_path), Notify(webhook="HOOK"), []
    with notifying(settings, here, warnings.append, 300.0) as notifier:
        notifier.resumed(8, 24)
        assert notifier.closing(lambda _state, _reason, code: code)("stopped", "", 75) == 75
    with pytest.raises(NotFinite), notifying(settings, here, warnings.append, 300.0):
        raise NotFinite("x")
    assert receiver.events == ["resumed"]
    with supervising(settings, here, warnings.append) as ended:
        here.write_record(here.read_record() | {"starts": 2, "state": "failed", "exit_code": 7, "reason": "not finite"})
        assert ended(7) == 7
    with pytest.raises(Stopped), supervising(settings, here, warnings.append):
        raise Stopped("stopped before the first step")
    assert receiver.events == ["resumed", "failed", "preempted"]
    assert receiver.posted[1]["reason"] == "not finite"
    assert not warnings


@pytest.mark.slow
def test_a_process_that_leaves_at_once_sends_the_end_first_and_only_once(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK", receiver.url)
    here, settings = place(tmp_path), Notify(webhook="HOOK")
    with pytest.raises(Locked), notifying(settings, here, pytest.fail, 300.0):
        raise Locked("another run")
    with pytest.raises(Stopped), notifying(settings, here, pytest.fail, 300.0) as notifier:
        close = notifier.closing(lambda _state, _reason, code: code)
        assert close("aborted", "stopped at once", 130) == 130
        assert not receiver.posted
        assert close("stopped", "SIGTERM", 75) == 75
        notifier.wait = 0.0  # for a process that has ended by now
        raise Stopped("by the main thread")
    assert [one["reason"] for one in receiver.posted] == ["SIGTERM"]


# how it is delivered


def of(event: str = "finished") -> Notification:
    return Notification(event=event, run="small", state=event, step=1)


@pytest.mark.slow
@pytest.mark.parametrize(("status", "tries"), [(204, 1), (400, 1), (302, 1), (429, 3), (503, 3)])
def test_only_what_may_pass_is_tried_again(monkeypatch: pytest.MonkeyPatch, status: int, tries: int) -> None:
    monkeypatch.setattr(notifiers, "PAUSES", (0.0, 0.0, 0.0))
    with receiving(status) as there:
        assert Webhook("HOOK", there.url).deliver(of()) == ("" if status == 204 else f"HTTP status {status}")
        assert len(there.posted) == tries


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9/{}", "http://{}.invalid/", "https://127.0.0.1:9/{}", "http://127.0.0.1:99999/{}"]
)
def test_no_failure_shows_the_url(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr(notifiers, "PAUSES", (0.0,))
    try:
        problem = Webhook("HOOK", url.format(CANARY)).deliver(of())
    except Exception as error:  # which a notifier shows by its type alone
        problem = type(error).__name__
    assert problem
    assert CANARY not in problem


def test_an_error_of_any_kind_is_a_warning_without_its_text(tmp_path: Path) -> None:
    warnings: list[str] = []
    notifier = sending(place(tmp_path), Notify(command=("true",)), warnings)

    class Broken:
        name = "the webhook in HOOK"

        def deliver(self, notification: Notification) -> str:
            raise ValueError(CANARY)

    notifier._channels = [Broken()]
    notifier.ended(0, "")
    assert warnings == ["`finished` was not delivered to the webhook in HOOK: ValueError"]


def test_a_command_that_fails_or_takes_too_long_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifiers, "COMMAND", 0.5)
    assert Command(["sh", "-c", "exit 3"]).deliver(of()) == "it exited with code 3"
    assert Command([str(tmp_path / "none")]).deliver(of()).startswith("No such file")
    note = tmp_path / "pid"
    assert "was killed" in Command(["sh", "-c", f"sleep 600 & echo $! > {note}; wait"]).deliver(of())
    child = Path(f"/proc/{note.read_text().strip()}/stat")
    until(lambda: not child.exists() or ") Z " in child.read_text(), "the child of the command lives on")


def test_what_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    with receiving(None) as there:
        monkeypatch.setenv("HOOK", there.url)
        notifier = sending(place(tmp_path), Notify(webhook="HOOK"), warnings)
        notifier.wait = 0.2
        notifier.ended(0, "")
    assert warnings == ["a notification was not delivered within 0 s"]


# the recipe


@pytest.mark.parametrize(
    ("section", "found"),
    [
        ("{}", "track.notify: neither command nor webhook is set"),
        ("{command: a, on: [finsihed]}", "track.notify.on.0: expected 'finished', 'failed'"),
        ("{command: a, on: []}", "track.notify.on: expected a list of at least 1"),
        ("{command: a, share: 0}", "track.notify.share: expected a number above 0"),
        ("{webhook: slack}", "track.notify.webhook: not the name of an environment variable"),
        (f"{{webhook: 'https://example.com/{CANARY}'}}", "track.notify.webhook: contains a secret"),
        (f"{{webhook: 'hooks.example.com/{CANARY}'}}", "track.notify.webhook: not the name of an environment variable"),
        (f"{{command: [curl, 'https://hooks.slack.com/services/T0/{CANARY}']}}", "command.1: contains a secret"),
        (f"{{command: [curl, 'https://discord.com/api/webhooks/1/{CANARY}']}}", "command.1: contains a secret"),
    ],
)
def test_a_wrong_section_is_refused(tmp_path: Path, section: str, found: str) -> None:
    problems = complaints(tmp_path, f"{GOOD}track: {{notify: {section}}}\n")
    assert found in problems
    assert ("did you mean 'finished'?" in problems) == ("finsihed" in section)
    assert CANARY not in problems
    if "hooks.example" not in section:  # which only a file can hold without quoting it
        with pytest.raises(RecipeError) as caught:
            load(write(tmp_path, GOOD), [f"track.notify={section}"])
        assert CANARY not in str(caught.value)


@pytest.mark.parametrize("value", ["", " ", "ftp://example.com", "file:///etc/", "http:///", "http://a b/", "x"])
def test_a_variable_without_an_address_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("HOOK", value and f"{value}{CANARY if value.strip() else ''}"[:40])
    with pytest.raises(EnvironmentFault, match="environment variable HOOK") as caught:
        channels_of(Notify(webhook="HOOK"))
    assert CANARY not in str(caught.value)


def test_a_launch_that_would_not_have_the_url_is_refused(tmp_path: Path) -> None:
    body = f"{GOOD}track: {{notify: {{webhook: HOOK}}}}\n"
    refused = complaints(tmp_path, f"{body}launch: {{kind: ssh, hosts: [a]}}\n")
    assert "the launched run would not have HOOK" in refused
    load(write(tmp_path, f"{body}launch: {{kind: ssh, hosts: [a], environment: [HOOK]}}\n"))
    load(write(tmp_path, f"{body}launch: local\n"))


def test_only_run_runs_the_command_and_a_launch_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(question: str, yes: bool) -> None:
        raise typer.Exit(130)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "confirm", refuse)
    body = f"{GOOD}launch: local\ntrack: {{notify: {{command: [touch, 'it ran']}}}}\n"
    stranger = str(write(tmp_path, body))
    for verb in (["check"], ["explain"], ["launch", "plan"]):
        assert CliRunner().invoke(app, [*verb, stranger]).exit_code == 0
    shown = CliRunner().invoke(app, ["launch", "up", stranger]).output
    assert "command run at the run's events: touch 'it ran'\n" in shown
    assert not (tmp_path / "it ran").exists()


def test_verify_sends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(verify.subprocess, "Popen", lambda command, **_: commands.append(command))
    verify.Trial("small.yaml", [HOOK], [], tmp_path, print).start("straight", ["engine=jit"])
    overrides = [word for word in commands[0] if word.startswith("track.notify")]
    assert overrides == [HOOK, "track.notify=null"]
    assert load(write(tmp_path, RECIPE), overrides).track.notify is None
