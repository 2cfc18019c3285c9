from __future__ import annotations

import functools
from typing import Any

from accelerate_cpp.launch.fork.captured_variables import variables_of, variables_reached

LIMIT = 3
OTHER = 4


def uses_limit() -> int:
    return LIMIT


def calls_it() -> int:
    return uses_limit()


def calls_itself() -> Any:
    return calls_itself()


def test_variables_of_outer_functions_and_of_the_module_are_found() -> None:
    scale, later = 2, None

    def function(value: Any) -> Any:
        return [scale * LIMIT * item.OTHER for item in value]

    assert dict(variables_of(function)) == {"scale": 2, "LIMIT": 3}
    assert later is None


def test_variable_without_a_value_is_left_out() -> None:
    def function() -> Any:
        return later

    assert dict(variables_of(function)) == {}
    later = 1


def test_functions_among_them_are_followed() -> None:
    assert dict(variables_of(calls_it)) == {"uses_limit": uses_limit}
    assert dict(variables_reached(calls_it)) == {"uses_limit": uses_limit, "LIMIT": 3}
    assert dict(variables_reached(calls_itself)) == {"calls_itself": calls_itself}


def test_functions_of_other_modules_are_not_followed() -> None:
    def function() -> Any:
        return functools.wraps

    assert dict(variables_reached(function)) == {"functools": functools}


def test_partials_methods_and_objects_that_can_be_called_are_seen_through() -> None:
    class Training:
        def run(self) -> int:
            return LIMIT

        def __call__(self) -> int:
            return OTHER

    assert dict(variables_of(functools.partial(functools.partial(uses_limit)))) == {"LIMIT": 3}
    assert dict(variables_of(Training().run)) == {"LIMIT": 3}
    assert dict(variables_of(Training())) == {"OTHER": 4}


def test_what_is_not_written_in_python_has_none() -> None:
    assert dict(variables_of(print)) == {}
    assert dict(variables_reached(3)) == {}
