"""What ranks do together; several processes are in tests/distributed/test_checkpoints.py."""

from __future__ import annotations

from typing import Any

import pytest

from accelerate_cpp.checkpoint.participants import Participants
from accelerate_cpp.comm.topology import Topology
from accelerate_cpp.errors import InvalidArgument, OtherRankFailed, PeerLost


def test_one_rank_is_alone() -> None:
    assert Participants().gather(5) == [5]
    assert Participants().together("adding", lambda: 2 + 3) == [5]


class Pair(Participants):
    """The first of two ranks; the other one answers with ``other``."""

    other: Any = None

    def gather(self, value: Any) -> list[Any]:
        return [value, self.other]


def test_the_failure_of_another_rank_is_an_error_here() -> None:
    pair = Pair(Topology(0, 2))
    object.__setattr__(pair, "other", (None, "OSError: disk full"))
    with pytest.raises(OtherRankFailed, match="saving: rank 1 failed with OSError: disk full"):
        pair.together("saving", lambda: 1)


def test_a_failure_here_is_raised_as_it_is() -> None:
    pair = Pair(Topology(0, 2))
    object.__setattr__(pair, "other", (3, None))
    with pytest.raises(KeyError, match="mine"):
        pair.together("saving", lambda: {}["mine"])
    assert pair.together("saving", lambda: 2) == [2, 3]


class Place:
    """Where ranks meet; ``here`` are those that come, or the error of the meeting."""

    def __init__(self, here: list[int] | Exception, has_left: bool = False) -> None:
        self.here, self.has_left = here, has_left
        self.asked: list[str] = []

    def meet(self, topic: str) -> list[int]:
        self.asked.append(topic)
        if isinstance(self.here, Exception):
            raise self.here
        return self.here

    def someone_has_left(self) -> bool:
        return self.has_left


@pytest.mark.parametrize(("here", "alone"), [([0, 1, 2, 3], False), ([2], True), ([0, 2], True)])
def test_ranks_act_together_only_if_all_are_there(here: list[int], alone: bool) -> None:
    place = Place(here)
    ranks = Participants(Topology(2, 4, 0, 2), meeting=place).those_in("save_state a")
    assert place.asked == ["save_state a"]
    assert (ranks.topology.rank, ranks.topology.world_size, ranks.alone) == (2, 4, alone)
    assert (ranks.num_together, ranks.place, ranks.share) == ((1, 0, (0, 1)) if alone else (4, 2, (0, 2)))


def test_a_process_that_has_died_is_missed_only_by_those_that_expect_all(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Participants(Topology(0, 2), meeting=Place(PeerLost("rank 1 has ended")))
    with pytest.raises(PeerLost, match="rank 1 has ended"):
        ranks.those_in("save_state ")
    with pytest.raises(PeerLost, match="rank 1 has ended"):
        ranks.those_in("save_state ", with_the_dead=False, needs_all=True)
    assert ranks.those_in("save_state ", with_the_dead=False).alone
    assert caplog.messages == ["save_state: only rank 0 takes part: rank 1 has ended"]


@pytest.mark.parametrize("with_the_dead", [False, True])
def test_where_all_are_needed_those_that_are_not_there_are_named(with_the_dead: bool) -> None:
    def called(here: list[int], has_left: bool = False) -> Participants:
        place = Place(here, has_left)
        return Participants(Topology(2, 4), meeting=place).those_in("save_state a", with_the_dead, needs_all=True)

    assert not called([0, 1, 2, 3]).alone
    with pytest.raises(
        InvalidArgument, match=r"^save_state was called on rank 0 and rank 2 alone, .* rank 1 and rank 3$"
    ):
        called([0, 2])
    with pytest.raises(PeerLost, match=r"^save_state on rank 2 waited for rank 3, but a rank has left the group$"):
        called([0, 1, 2], has_left=True)


def test_nobody_is_asked_in_one_process_or_where_nobody_can_tell() -> None:
    never = Place(AssertionError())
    assert not Participants(meeting=never).those_in("save_state").alone
    assert not Participants(Topology(1, 2)).those_in("save_state").alone
