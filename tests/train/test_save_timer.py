"""A save that is due by time happens at the same step in every process."""

from collections.abc import Callable

from dtrain.train.save_timer import SaveTimer


def run(timer: SaveTimer, steps: int, tick: Callable[[], None]) -> list[int]:
    saved = []
    for step in range(1, steps + 1):
        tick()
        if timer.due(step):
            assert timer.due(step), "the answer for a step does not change"
            saved.append(step)
            timer.restart()
    return saved


def test_one_process_saves_when_the_time_has_passed() -> None:
    time = [0.0]
    tick = lambda: time.__setitem__(0, time[0] + 7)  # noqa: E731
    assert run(SaveTimer(60.0, now=lambda: time[0]), 30, tick) == [9, 18, 27]
    assert run(SaveTimer(0.0, now=lambda: time[0]), 30, tick) == []


def test_several_processes_save_at_the_same_steps_by_the_first_ones_clock() -> None:
    time, others, values = [0.0], [0.0], []

    def first(wanted: tuple[int, int]) -> tuple[int, int]:
        values.append(wanted)
        return wanted

    def advance() -> None:
        time[0] += 1.0

    leader = run(SaveTimer(600.0, 2, 100, lambda: time[0], first), 0, advance)
    timer = SaveTimer(600.0, 2, 0, lambda: time[0], first)
    leader = run(timer, 2000, advance)
    follows = iter(list(values))
    other = SaveTimer(600.0, 2, 0, lambda: others[0], lambda _: next(follows))
    assert run(other, 2000, lambda: others.__setitem__(0, others[0] + 50)) == leader
    assert len(leader) == 3
    assert all(600 <= after - before <= 660 for before, after in zip([0, *leader], leader, strict=False))
    assert len(values) < 100, "the processes exchange the time seldom"
