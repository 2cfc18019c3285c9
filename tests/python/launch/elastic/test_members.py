"""A coordinator and launchers over real connections; who does not belong to the run is let in nowhere."""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch.elastic.coordinator import Coordinator
from accelerate_cpp.launch.elastic.member import End, Interrupted, Member, Start
from accelerate_cpp.launch.elastic.messages import MOST_BYTES, Channel
from accelerate_cpp.launch.elastic.rounds import Terms

PATIENCE_SECONDS = 120.0
TERMS = Terms(least=1, most=2, max_restarts=0, last_call=PATIENCE_SECONDS, silence=PATIENCE_SECONDS)


class Place:
    """Where a coordinator listens, and members that a test makes."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.listener.getsockname()[1])
        self.interrupts: list[socket.socket] = []

    def coordinate(self, secret: str = "", terms: Terms = TERMS) -> Coordinator:
        return self._stack.enter_context(Coordinator(self.listener, "127.0.0.1", terms, secret))

    def member(self, secret: str = "", terms: Terms = TERMS, order: int = 0) -> Member:
        signals, interrupt = socket.socketpair()
        self._stack.enter_context(signals)
        self._stack.enter_context(interrupt)
        self.interrupts.append(interrupt)
        member = self._stack.enter_context(Member("127.0.0.1", self.port, terms, signals, order, secret))
        assert member.connect() is None
        return member

    @contextmanager
    def passing_member(self, order: int) -> Iterator[Member]:
        """A member that leaves at the end of the block."""
        signals, interrupt = socket.socketpair()
        with signals, interrupt, Member("127.0.0.1", self.port, TERMS, signals, order, "") as member:
            assert member.connect() is None
            yield member

    def stranger(self) -> Channel:
        connection = self._stack.enter_context(socket.create_connection(("127.0.0.1", self.port)))
        connection.settimeout(PATIENCE_SECONDS)
        return Channel(connection)


@pytest.fixture
def place() -> Iterator[Place]:
    with ExitStack() as stack:
        found = Place(stack)
        yield found
    found.listener.close()


def _ends(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], PATIENCE_SECONDS)[0]) and os.read(descriptor, 1) == b""


def _started(*members: Member) -> list[Start]:
    starts = [member.next_order() for member in members]
    assert all(isinstance(start, Start) for start in starts), starts
    return [start for start in starts if isinstance(start, Start)]


def test_two_launchers_start_with_ranks_of_one_run_and_end_together(place: Place) -> None:
    place.coordinate()
    first, second = place.member(order=0), place.member(order=1)
    starts = _started(first, second)
    assert [(start.round, start.rank, start.count, start.address) for start in starts] == [
        (1, 0, 2, "127.0.0.1"),
        (1, 1, 2, "127.0.0.1"),
    ]
    assert starts[0].port == starts[1].port
    requests = [member.begin(start) for member, start in zip((first, second), starts, strict=True)]
    for member, start, descriptor in zip((first, second), starts, requests, strict=True):
        member.ended(start, 0, "")
        os.close(descriptor)
    assert [member.next_order() for member in (first, second)] == [End(0, ""), End(0, "")]


def test_the_others_are_stopped_when_the_connection_of_one_ends(place: Place) -> None:
    place.coordinate()
    first = place.member(order=0)
    with place.passing_member(order=1) as second:
        (start, _) = _started(first, second)
        requests = first.begin(start)
    assert _ends(requests)
    os.close(requests)
    assert first.stop_reason == f"the launcher on {socket.gethostname()} is gone"
    first.ended(start, 143, "")
    (again,) = _started(first)
    assert (again.round, again.rank, again.count) == (2, 0, 1)


def test_a_stop_that_comes_before_its_round_begins_stops_it(place: Place) -> None:
    place.coordinate()
    first = place.member(order=0)
    with place.passing_member(order=1) as second:
        (start, _) = _started(first, second)
    while first.stop_reason is None:
        os.sched_yield()
    requests = first.begin(start)
    assert _ends(requests)
    os.close(requests)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_told_while_nothing_runs(place: Place, number: int) -> None:
    place.coordinate()
    member = place.member()
    place.interrupts[0].send(bytes([number]))
    assert member.next_order() == Interrupted(number)


def test_the_end_of_the_coordinator_ends_the_run(place: Place) -> None:
    with Coordinator(place.listener, "127.0.0.1", TERMS):
        member = place.member()
    end = member.next_order()
    assert isinstance(end, End)
    assert end.status == 1
    assert "has gone; start the run again: it continues from its last checkpoint" in end.reason


def test_nobody_listens(place: Place) -> None:
    place.listener.close()
    with pytest.raises(InvalidArgument, match=f"no launcher of the run listens at 127.0.0.1, port {place.port}"):
        place.member(terms=Terms(1, 2, join=0.0))


def test_a_lost_launcher_is_told_so_when_it_speaks_again_and_the_others_go_on(place: Place) -> None:
    coordinator = place.coordinate()
    first, second = place.member(order=0), place.member(order=1)
    start, _ = _started(first, second)
    lost = max(coordinator._rounds._launchers)
    coordinator._rounds._launchers[lost].heard = float("-inf")
    end = second.next_order()
    assert isinstance(end, End)
    assert "the run goes on without it" in end.reason
    assert second.stop_reason == ""  # the end tells the reason
    second.leaves()
    while first.stop_reason is None:
        os.sched_yield()
    first.ended(start, 143, "")
    (again,) = _started(first)
    assert (again.round, again.count) == (2, 1)


def test_the_end_of_a_run_ends_a_round_that_begins_only_then(place: Place) -> None:
    with Coordinator(place.listener, "127.0.0.1", Terms(least=1, most=1, silence=PATIENCE_SECONDS)):
        member = place.member()
        (start,) = _started(member)
    assert isinstance(member.next_order(), End)
    requests = member.begin(start)
    assert _ends(requests)
    os.close(requests)


@pytest.mark.parametrize("secret", ["open sesame", "\udcff"])
def test_only_those_that_know_the_secret_take_part(place: Place, secret: str) -> None:
    place.coordinate(secret)
    refused = place.member("open barley")
    assert refused.next_order() == End(1, "it does not know the run's secret")
    members = place.member(secret, order=0), place.member(secret, order=1)
    assert [start.count for start in _started(*members)] == [2, 2]


def test_a_proof_of_another_connection_is_worth_nothing(place: Place) -> None:
    from accelerate_cpp.launch.elastic.messages import proof

    place.coordinate("secret")
    first, second = place.stranger(), place.stranger()
    overheard = next(first.messages())["challenge"]
    second.send({"say": "hello", "proof": proof("secret", overheard), "name": "thief", "order": 0})
    assert [message["do"] for message in second.messages()] == ["prove", "end"]


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\n",
        b"[" * 100_000 + b"\n",
        b"x" * (MOST_BYTES + 5000),
        b'{"say": "ended", "round": 0, "status": 0, "sentence": ""}\n',
        b'{"proof": 7}\n',
        b'{"proof": "\\ud800"}\n',
        b"\xff\xfe\n",
    ],
)
def test_what_strangers_say_disturbs_no_run(place: Place, said: bytes) -> None:
    place.coordinate("secret")
    stranger = place.stranger()
    try:
        stranger.socket.sendall(said)
        while stranger.socket.recv(4096):
            pass
    except (ConnectionResetError, BrokenPipeError):
        pass
    members = place.member("secret", order=0), place.member("secret", order=1)
    assert [start.count for start in _started(*members)] == [2, 2]


def test_a_crowd_of_silent_strangers_keeps_nobody_out(place: Place) -> None:
    place.coordinate("secret")
    crowd = [place.stranger() for _ in range(200)]
    members = place.member("secret", order=0), place.member("secret", order=1)
    assert [start.count for start in _started(*members)] == [2, 2]
    assert len(crowd) == 200
