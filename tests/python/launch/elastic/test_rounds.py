"""Which launchers take part in the rounds of an elastic run, with a clock of the test's own."""

from __future__ import annotations

from typing import Any

import pytest

from accelerate_cpp.launch.elastic.messages import Misunderstood
from accelerate_cpp.launch.elastic.returns import STEADY_SECONDS
from accelerate_cpp.launch.elastic.rounds import ARRIVAL_SECONDS, CAUSE_SECONDS, SETTLE_SECONDS, Rounds, Terms

TERMS = Terms(least=1, most=3, max_restarts=1, last_call=30, join=600, silence=15)


class Run:
    """Rounds with a clock, and what each launcher was told last."""

    def __init__(self, terms: Terms = TERMS) -> None:
        self.now = 100.0
        self.rounds = Rounds(terms, self.now)
        self.told: dict[int, dict[str, Any]] = {}

    def join(self, *numbers: int, order: int = 0, name: str | None = None) -> None:
        for number in numbers:
            hello = {"name": name or f"node{number}", "order": order, "most": self.rounds.terms.most}
            hello |= {"num_processes": self.rounds.terms.num_processes}
            self.rounds.join(number, hello, f"10.0.0.{number}", self.now)
        self.deliver()

    def say(self, number: int, said: str, **more: Any) -> None:
        if said == "stopped":
            more.setdefault("status", 143)
        self.rounds.hear(number, {"say": said, **more}, self.now)
        self.deliver()

    def lose(self, number: int) -> None:
        self.rounds.lose(number, self.now)
        self.deliver()

    def wait(self, seconds: float, *alive: int) -> None:
        """Lets time pass, in which the launchers ``alive`` say that they are."""
        self.now += seconds
        for number in alive:
            self.rounds.hear(number, {"say": "alive"}, self.now)
        self.rounds.look(self.now)
        self.deliver()

    def deliver(self) -> None:
        while self.rounds.outbox:
            number, message = self.rounds.outbox.pop(0)
            self.told[number] = message
            if message["do"] == "offer":
                self.rounds.hear(number, {"say": "port", "round": message["round"], "port": 5000 + number}, self.now)

    def places(self) -> dict[int, tuple[int, int]]:
        """Rank and count of those that were told to start last."""
        return {number: (told["rank"], told["count"]) for number, told in self.told.items() if told["do"] == "start"}

    def doing(self) -> dict[int, str]:
        return {number: told["do"] for number, told in self.told.items()}


def running(*numbers: int, terms: Terms = TERMS) -> Run:
    run = Run(terms)
    run.join(*numbers)
    if len(numbers) < terms.most:
        run.wait(terms.last_call / 2, *numbers)
        run.wait(terms.last_call / 2, *numbers)
    assert sorted(run.places()) == sorted(numbers)
    return run


def test_all_launchers_start_at_once_with_a_port_of_the_first() -> None:
    run = running(4, 5, 6)
    assert run.places() == {4: (0, 3), 5: (1, 3), 6: (2, 3)}
    assert {(told["address"], told["port"]) for told in run.told.values()} == {("10.0.0.4", 5004)}


def test_order_decides_over_who_came_first() -> None:
    run = Run()
    run.join(4, order=2)
    run.join(5, order=0)
    run.join(6, order=1)
    assert run.places() == {5: (0, 3), 6: (1, 3), 4: (2, 3)}


def test_enough_launchers_wait_for_the_last_call_and_no_longer() -> None:
    run = Run()
    run.join(1, 2)
    run.wait(14, 1, 2)
    run.wait(14, 1, 2)
    assert run.told == {}
    run.wait(3, 1, 2)
    assert run.places() == {1: (0, 2), 2: (1, 2)}


def test_each_newcomer_begins_the_last_call_anew() -> None:
    run = Run()
    run.join(1)
    run.wait(14, 1)
    run.wait(14, 1)
    run.join(2)
    run.wait(14, 1, 2)
    assert run.told == {}


def test_too_few_launchers_give_up() -> None:
    run = Run(Terms(least=2, most=3, join=60, silence=1000))
    run.join(1)
    run.wait(61)
    assert run.told[1] == {"do": "end", "status": 1, "reason": "1 of at least 2 machines were there for 60 s"}


def test_a_lost_launcher_stops_the_others_which_start_without_it() -> None:
    run = running(1, 2, 3)
    run.lose(2)
    assert run.told[1] == {"do": "stop", "round": 1, "reason": "the launcher on node2 is gone", "can_save": False}
    run.say(1, "stopped", round=1)
    run.say(3, "stopped", round=1)
    run.wait(SETTLE_SECONDS, 1, 3)
    assert (run.places()[1], run.places()[3], run.told[1]["round"]) == ((0, 2), (1, 2), 2)


def test_a_launcher_that_says_nothing_is_lost() -> None:
    run = running(1, 2, 3)
    run.wait(14, 1, 3)
    assert run.doing() == {1: "start", 2: "start", 3: "start"}
    run.wait(2, 1, 3)
    assert run.told[1]["reason"] == "the launcher on node2 has said nothing for 15 s"


def test_a_lost_launcher_that_speaks_again_changes_nothing_and_is_told_why() -> None:
    run = running(1, 2, 3)
    run.wait(16, 1, 3)
    assert run.told[2]["do"] == "end"
    assert run.told[2]["reason"].startswith("this launcher has said nothing for 15 s, and the run goes on without it")
    for said in ("alive", "leaves", "ended", "sings"):
        run.say(2, said, round=1, status=0, sentence="")
    run.say(1, "stopped", round=1)
    run.say(3, "stopped", round=1)
    run.wait(SETTLE_SECONDS, 1, 3)
    assert (run.told[1]["do"], run.told[1]["count"], run.told[3]["do"]) == ("start", 2, "start")


def test_errors_that_follow_from_a_loss_count_as_no_restart() -> None:
    run = running(1, 2, 3, terms=Terms(least=1, most=3, max_restarts=0))
    run.say(1, "ended", round=1, status=1, sentence="PeerLost: rank 1 has ended")
    run.lose(2)
    run.say(3, "ended", round=1, status=1, sentence="PeerLost: rank 1 has ended")
    run.wait(SETTLE_SECONDS, 1, 3)
    assert run.places()[3] == (1, 2)


def test_failures_are_restarted_as_often_as_may_be_and_the_first_is_the_status() -> None:
    run = running(1, 2, 3)
    for attempt in (1, 2):
        run.say(2, "ended", round=attempt, status=9, sentence="rank 1 failed first: exit code 9", is_cause=True)
        assert run.told[1] == {"do": "stop", "round": attempt, "reason": "", "can_save": False}
        run.say(1, "stopped", round=attempt)
        run.say(3, "ended", round=attempt, status=1, sentence="PeerLost")
        run.wait(0)
    assert run.told[1] == {"do": "end", "status": 9, "reason": "rank 1 failed first: exit code 9"}
    assert run.rounds.is_over


def test_the_failure_that_blames_nobody_is_the_status_whoever_tells_first() -> None:
    run = running(1, 2, 3, terms=Terms(least=1, most=3))
    run.say(1, "ended", round=1, status=1, sentence="PeerLost: rank 1 has left", is_cause=False)
    assert run.doing() == {1: "start", 2: "start", 3: "start"}
    run.say(2, "ended", round=1, status=9, sentence="rank 1 failed first", is_cause=True)
    run.say(3, "ended", round=1, status=3, sentence="late", is_cause=True)
    assert run.told[1] == {"do": "end", "status": 9, "reason": "rank 1 failed first"}


def test_a_failure_that_blames_others_stops_them_when_they_had_time_to_tell_theirs() -> None:
    run = running(1, 2, 3)
    run.say(1, "ended", round=1, status=1, sentence="Timeout: waited for rank 2", is_cause=False)
    for _ in range(3):
        run.wait(CAUSE_SECONDS / 3 - 1, 1, 2, 3)
        assert run.doing()[2] == "start"
    run.wait(4, 1, 2, 3)
    assert run.doing() == {1: "start", 2: "stop", 3: "stop"}


def test_all_that_end_well_end_the_run() -> None:
    run = running(1, 2, 3)
    for number in (1, 2):
        run.say(number, "ended", round=1, status=0, sentence="")
    assert not run.rounds.is_over
    run.say(3, "ended", round=1, status=0, sentence="")
    assert run.told[2] == {"do": "end", "status": 0, "reason": ""}


def test_one_that_has_ended_well_may_leave_before_the_others() -> None:
    run = running(1, 2, 3)
    run.say(3, "ended", round=1, status=0, sentence="")
    run.lose(3)
    assert run.doing()[1] == "start"


def test_a_newcomer_is_taken_in_by_a_new_round_until_there_are_enough() -> None:
    run = running(1, 2)
    run.join(7)
    assert run.told[1] == {"do": "stop", "round": 1, "reason": "node7 has come", "can_save": True}
    run.say(1, "stopped", round=1)
    run.say(2, "ended", round=1, status=75, sentence="", has_saved=True)
    run.wait(0)
    assert run.places() == {1: (0, 3), 2: (1, 3), 7: (2, 3)}
    run.join(8)
    assert run.doing() == {1: "start", 2: "start", 7: "start"}
    run.lose(2)
    run.say(1, "stopped", round=2)
    run.say(7, "stopped", round=2)
    run.wait(0)
    assert [run.places()[number] for number in (1, 7, 8)] == [(0, 3), (1, 3), (2, 3)]


def test_those_that_come_together_end_one_round() -> None:
    run = running(1, terms=Terms(least=1, most=4))
    run.join(7)
    run.wait(ARRIVAL_SECONDS / 2, 1, 7)
    run.join(8)
    run.wait(ARRIVAL_SECONDS - 1, 1, 7, 8)
    assert run.told[1]["do"] == "start"
    run.wait(1, 1, 7, 8)
    assert run.told[1] == {"do": "stop", "round": 1, "reason": "node7 and node8 have come", "can_save": True}


def test_a_launcher_for_which_there_was_no_room_does_not_end_a_round_that_ends_well() -> None:
    run = running(1, 2, 3)
    run.join(4)
    run.say(3, "ended", round=1, status=0, sentence="")
    run.lose(3)
    run.wait(ARRIVAL_SECONDS, 1, 2, 4)
    assert run.doing()[1] == run.doing()[2] == "start"


def lose_and_return(run: Run, lost: int, *rest: int) -> None:
    """Launcher ``lost`` is lost, so that those of ``rest`` begin a round without it, and is started again."""
    run.lose(lost)
    for number in rest:
        run.say(number, "stopped", round=run.told[number]["round"])
    run.wait(SETTLE_SECONDS, *rest)
    assert run.places()[rest[0]] == (0, len(rest))
    run.told.pop(lost, None)
    run.join(lost)


def take_part(run: Run, comer: int, *rest: int) -> None:
    """Those of ``rest`` end their round for one that has come, and begin one with it."""
    for number in rest:
        assert run.told[number]["do"] == "stop"
        run.say(number, "stopped", round=run.told[number]["round"])
    run.wait(0, comer, *rest)
    assert run.places() == {number: (place, len(rest) + 1) for place, number in enumerate(sorted([comer, *rest]))}


def test_a_machine_that_is_lost_again_and_again_waits_longer_each_time() -> None:
    run = running(1, 2, terms=Terms(least=1, most=2, return_delay=30))
    lose_and_return(run, 2, 1)
    take_part(run, 2, 1)
    for wait, losses in ((30, 2), (60, 3), (120, 4)):
        lose_and_return(run, 2, 1)
        assert run.told[2]["do"] == "wait"
        assert run.told[2]["reason"].startswith(f"node2 was lost {losses} times soon after it had begun to take part, ")
        for _ in range(wait // 10 - 1):
            run.wait(10, 1, 2)
            assert run.told[1]["do"] == "start"
        run.wait(10, 1, 2)
        take_part(run, 2, 1)


def test_the_wait_has_a_limit_and_a_steady_machine_has_none() -> None:
    run = running(1, 2, terms=Terms(least=1, most=2, return_delay=30))
    for _ in range(12):
        lose_and_return(run, 2, 1)
        for _ in range(60):
            run.wait(10, 1, 2)
        take_part(run, 2, 1)
    for _ in range(int(STEADY_SECONDS // 10)):
        run.wait(10, 1, 2)
    lose_and_return(run, 2, 1)
    take_part(run, 2, 1)


def test_a_run_takes_a_machine_that_waits_where_it_lacks_one() -> None:
    run = running(1, 2, 3, terms=Terms(least=2, most=3))
    lose_and_return(run, 3, 1, 2)
    take_part(run, 3, 1, 2)
    lose_and_return(run, 3, 1, 2)
    assert run.told[3]["do"] == "wait"
    run.lose(2)
    run.say(1, "stopped", round=run.told[1]["round"])
    run.wait(SETTLE_SECONDS, 1, 3)
    assert (run.told[1]["count"], run.told[3]["count"]) == (2, 2)


def test_one_that_was_taken_because_one_lacked_stays_when_another_comes() -> None:
    run = running(1, 2, 3, terms=Terms(least=2, most=3))
    lose_and_return(run, 3, 1, 2)
    take_part(run, 3, 1, 2)
    lose_and_return(run, 3, 1, 2)
    run.lose(2)
    run.say(1, "stopped", round=run.told[1]["round"])
    run.wait(SETTLE_SECONDS, 1, 3)
    run.join(4)
    for number in (1, 3):
        run.say(number, "stopped", round=run.told[number]["round"])
    run.wait(0, 1, 3, 4)
    assert [run.told[number]["count"] for number in (1, 3, 4)] == [3, 3, 3]


def test_other_launchers_of_a_machine_of_which_one_is_lost_again_and_again_go_on() -> None:
    run = Run(Terms(least=1, most=3, silence=1000))
    run.join(1, 2, 3, name="node")
    for lost in (3, 4):
        run.lose(lost)
        for number in (1, 2):
            run.say(number, "stopped", round=run.told[number]["round"])
        run.wait(SETTLE_SECONDS, 1, 2)
        assert (run.told[1]["count"], run.told[2]["count"]) == (2, 2)
        run.told.pop(lost)
        run.join(lost + 1, name="node")
        if lost == 3:
            take_part(run, 4, 1, 2)
    assert run.told[5]["do"] == "wait"


def test_a_machine_that_is_lost_with_all_its_launchers_is_lost_once() -> None:
    run = Run(Terms(least=1, most=3))
    run.join(1)
    run.join(2, 3, name="node")
    for lost in (2, 3):
        run.lose(lost)
    run.say(1, "stopped", round=1)
    run.wait(SETTLE_SECONDS, 1)
    run.join(4, name="node")
    assert 4 not in run.told
    run.wait(ARRIVAL_SECONDS, 1, 4)
    assert run.told[1]["do"] == "stop"


def test_a_machine_that_saves_before_it_leaves_returns_at_once() -> None:
    run = running(1, 2, terms=Terms(least=1, most=2))
    for _ in range(3):
        run.say(2, "leaves", has_saved=True)
        lose_and_return(run, 2, 1)
        take_part(run, 2, 1)


def test_those_that_may_save_before_a_new_round_may_not_once_one_of_them_is_lost() -> None:
    run = running(1, 2)
    run.join(7)
    run.lose(2)
    assert run.told[1] == {"do": "stop", "round": 1, "reason": "the launcher on node2 is gone", "can_save": False}


def test_those_that_save_because_one_was_told_to_end_may_go_on_when_it_has_left() -> None:
    run = running(1, 2, 3)
    run.say(3, "leaves", has_saved=True)
    run.lose(3)
    assert run.told[1]["can_save"] is True
    assert run.told[1]["reason"] == "the launcher on node3 was told to end"


def test_those_of_a_machine_that_leaves_without_saving_leave_the_others_nothing_to_save() -> None:
    run = running(1, 2, 3)
    run.say(3, "leaves", has_saved=False)
    assert (run.told[1]["do"], run.told[1]["can_save"]) == ("stop", False)


@pytest.mark.parametrize(("status", "can_save"), [(143, False), (0, True)])
def test_one_that_has_ended_without_saving_is_no_more_waited_for(status: int, can_save: bool) -> None:
    run = running(1, 2)
    run.join(7)
    assert run.told[1]["can_save"] is True
    run.say(2, "stopped", round=1, status=status, has_saved=False)
    assert run.told[1] == {"do": "stop", "round": 1, "reason": "node7 has come", "can_save": can_save}


def test_a_run_that_ends_well_while_another_machine_comes_is_over() -> None:
    run = running(1, 2)
    run.join(7)
    for number in (1, 2):
        run.say(number, "stopped", round=1, status=0)
    assert {(told["do"], told["status"]) for told in run.told.values()} == {("end", 0)}


@pytest.mark.parametrize("leaves", [False, True])
def test_a_machine_that_is_lost_while_others_have_ended_well_has_not_done_its_part(leaves: bool) -> None:
    run = running(1, 2)
    run.say(1, "ended", round=1, status=0, sentence="")
    if leaves:
        run.say(2, "leaves", has_saved=False)
    run.lose(2)
    run.wait(SETTLE_SECONDS, 1)
    assert run.places()[1] == (0, 1)
    assert run.told[1]["round"] == 2
    run.say(1, "ended", round=2, status=0, sentence="")
    assert run.told[1] == {"do": "end", "status": 0, "reason": ""}


@pytest.mark.parametrize("other", [{"most": 4}, {"num_processes": 2}])
def test_a_launcher_of_another_size_takes_no_part(other: dict[str, Any]) -> None:
    run = running(1, 2)
    hello = {"name": "node7", "order": 0, "most": 3, "num_processes": 1, **other}
    run.rounds.join(7, hello, "10.0.0.7", run.now)
    run.deliver()
    assert run.told[7]["do"] == "end"
    assert "the launcher on node7 cannot take part: it starts" in run.told[7]["reason"]
    run.wait(ARRIVAL_SECONDS, 1, 2)
    assert run.doing() == {1: "start", 2: "start", 7: "end"}


def test_a_greeting_without_a_size_is_misunderstood() -> None:
    run = running(1, 2)
    hello = {"name": "node7", "order": 0, "most": None, "num_processes": 1}
    with pytest.raises(Misunderstood, match="most"):
        run.rounds.join(7, hello, "10.0.0.7", run.now)


def test_nobody_is_lost_while_the_coordinator_could_hear_nobody() -> None:
    run = running(1, 2, 3)
    run.rounds.excuse(60)
    run.wait(60)
    assert set(run.doing().values()) == {"start"}
    run.wait(TERMS.silence + 1, 1, 2)
    assert run.told[3]["do"] == "end"


def test_a_run_whose_processes_have_all_saved_and_left_ends_to_be_started_again() -> None:
    run = running(1, 2, 3)
    for number in (1, 2, 3):
        run.say(number, "ended", round=1, status=75, sentence="", has_saved=True)
    assert {(told["do"], told["status"]) for told in run.told.values()} == {("end", 75)}


def test_those_that_are_stopped_while_they_save_have_saved_too() -> None:
    run = running(1, 2, 3)
    run.say(2, "ended", round=1, status=75, sentence="", has_saved=True)
    assert run.doing() == {1: "stop", 2: "start", 3: "stop"}
    assert run.told[1]["can_save"] is run.told[3]["can_save"] is True
    for number in (1, 3):
        run.say(number, "stopped", round=1, has_saved=True)
    assert {(told["do"], told["status"]) for told in run.told.values()} == {("end", 75)}


def test_an_exit_code_of_75_of_programs_that_have_saved_nothing_is_a_failure() -> None:
    run = running(1, 2, 3, terms=Terms(least=1, most=3))
    run.say(1, "ended", round=1, status=75, sentence="rank 0 failed first: exit code 75", is_cause=True)
    for number in (2, 3):
        run.say(number, "stopped", round=1)
    assert run.told[2] == {"do": "end", "status": 75, "reason": "rank 0 failed first: exit code 75"}


def test_those_that_saved_because_one_was_told_to_end_go_on_without_it() -> None:
    run = running(1, 2, 3)
    run.say(3, "leaves", has_saved=True)
    run.lose(3)
    for number in (1, 2):
        run.say(number, "ended", round=1, status=75, sentence="", has_saved=True)
    run.wait(SETTLE_SECONDS, 1, 2)
    assert run.places()[2] == (1, 2)


def test_one_that_is_lost_before_it_offers_a_port_is_replaced() -> None:
    run = Run()
    deliver, run.deliver = run.deliver, lambda: None  # nobody hears anything yet
    run.join(1, 2, 3)
    run.lose(1)
    run.rounds.outbox.clear()
    run.deliver = deliver
    run.wait(SETTLE_SECONDS, 2, 3)
    assert run.places() == {2: (0, 2), 3: (1, 2)}


def test_one_that_comes_while_a_port_is_awaited_takes_part_at_once() -> None:
    run = Run()
    deliver, run.deliver = run.deliver, lambda: None  # the offer is on its way
    run.join(1)
    run.wait(TERMS.last_call / 2, 1)
    run.wait(TERMS.last_call / 2, 1)
    [(to, offer)] = run.rounds.outbox
    assert (to, offer["do"]) == (1, "offer")
    run.rounds.outbox.clear()
    run.join(2)
    run.deliver = deliver
    run.say(1, "port", round=offer["round"], port=5000)
    run.wait(SETTLE_SECONDS, 1, 2)
    assert run.places() == {1: (0, 2), 2: (1, 2)}


def test_what_is_said_of_an_earlier_round_changes_nothing() -> None:
    run = running(1, 2, 3)
    run.lose(3)
    run.say(1, "stopped", round=1)
    run.say(2, "stopped", round=1)
    run.wait(SETTLE_SECONDS, 1, 2)
    run.say(1, "ended", round=1, status=1, sentence="late")
    assert run.doing()[2] == "start"


def test_who_comes_after_the_end_is_told_so() -> None:
    run = running(1, 2, 3)
    for number in (1, 2, 3):
        run.say(number, "ended", round=1, status=0, sentence="")
    run.join(4)
    assert run.told[4] == {"do": "end", "status": 1, "reason": "the run has ended"}


@pytest.mark.parametrize(
    "message",
    [
        {"say": "ended", "round": 1, "status": 256, "sentence": ""},
        {"say": "ended", "round": 1, "status": 1},
        {"say": "ended", "round": "1", "status": 1, "sentence": ""},
        {"say": "ended", "round": True, "status": 1, "sentence": ""},
        {"say": "sings", "round": 1},
        {"say": ["alive"], "round": 1},
        {},
    ],
)
def test_other_messages_are_misunderstood(message: dict[str, Any]) -> None:
    run = running(1, 2, 3)
    with pytest.raises(Misunderstood):
        run.rounds.hear(1, message, run.now)
