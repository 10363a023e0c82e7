"""Problems that prevent a start, and clocks compared with the time of the request."""

from dtrain.launch.fanout import Answer, Machine
from dtrain.launch.targets.hosts import skewed, start_problems
from dtrain.launch.wire import Reply


def looked(*replies: Reply, asked: float = 100.0, uncertainty: float = 0.5) -> list[Answer]:
    return [Answer(Machine(rank, f"host{rank}"), reply, asked, uncertainty) for rank, reply in enumerate(replies)]


def fine(time: float = 100.0, *problems: str, jax: str = "0.10.2") -> Reply:
    return Reply(ready=True, time=time, versions={"jax": jax}, problems=problems)


def test_hosts_that_agree_have_no_problems() -> None:
    assert not start_problems(looked(fine(), fine()), (0, 1), "runs")
    assert not skewed(looked(fine(), fine()))


def test_problems_of_one_host_are_shown_with_its_name() -> None:
    answers = looked(fine(), fine(100.0, "port 8476 is in use", jax="0.12.0"), Reply(problem="no answer in 30 s"))
    assert start_problems(answers, (), "runs") == [
        "host2: no answer in 30 s",
        "host1: port 8476 is in use",
        "host1 has jax 0.12.0, host0 has 0.10.2",
    ]


def test_hosts_without_a_common_folder_are_found() -> None:
    expected = "host1 does not write to the folder runs of host0: it must be one shared folder"
    assert start_problems(looked(fine(), fine()), (0,), "runs") == [expected]


def test_a_clock_is_compared_with_the_time_of_the_request() -> None:
    early, late = looked(fine(100.0)), looked(fine(), fine(170.0), asked=170.0)[1:]
    assert not skewed(early + late)  # 70 s apart, and requested 70 s apart
    assert skewed(looked(fine(), fine(160.0))) == ["the clock of host1 is +60 s off; times in its log are wrong"]
    assert not skewed(looked(fine(), fine(108.0), uncertainty=3.5))
    assert skewed(looked(fine(), fine(109.0), uncertainty=3.5))


def test_a_wrong_clock_of_this_machine_is_one_line() -> None:
    (line,) = skewed(looked(fine(160.0), fine(161.0)))
    assert line == "this machine's clock differs from those of all hosts, by +60 s and more"
