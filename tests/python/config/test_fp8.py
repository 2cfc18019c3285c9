"""Which library trains in fp8."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from accelerate_cpp.config import fp8
from accelerate_cpp.errors import InvalidArgument, MissingLibrary

BACKEND = "ACCELERATE_FP8_BACKEND"
Install = Callable[..., None]


@pytest.mark.parametrize(
    ("installed", "chosen"),
    [
        (("torchao", "transformer_engine", "msamp"), "AO"),
        (("transformer_engine", "msamp"), "TE"),
        (("msamp",), "MSAMP"),
    ],
)
def test_the_first_library_that_is_installed_is_chosen(
    installed: tuple[str, ...], chosen: str, only_installed: Install
) -> None:
    only_installed(*installed)
    assert fp8.choose({}) == fp8.choose({BACKEND: "NO"}) == chosen


def test_the_environment_wins_over_that_order(only_installed: Install) -> None:
    only_installed("torchao", "msamp")
    assert fp8.choose({BACKEND: "msamp"}) == "MSAMP"
    with pytest.raises(MissingLibrary, match=rf"{BACKEND}=TE: .* package transformer_engine, which is not installed"):
        fp8.choose({BACKEND: "TE"})
    with pytest.raises(InvalidArgument, match=rf"{BACKEND}='te2': expected one of NO, AO, TE, MSAMP"):
        fp8.choose({BACKEND: "te2"})


def test_without_any_the_error_names_all_and_recommends_one(only_installed: Install) -> None:
    only_installed()
    with pytest.raises(MissingLibrary, match=r"torchao, transformer_engine, msamp.*pip install torchao.*'bf16'"):
        fp8.choose({})


@pytest.mark.parametrize(
    ("installed", "missing", "instead"),
    [
        (("torchao",), "TE", r"use AORecipeKwargs\(\), for torchao, which is installed"),
        (("transformer_engine",), "AO", r"use TERecipeKwargs\(\), for TransformerEngine, which is installed"),
        ((), "TE", r"use AORecipeKwargs\(\), for torchao \(pip install torchao\)"),
        ((), "AO", "use mixed_precision='bf16'"),
    ],
)
def test_a_missing_library_is_named_with_its_command_and_with_what_works(
    installed: tuple[str, ...], missing: str, instead: str, only_installed: Install
) -> None:
    only_installed(*installed)
    library = fp8.LIBRARIES[missing]
    with pytest.raises(MissingLibrary, match=f"asked: .*{library.title} .*{library.module}.*{instead}") as raised:
        fp8.require(missing, "asked")
    assert library.install in str(raised.value)


def test_a_folder_without_code_is_no_library(only_installed: Install, tmp_path: Path) -> None:
    only_installed("msamp")
    assert fp8.is_installed("MSAMP")
    (tmp_path / "msamp" / "__init__.py").unlink()
    assert not fp8.is_installed("MSAMP")
