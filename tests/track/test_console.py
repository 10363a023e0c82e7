import io
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console as Rich

from dtrain.track.console import Console, eval_line, step_line
from dtrain.track.text import clock_time, duration, short, size, sparkline

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


def test_durations_and_sizes_in_words() -> None:
    spans = (2.94, 59.96, 750, 3600, 11520, 200_000)
    assert [duration(n) for n in spans] == ["2.9 s", "60.0 s", "12 min 30 s", "1 h", "3 h 12 min", "2 d 8 h"]
    assert [size(n) for n in (12, 2048, 5.1 * 2**30)] == ["12 B", "2.0 KiB", "5.1 GiB"]


def test_a_sparkline_falls_with_its_values() -> None:
    assert sparkline([8, 7, 6, 5, 4, 3, 2, 1]) == "█▇▆▅▄▃▂▁"
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert len(sparkline([float(n) for n in range(1000)], 40)) == 40
    assert sparkline([]) == ""


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_step_line_fits_the_terminal(width: int) -> None:
    full = VALUES | {"rate/mfu": 0.412, "memory/peak_bytes": 5.1 * 2**30, "memory/peak_fraction": 0.32}
    screen = io.StringIO()
    Console(rich=Rich(file=screen, force_terminal=True, width=width, color_system=None)).step(
        120_000, 200_000, full, 4000
    )
    (line,) = screen.getvalue().splitlines()
    assert len(line) <= width
    assert line.startswith("step 120000/200000  loss 2.0142")
    assert line.endswith("eta 1:06:40")


def test_what_did_not_fit_once_is_left_out_of_all_later_lines() -> None:
    screen = io.StringIO()
    console = Console(rich=Rich(file=screen, force_terminal=True, width=97, color_system=None))
    for step, time_ms in ((1, 1.0), (20_000, 1234.5), (2, 1.0)):
        console.step(step, 200_000, VALUES | {"time/step_ms": time_ms}, 40_000)
    lines = screen.getvalue().splitlines()
    assert [("grad" in line, "lr" in line, "ms" in line) for line in lines] == [
        (True, True, True), (False, True, True), (False, True, True)
    ]  # fmt: skip


def test_the_bar_shows_loss_speed_and_time_left_in_60_columns() -> None:
    screen = io.StringIO()
    console = Console(rich=Rich(file=screen, force_terminal=True, width=60, color_system=None))
    with console.progress(0, 20_000):
        for step in range(1, 8):
            console._next_tick = 0.0
            console.tick(1000 * step)
            time.sleep(0.02)
        console.step(8000, 20_000, VALUES, 192)
        assert console._bar is not None
        console._bar.refresh()
    bars = [line for line in screen.getvalue().replace("\r", "\n").splitlines() if "steps/s  eta" in line]
    assert "loss 2.0142" in bars[-1]
    assert all(len(re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line).rstrip()) <= 60 for line in bars)


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
