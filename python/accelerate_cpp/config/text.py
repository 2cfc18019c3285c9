"""JSON and YAML as values, with ``ValueError`` for whatever text cannot be one; and values in messages."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterator
from itertools import accumulate, chain
from typing import Any

_TOO_LONG = "Exceeds the limit"  # as Python begins its refusal of a number
_DEEPEST = 200
_MOST_VALUES = 1_000_000
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200
_SHORT.maxlevel = 3


def parsed_json(text: str | bytes) -> Any:
    """The value of a text in JSON; ``ValueError`` says what is wrong with it."""
    try:
        return json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise _plainly(error) from error


def parsed_yaml(text: str) -> Any:
    """The value of a text in YAML, of plain types; ``ValueError`` says what is wrong with it."""
    import yaml  # here, as most launches read no file

    if _depth(text) > _DEEPEST:  # the parser would first take time for the square of the depth
        raise _too_deep()
    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _written_out(node, {})  # first, as merged objects are written out while values are made
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except RecursionError:
        raise _too_deep() from None
    except yaml.MarkedYAMLError as error:  # without the line itself, which may hold a secret
        said = " ".join(" ".join(part for part in (error.context, error.problem) if part).split())
        mark = error.problem_mark or error.context_mark
        raise ValueError(said if mark is None else f"{said} (line {mark.line + 1}, column {mark.column + 1})") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except ValueError as error:
        raise _plainly(error) from error
    except (LookupError, AttributeError, TypeError) as error:  # of a tag, such as !!bool, before what is no such value
        raise ValueError(f"a value in it does not fit its tag ({type(error).__name__}: {error})") from error


def _depth(text: str) -> int:
    """How deeply brackets in ``text`` are nested at most."""
    return max(accumulate(1 if bracket in "[{" else -1 for bracket in re.findall(r"[\[\]{}]", text)), default=0)


def _written_out(node: Any, known: dict[int, int | None]) -> int:
    """How many values ``node`` of a text in YAML has where each alias is replaced by what it stands for.

    Args:
        known: the results for lists and objects, by ``id``; ``None`` while one is being counted.

    Raises:
        ValueError: there are too many, as in a text whose lists consist of aliases of lists of aliases, or a list
            contains itself. Whatever prints or copies such a value would take memory for each of them, and so does
            PyYAML where objects merge such lists.
    """
    if not isinstance(node.value, list):
        return 1
    if id(node) not in known:
        known[id(node)] = None
        parts = chain.from_iterable(node.value) if node.id == "mapping" else node.value
        known[id(node)] = 1 + sum(_written_out(part, known) for part in parts)
    count = known[id(node)]
    if count is None:
        raise ValueError("a list or an object in it contains itself")
    if count > _MOST_VALUES:
        raise ValueError(f"with its aliases written out it has more than {_MOST_VALUES} values")
    return count


def texts_of(value: Any) -> Iterator[str]:
    """All texts in a value of JSON or YAML, those of keys included."""
    rest = [value]
    while rest:
        one = rest.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            rest += [*one, *one.values()]
        elif isinstance(one, (list, tuple, set)):
            rest += one


def shortened(value: Any) -> str:
    """``repr(value)`` for a message, of bounded length however often a list in ``value`` contains another."""
    return _SHORT.repr(value)


def _too_deep() -> ValueError:
    return ValueError("lists or objects in it are nested more deeply than Python can read")


def _plainly(error: ValueError) -> ValueError:
    return ValueError("a number in it has thousands of digits") if str(error).startswith(_TOO_LONG) else error
