"""The rendezvous of processes before jax.distributed starts."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from dtrain.core.errors import DtrainError, EnvironmentFault, Exhausted, Hung, StopRequested
from dtrain.core.process_info import ProcessInfo
from dtrain.parallel import rendezvous
from dtrain.parallel.devices import join
from dtrain.parallel.rendezvous import Refusal, interface, wait_for_all


@pytest.fixture
def address() -> Iterator[str]:
    """A port that no other program can take."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((rendezvous.LOOPBACK, 0))
        yield f"{rendezvous.LOOPBACK}:{holder.getsockname()[1]}"


def outcome(rank: int, processes: int, address: str) -> str:
    try:
        wait_for_all(rank, processes, address)
    except (EnvironmentFault, Hung) as error:
        return error.message
    return "met"


def outcomes(ranks: list[int], processes: int, address: str) -> list[str]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda rank: outcome(rank, processes, address), ranks))


def test_all_continue_when_all_have_arrived(address: str) -> None:
    assert outcomes([3, 2, 1, 0], 4, address) == ["met"] * 4
    assert outcome(0, 1, address) == "met"


@pytest.mark.slow
def test_missing_processes_are_named_to_all_others(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "PATIENCE", 1.0)
    output = f"processes 1, 3 of 5 did not arrive at the rendezvous {address} within 1 s"
    assert outcomes([0, 2, 4], 5, address) == [output] * 3


def test_a_missing_rank_0_is_named(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "PATIENCE", 0.5)
    assert outcomes([1], 2, address) == [f"process 0 of 2 did not arrive at the rendezvous {address} within 0 s"]


def ends(rank: int, processes: int, address: str, refusal: Refusal) -> tuple[type[DtrainError], int, str, str]:
    with pytest.raises(DtrainError) as ended:
        wait_for_all(rank, processes, address, refusal)
    error = ended.value
    return type(error), error.exit_code, error.message, error.hint


REFUSED = Exhausted('4 starts saved "nothing"\nnew', "look")


@pytest.mark.parametrize("error", [REFUSED, StopRequested("stopped on request", "remove it")])
def test_a_refusal_of_rank_0_is_raised_in_every_process(address: str, error: DtrainError) -> None:
    refusals: list[Refusal] = [lambda: error, lambda: None, lambda: None]
    with ThreadPoolExecutor(3) as pool:
        found = set(pool.map(lambda rank: ends(rank, 3, address, refusals[rank]), range(3)))
    assert found == {(type(error), error.exit_code, error.message, error.hint)}


@pytest.mark.slow
def test_a_refusal_during_the_wait_is_raised_in_the_processes_that_have_arrived(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "LINGER", 0.5)
    come = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ends, 0, 3, address, lambda: REFUSED if come.is_set() else None)
        second = pool.submit(ends, 1, 3, address, lambda: None)
        threading.Timer(0.5, come.set).start()
        assert {first.result()[0], second.result()[0]} == {Exhausted}


def test_a_process_uses_its_own_refusal_if_rank_0_does_not_answer(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "LINGER", 0.2)
    assert ends(1, 2, address, lambda: REFUSED)[0] is Exhausted


@pytest.mark.slow
@pytest.mark.parametrize("value", ["1", "0"])
def test_where_hosts_are_replaced_a_missing_one_ends_the_others_with_75(
    address: str, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("DTRAIN_RENDEZVOUS_S", "0.5")
    monkeypatch.setenv("DTRAIN_REPLACES_HOSTS", value)
    with pytest.raises(DtrainError) as missing:
        join(ProcessInfo(0, 6, address), local=2)
    output = f"processes 1, 2, 3, 4, 5 of 6 did not arrive at the rendezvous {address} within 0 s"
    expected = (75, f"hosts 1, 2 of 3 lost: {output}") if value == "1" else (9, output)
    assert (missing.value.exit_code, missing.value.message) == expected


def test_connections_of_other_programs_are_ignored(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "RANK_TIMEOUT", 0.2)
    host, _, port = address.rpartition(":")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(outcome, 0, 2, address)
        for output in (b"GET / HTTP/1.1\r\n\r\n", b"", b"99\n"):
            with _connected(host, int(port)) as other:
                other.sendall(output)
        with _connected(host, int(port)):  # connects and sends nothing
            assert outcome(1, 2, address) == "met"
        assert first.result() == "met"


def test_rank_0_listens_even_if_the_host_name_does_not_resolve() -> None:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(outcome, 0, 2, f"no-such-name.invalid:{port}")  # as a name that is not yet in DNS
        assert outcome(1, 2, f"{rendezvous.LOOPBACK}:{port}") == "met"
        assert first.result() == "met"


@pytest.mark.slow
def test_another_program_at_the_address_is_waited_for(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "PATIENCE", 1.0)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind((rendezvous.LOOPBACK, int(address.rpartition(":")[2])))
        other.listen()
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(outcome, 1, 2, address)
            client = other.accept()[0]
            client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            client.close()
            assert first.result() == f"process 0 of 2 did not arrive at the rendezvous {address} within 1 s"


def _connected(host: str, port: int) -> socket.socket:
    while True:
        try:
            return socket.create_connection((host, port), 1)
        except ConnectionRefusedError:
            continue


def test_an_address_in_use_is_refused() -> None:
    with socket.socket() as other:
        other.bind((rendezvous.LOOPBACK, 0))
        other.listen()
        taken = f"{rendezvous.LOOPBACK}:{other.getsockname()[1]}"
        assert outcome(0, 2, taken) == f"cannot listen on port {taken.partition(':')[2]}: Address already in use"


@pytest.mark.parametrize(
    ("names", "listened"),
    [
        (["127.0.0.1"], "127.0.0.1"),
        (["127.0.1.1"], ""),  # Debian's name of this machine for itself: other machines know it by another address
        (["192.0.2.7"], ""),  # of another machine, or translated on the way
        (["127.0.0.1", "192.0.2.7"], ""),
        ([], ""),
    ],
)
def test_the_coordinator_listens_where_it_is_reached(
    monkeypatch: pytest.MonkeyPatch, names: list[str], listened: str
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", (name, 0)) for name in names])
    assert interface(names[0] if listened else "node-0") == listened
