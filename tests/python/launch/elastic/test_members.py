"""A coordinator and launchers over real connections; who does not belong to the run is let in nowhere."""

from __future__ import annotations

import hashlib
import hmac
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch.elastic import coordinator
from accelerate_cpp.launch.elastic import member as member_module
from accelerate_cpp.launch.elastic.coordinator import Coordinator
from accelerate_cpp.launch.elastic.member import End, Interrupted, Member, Start
from accelerate_cpp.launch.elastic.messages import MEMBER, MOST_BYTES, Channel, Message, Unproved, _Seals, key_of
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

    def member(self, secret: str = "", terms: Terms = TERMS, order: int = 0, port: int | None = None) -> Member:
        signals, interrupt = socket.socketpair()
        self._stack.enter_context(signals)
        self._stack.enter_context(interrupt)
        self.interrupts.append(interrupt)
        member = self._stack.enter_context(Member("127.0.0.1", port or self.port, terms, signals, order, secret))
        assert member.connect() is None
        return member

    @contextmanager
    def passing_member(self, order: int) -> Iterator[Member]:
        """A member that leaves at the end of the block."""
        signals, interrupt = socket.socketpair()
        with signals, interrupt, Member("127.0.0.1", self.port, TERMS, signals, order, "") as member:
            assert member.connect() is None
            yield member

    def stranger(self, own_address: str = "127.0.0.1") -> Channel:
        place = ("127.0.0.1", self.port)
        connection = self._stack.enter_context(socket.create_connection(place, source_address=(own_address, 0)))
        connection.settimeout(PATIENCE_SECONDS)
        return Channel(connection)


def messages_of(channel: Channel) -> Iterator[Message]:
    """What the other end says, until it closes the connection."""
    while (found := channel.read()) is not None:
        yield from found


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
    assert (
        "has gone; make sure that it has ended, and start the run again: it continues from its last checkpoint"
        in end.reason
    )


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
    second.leaves(has_saved=True)
    while first.stop_reason is None:
        os.sched_yield()
    first.ended(start, 143, "")
    (again,) = _started(first)
    assert (again.round, again.count) == (2, 1)


def test_the_end_of_a_run_ends_a_round_that_begins_only_then(place: Place) -> None:
    alone = Terms(least=1, most=1, silence=PATIENCE_SECONDS)
    with Coordinator(place.listener, "127.0.0.1", alone):
        member = place.member(terms=alone)
        (start,) = _started(member)
    assert isinstance(member.next_order(), End)
    requests = member.begin(start)
    assert _ends(requests)
    os.close(requests)


UNPROVED = "has not shown that it knows the run's secret: expected the same ACCELERATE_CPP_RUN_SECRET as here"


@pytest.mark.parametrize("secret", ["open sesame", "\udcff"])
@pytest.mark.parametrize("other", ["open barley", ""])
def test_only_those_that_know_the_secret_take_part(place: Place, secret: str, other: str) -> None:
    place.coordinate(secret)
    refused = place.member(other).next_order()
    assert isinstance(refused, End)
    assert refused.status == 1
    assert f"at 127.0.0.1, port {place.port}, {UNPROVED}" in refused.reason
    members = place.member(secret, order=0), place.member(secret, order=1)
    assert [start.count for start in _started(*members)] == [2, 2]


@pytest.mark.parametrize("known", ["open barley", ""])
def test_who_leads_without_the_secret_is_not_obeyed(place: Place, known: str) -> None:
    place.coordinate(known)
    end = place.member("open sesame").next_order()
    assert isinstance(end, End)
    found = "found another one or none, or another version of this package; set and install the same on all machines"
    assert f"{UNPROVED}, where it is set, {found}" in end.reason


def test_a_launcher_of_an_older_version_is_told_so(place: Place) -> None:
    """Those greeted without a challenge of their own, and understand an end without a seal."""
    place.coordinate("secret")
    stranger = place.stranger()
    stranger.send({"say": "hello", "proof": "0" * 64, "name": "a", "order": 0})
    prove, end = messages_of(stranger)
    assert prove["do"] == "prove"
    assert end == {
        "do": "end",
        "status": 1,
        "reason": "this launcher has another version of this package than the one that leads the run: install the same "
        "on all machines",
    }


def test_a_launcher_whose_greeting_lacks_something_is_of_another_version(place: Place) -> None:
    place.coordinate("secret")
    stranger = place.stranger()
    (prove,) = stranger.read() or ()
    stranger.send({"say": "challenge", "challenge": "c"})
    stranger.seal("secret", MEMBER, (str(prove["challenge"]), "c"))
    stranger.send({"say": "hello", "name": "a", "order": 0})
    (end,) = messages_of(stranger)
    assert (end["do"], end["status"]) == ("end", 1)
    assert "another version of this package" in str(end["reason"])


def test_what_the_launcher_that_leads_said_last_is_heard_by_the_others(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the coordinator is busy at that moment, and told to end before it can hear it."""
    monkeypatch.setattr(coordinator, "_FAREWELL_SECONDS", 0.2)  # the other one stays longer
    is_busy = threading.Event()
    with Coordinator(place.listener, "127.0.0.1", TERMS) as leading:
        leader, other = place.member(order=0), place.member(order=1)
        start, others = _started(leader, other)
        other.ended(others, 0, "")
        while not any(launcher.ended for launcher in leading._rounds._launchers.values()):
            os.sched_yield()
        look = leading._rounds.look

        def look_late(now: float) -> None:
            is_busy.set()
            while not leading._is_closing:
                os.sched_yield()
            look(now)

        monkeypatch.setattr(leading._rounds, "look", look_late)
        is_busy.wait()
        leader.ended(start, 0, "")
    assert other.next_order() == End(0, "")


def test_a_launcher_tells_that_the_one_that_leads_may_be_of_an_older_version(place: Place) -> None:
    member = place.member()
    connection, _ = place.listener.accept()
    with connection:
        connection.sendall(b'{"do": "prove", "challenge": "c"}\n')
        connection.sendall(b'{"do": "end", "status": 1, "reason": "it does not know the run\'s secret"}\n')
        end = member.next_order()
    assert isinstance(end, End)
    assert "where it is not set, found another one or none, or another version of this package" in end.reason


START = b'{"do": "start", "round": 1, "rank": 1, "count": 2, "address": "192.0.2.1", "port": 7}\n'


@pytest.mark.parametrize(
    "order", [START, b'{"do": "offer", "round": 1}\n', b'{"do": "end", "status": 0, "reason": ""}\n']
)
@pytest.mark.parametrize("seal", [b"", b"0" * 64 + b" ", b"\xff "])
def test_a_stranger_that_leads_is_not_obeyed(place: Place, seal: bytes, order: bytes) -> None:
    """Another user of the machine may have been first at the port of the run."""
    member = place.member("secret")
    connection, _ = place.listener.accept()
    with connection:
        connection.sendall(b'{"do": "prove", "challenge": "c"}\n' + seal + order)
        end = member.next_order()
    assert isinstance(end, End)
    assert end.status == 1
    assert UNPROVED in end.reason


class Relay:
    """Stands between a member and the coordinator, passes on what they say, and keeps it."""

    def __init__(self, stack: ExitStack, coordinator_port: int) -> None:
        self._listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.port = int(self._listener.getsockname()[1])
        self._coordinator_port = coordinator_port
        self.said: dict[str, bytes] = {"member": b"", "coordinator": b""}
        self._stack = stack

    def start(self) -> None:
        self.to_member, _ = self._listener.accept()
        self.to_coordinator = socket.create_connection(("127.0.0.1", self._coordinator_port))
        ways = {"member": (self.to_member, self.to_coordinator), "coordinator": (self.to_coordinator, self.to_member)}
        for who, (source, target) in ways.items():
            self._stack.enter_context(source)
            thread = threading.Thread(target=self._pass_on, args=(who, source, target), daemon=True)
            thread.start()
            self._stack.callback(thread.join)
        self._stack.callback(self.end)

    def _pass_on(self, who: str, source: socket.socket, target: socket.socket) -> None:
        try:
            while chunk := source.recv(4096):
                self.said[who] += chunk
                target.sendall(chunk)
        except OSError:
            pass
        self.end()

    def end(self) -> None:
        for one in (self.to_member, self.to_coordinator):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def relay(place: Place) -> Iterator[Relay]:
    with ExitStack() as stack:
        yield Relay(stack, place.port)


def _relayed_members(place: Place, relay: Relay) -> list[Member]:
    """Two members in the first round, the second of them through the relay."""
    first, second = place.member("secret", order=0), place.member("secret", order=1, port=relay.port)
    relay.start()
    assert [start.rank for start in _started(first, second)] == [0, 1]
    return [first, second]


@pytest.mark.parametrize("repeats", [False, True])
def test_who_relays_the_proofs_can_add_no_order(place: Place, relay: Relay, repeats: bool) -> None:
    place.coordinate("secret")
    _, second = _relayed_members(place, relay)
    relay.to_member.sendall(relay.said["coordinator"].splitlines(keepends=True)[-1] if repeats else START)
    end = second.next_order()
    assert isinstance(end, End)
    assert UNPROVED in end.reason


def test_who_relays_the_proofs_can_say_nothing_for_a_launcher(place: Place, relay: Relay) -> None:
    place.coordinate("secret")
    first, _ = _relayed_members(place, relay)
    relay.to_coordinator.sendall(b'{"say": "ended", "round": 1, "status": 0, "sentence": ""}\n')
    while first.stop_reason is None:
        os.sched_yield()
    assert first.stop_reason == f"the launcher on {socket.gethostname()} is gone"


def test_a_proof_of_another_connection_is_worth_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "_GREETING_SECONDS", PATIENCE_SECONDS)
    coordinating = place.coordinate("secret")
    thief = place.stranger()
    with ExitStack() as stack:
        relay = Relay(stack, place.port)
        place.member("secret", port=relay.port)
        relay.start()
        while relay.said["member"].count(b"\n") < 2:
            os.sched_yield()
        overheard = relay.said["member"]
        thief.socket.sendall(b"".join(overheard.splitlines(keepends=True)[:2]))
        answers = thief.socket.makefile("rb")
        assert b'"do": "prove"' in answers.readline()
        assert b'"do": "end"' in answers.readline()
        assert answers.readline() == b""
        assert len(coordinating._rounds._launchers) == 1


@pytest.mark.parametrize("greeting", [b"", b'{"do": "prove", "challenge": "c"}\n'])
def test_a_launcher_that_was_taken_for_a_stranger_comes_again(place: Place, greeting: bytes) -> None:
    """In a crowd of connections, the coordinator may close that of a launcher before it has heard from it."""
    first = place.member("secret", order=0)
    place.listener.settimeout(PATIENCE_SECONDS)
    for _ in range(2):
        connection, _ = place.listener.accept()
        with connection:
            connection.sendall(greeting)
            if greeting:
                assert connection.recv(1)  # what else has come is not read, so the connection is reset
    place.coordinate("secret")
    place.member("secret", order=1)
    (start,) = _started(first)
    assert (start.rank, start.count) == (0, 2)


@pytest.mark.parametrize("pause_seconds", [0.02, 0.2])
@pytest.mark.parametrize("greeting", [b"", b'{"do": "prove", "challenge": "c"}\n'])
def test_parts_of_a_message_are_no_word_of_the_launcher_that_leads(
    place: Place, greeting: bytes, pause_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program of others that listens first, and sends a byte again and again."""
    monkeypatch.setattr(member_module, "STALL_SECONDS", 0.05)  # so that two pauses are as long as a stall
    member = place.member("secret", terms=Terms(1, 2, silence=0.3))
    connection, _ = place.listener.accept()
    with connection, suppress(OSError):  # until it is closed
        connection.sendall(greeting)
        while member._orders.empty():
            connection.sendall(b" ")
            time.sleep(pause_seconds)
    end = member.next_order()
    assert isinstance(end, End)
    assert "has said nothing for 0.3 s" in end.reason


def test_a_launcher_that_is_never_let_in_says_so(place: Place) -> None:
    member = place.member(terms=Terms(1, 2, join=0.0))
    place.listener.accept()[0].close()
    end = member.next_order()
    assert isinstance(end, End)
    assert f"port {place.port}, which leads the run, has not let this launcher in for 0 s" in end.reason


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\n",
        b"[" * 100_000 + b"\n",
        b"x" * (MOST_BYTES + 5000),
        b'{"say": "ended", "round": 0, "status": 0, "sentence": ""}\n',
        b'{"say": "challenge", "challenge": 7}\n',
        b'{"say": "challenge", "challenge": "\\ud800"}\n\xff {}\n',
        b'{"say": "challenge", "challenge": "c"}\n{"say": "hello", "name": "a", "order": 0}\n',
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


def test_a_secret_is_refused_by_a_python_that_cannot_protect_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object, **__: object) -> bytes:
        raise ValueError("unsupported")

    monkeypatch.setattr(hashlib, "scrypt", absent)
    with pytest.raises(InvalidArgument, match=r"needs scrypt, which this Python does not have \(unsupported\)"):
        key_of("a secret of this test")


def test_in_a_crowd_those_who_come_alone_stay(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "_GREETING_SECONDS", PATIENCE_SECONDS)
    place.coordinate("secret")
    alone = place.stranger()
    assert next(messages_of(alone))["do"] == "prove"
    crowd = [place.stranger("127.0.0.2") for _ in range(200)]
    assert next(messages_of(crowd[-1]))["do"] == "prove"  # all have been let in by now
    challenges = "", ""
    alone.send({"say": "challenge", "challenge": challenges[1]})
    alone.seal("another", MEMBER, challenges)
    alone.send({"say": "hello", "name": "a", "order": 0})
    with pytest.raises(Unproved):  # it is answered
        next(messages_of(alone))


def test_a_secret_is_not_found_at_the_speed_of_a_hash() -> None:
    """Strangers are told a seal, against which they can try texts."""
    one, other = (_Seals("open sesame", MEMBER, ("a", "b")) for _ in range(2))
    assert one.next(b"text") == other.next(b"text")
    known = [hmac.new(key, b"", hashlib.sha256) for key in (b"open sesame", hashlib.sha256(b"open sesame").digest())]
    assert key_of("open sesame") not in [b"open sesame", *(one.digest() for one in known)]
    assert key_of("") == b""  # as there is nothing to find out
    expected = hashlib.scrypt(b"open sesame", salt=b"accelerate-cpp run", n=2**14, r=8, p=1)
    assert key_of("open sesame") == expected


def test_a_crowd_of_silent_strangers_keeps_nobody_out(place: Place) -> None:
    place.coordinate("secret")
    crowd = [place.stranger() for _ in range(200)]
    members = place.member("secret", order=0), place.member("secret", order=1)
    assert [start.count for start in _started(*members)] == [2, 2]
    assert len(crowd) == 200
