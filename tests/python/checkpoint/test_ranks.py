"""What ranks do together; several processes are in tests/distributed/test_checkpoints.py."""

from __future__ import annotations

from typing import Any

import pytest

from accelerate_cpp.checkpoint.ranks import Ranks
from accelerate_cpp.errors import OtherRankFailed


def test_one_rank_is_alone() -> None:
    assert Ranks().gather(5) == [5]
    assert Ranks().together("adding", lambda: 2 + 3) == [5]


class Pair(Ranks):
    """The first of two ranks; the other one answers with ``other``."""

    other: Any = None

    def gather(self, value: Any) -> list[Any]:
        return [value, self.other]


def test_the_failure_of_another_rank_is_an_error_here() -> None:
    pair = Pair(0, 2)
    object.__setattr__(pair, "other", (None, "OSError: disk full"))
    with pytest.raises(OtherRankFailed, match="saving: rank 1 failed with OSError: disk full"):
        pair.together("saving", lambda: 1)


def test_a_failure_here_is_raised_as_it_is() -> None:
    pair = Pair(0, 2)
    object.__setattr__(pair, "other", (3, None))
    with pytest.raises(KeyError, match="mine"):
        pair.together("saving", lambda: {}["mine"])
    assert pair.together("saving", lambda: 2) == [2, 3]
