import io
from collections.abc import Callable
from pathlib import Path

from rich.console import Console as Rich

from dtrain.track.console import Console, clock_time, eval_line, short, step_line

VALUES = {
    "train/loss": 2.01419,
    "train/accuracy": 0.4217,
    "train/grad_norm": 0.8312,
    "train/lr": 3e-4,
    "time/step_ms": 12.41,
    "time/data_ms": 0.2,
    "rate/examples_per_s": 82512.0,
}


def test_the_step_line_golden(golden: Callable[[str, str], None]) -> None:
    full = VALUES | {"rate/mfu": 0.412, "memory/peak_bytes": 5.1 * 2**30, "memory/peak_fraction": 0.32}
    shown = [step_line(120, 2000, VALUES, 192), step_line(120, 2000, full, 4000)]
    shown.append(eval_line(120, {"eval/loss": 1.25, "eval/accuracy": 0.9861, "time/evaluate_s": 0.44}))
    golden("step_line.txt", "\n".join(shown) + "\n")


def test_numbers_are_short() -> None:
    assert [short(n) for n in (12, 82512, 3.2e6, 4e9)] == ["12", "82.5k", "3.2M", "4.0G"]
    assert [clock_time(n) for n in (5, 192, 3725)] == ["0:05", "3:12", "1:02:05"]


def test_a_terminal_gets_a_bar_and_the_log_plain_lines(tmp_path: Path) -> None:
    screen = io.StringIO()
    console = Console(rich=Rich(file=screen, force_terminal=True, width=60), log=tmp_path / "log.txt")
    with console.progress(0, 10):
        console.tick(5)
        console.say("step 5/10")
        console.warn("mind this")
    console.close()
    console.note("later")
    console.close()
    assert "step 5/10" in screen.getvalue()
    assert "50%" in screen.getvalue() or "step 5" in screen.getvalue()
    assert (tmp_path / "log.txt").read_text() == "step 5/10\nwarning: mind this\nlater\n"


def test_a_silent_console_prints_nothing(tmp_path: Path) -> None:
    screen = io.StringIO()
    console = Console(silent=True, rich=Rich(file=screen), log=tmp_path / "log.txt")
    with console.progress(0, 10):
        console.tick(5)
        console.say("step 5/10")
    assert screen.getvalue() == ""
    assert not (tmp_path / "log.txt").exists()
