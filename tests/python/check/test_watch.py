"""Wrappers around methods; what all of them see together is tested by tests/distributed/test_check.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from accelerate_cpp.check.watch import wrap


def test_a_wrapper_knows_whether_the_user_calls() -> None:
    callers: list[bool] = []

    def around(original: Any, is_the_users: bool, *args: Any) -> Any:
        callers.append(is_the_users)
        return original(*args)

    owner = SimpleNamespace(add=lambda a, b: a + b)
    wrap(owner, "add", around)
    assert owner.add(1, 2) == 3
    names = {"__name__": "torch.optim", "owner": owner}
    exec("result = owner.add(3, 4)", names)
    assert names["result"] == 7
    assert callers == [True, False]
