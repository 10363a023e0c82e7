"""Problems that prevent a start, and clocks compared with the time of the request."""

import pytest

from dtrain.core.errors import EnvironmentFault, FieldError
from dtrain.core.files import code_digest
from dtrain.launch.fanout import Answer, Machine
from dtrain.launch.targets.hosts import other_code, skewed, start_problems, to_rejoin
from dtrain.launch.targets.ssh import Ssh
from dtrain.launch.wire import CODE, Reply


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


def running(recipe: str = "r") -> Reply:
    return Reply(ready=True, alive=True, recipe=recipe)


@pytest.mark.parametrize(
    ("replies", "lost"),
    [
        ((running(), Reply(ready=True)), ["host1"]),  # rebooted: no exit code
        ((running(), Reply(ready=True, code=75), Reply(ready=True, code=137)), ["host1", "host2"]),
        ((Reply(ready=True), running()), ["host0"]),
        ((running(), Reply(ready=True, code=7)), []),  # it failed there, and ends elsewhere
        ((running(), Reply(ready=True, code=0)), []),
        ((running("other"), Reply(ready=True)), []),
        ((running(), running()), []),
        ((Reply(ready=True), Reply(ready=True)), []),
    ],
)
def test_a_run_is_joined_where_it_was_lost_if_it_goes_on_elsewhere(replies: tuple[Reply, ...], lost: list[str]) -> None:
    assert [one.machine.name for one in to_rejoin(looked(*replies), "r")] == lost


def test_hosts_with_other_code_than_this_machine_are_named() -> None:
    old = Reply(ready=True, versions={"dtrain": "0.2.0", CODE: "0123456789abcdef"})
    (line,) = other_code(looked(old, old))
    assert line.startswith("the hosts run another dtrain than this machine: 0.2.0 (code 0123456789abcdef), here ")
    assert not other_code(looked(Reply(ready=True, versions={"dtrain": "0.2.0", CODE: code_digest()})))
    assert start_problems(looked(old, Reply(ready=True, versions={CODE: "ff"})), (0, 1), "runs") == [
        "host1 has code of dtrain ff, host0 has 0123456789abcdef"
    ]


class Link:
    """Hosts whose ready file has this content."""

    def __init__(self, setup: str) -> None:
        self.machines, self.setup = [Machine(0, "host0")], setup

    def ask(self, _verb: str, machines: list[Machine], ready: str) -> list[Answer]:
        return [Answer(machine, Reply(ready=bool(ready), setup=self.setup)) for machine in machines]

    def drop(self, _machines: list[Machine]) -> None:
        pass


def test_a_host_that_was_set_up_from_another_wheel_is_refused() -> None:
    target = Ssh(hosts=("host0",), ready="/ready", wheel="gs://b/launch/s/0a1b/dtrain.whl")
    target.await_ready(Link("gs://b/launch/s/0a1b/dtrain.whl"), print)  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        EnvironmentFault, match=r"host0 was set up from gs://b/old\.whl, not from gs://b/launch/s/0a1b/"
    ):
        target.await_ready(Link("gs://b/old.whl"), print)  # pyright: ignore[reportArgumentType]
    with pytest.raises(FieldError, match="without a ready file"):
        Ssh(hosts=("host0",), wheel="gs://b/a.whl")
