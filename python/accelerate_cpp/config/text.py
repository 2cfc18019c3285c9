"""JSON and YAML as values, with ``ValueError`` for whatever text cannot be one."""

from __future__ import annotations

import json
from typing import Any

_TOO_LONG = "Exceeds the limit"  # as Python begins its refusal of a number


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

    try:
        return yaml.safe_load(text)
    except RecursionError:
        raise _too_deep() from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except ValueError as error:
        raise _plainly(error) from error


def _too_deep() -> ValueError:
    return ValueError("lists or objects in it are nested more deeply than Python can read")


def _plainly(error: ValueError) -> ValueError:
    return ValueError("a number in it has thousands of digits") if str(error).startswith(_TOO_LONG) else error
