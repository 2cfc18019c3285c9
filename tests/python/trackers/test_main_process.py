"""Which process trackers act on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist

from accelerate_cpp.trackers.main_process import is_main_process, on_main_process


class Noisy:
    """Has a method for the main process; ``main_process_only`` is set by the tests."""

    @on_main_process
    def shout(self, word: str, times: int = 1) -> str:
        """Says it."""
        return word * times


def tracker(**attributes: bool) -> Noisy:
    made = Noisy()
    made.__dict__.update(attributes)
    return made


def test_a_process_by_itself_is_the_main_one(on_main: Callable[[bool], None]) -> None:
    assert is_main_process()


@pytest.mark.parametrize("is_main", [True, False])
def test_before_there_is_a_group_the_environment_tells_the_rank(on_main: Callable[[bool], None], is_main: bool) -> None:
    on_main(is_main)
    assert is_main_process() is is_main


def test_a_rank_of_an_earlier_launch_does_not_count_where_there_is_one_process(
    on_main: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_main(False)
    monkeypatch.delenv("WORLD_SIZE")
    assert is_main_process()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_group_knows_better_than_the_environment(
    on_main: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    on_main(rank == 1)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    assert is_main_process() is (rank == 0)


@pytest.mark.parametrize("is_main", [True, False])
@pytest.mark.parametrize("attributes", [{"main_process_only": True}, {"main_process_only": False}, {}])
def test_a_decorated_method_runs_on_the_main_process_and_elsewhere_if_the_tracker_says_so(
    on_main: Callable[[bool], None], is_main: bool, attributes: dict[str, bool]
) -> None:
    on_main(is_main)
    runs = is_main or not attributes.get("main_process_only", False)
    assert tracker(**attributes).shout("ab", times=2) == ("abab" if runs else None)


def test_the_process_is_asked_at_each_call(on_main: Callable[[bool], None]) -> None:
    made = tracker(main_process_only=True)
    on_main(False)
    assert made.shout("a") is None
    on_main(True)
    assert made.shout("a") == "a"


def test_a_decorated_method_keeps_name_and_documentation() -> None:
    assert (Noisy.shout.__name__, Noisy.shout.__doc__) == ("shout", "Says it.")
