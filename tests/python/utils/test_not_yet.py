"""Names that other programs import but that do not work yet."""

from __future__ import annotations

import inspect
from typing import Any

import accelerate.utils as original
import pytest

from accelerate_cpp import utils
from accelerate_cpp.config import unsupported
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.utils import not_yet

ROWS = [pytest.param(row, id=row.name) for row in unsupported.FUNCTIONS]


@pytest.mark.parametrize("row", ROWS)
def test_it_can_be_imported_and_says_when_called_what_to_do_instead(row: unsupported.Unsupported) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        getattr(utils, row.name)()
    assert str(refusal.value) == row.sentence(f"{row.name}(...)")


@pytest.mark.parametrize("row", ROWS)
def test_it_takes_the_arguments_of_the_original_and_has_a_docstring(row: unsupported.Unsupported) -> None:
    own, theirs = getattr(utils, row.name), getattr(original, row.name, None)
    assert own.__doc__.startswith("Not supported")
    if theirs is not None:
        own_names, theirs_names = (list(inspect.signature(kind).parameters) for kind in (own, theirs))
        assert own_names == theirs_names


def test_a_function_keeps_its_name_and_its_signature() -> None:
    @not_yet.refusing
    def load_fsdp_model(model: Any, strict: bool = True) -> None:
        """Would."""

    assert (load_fsdp_model.__name__, load_fsdp_model.__doc__) == ("load_fsdp_model", "Would.")
    assert list(inspect.signature(load_fsdp_model).parameters) == ["model", "strict"]
