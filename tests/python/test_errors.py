"""The exception types: how users can catch them."""

from __future__ import annotations

import pickle

import pytest

from accelerate_cpp import errors

BUILTIN_TWINS = {
    "BuildMismatch": ImportError,
    "CheckpointError": RuntimeError,
    "ExistingFile": FileExistsError,
    "InvalidArgument": ValueError,
    "Timeout": TimeoutError,
    "PeerLost": ConnectionError,
    "MismatchedCollective": RuntimeError,
    "MissingFile": FileNotFoundError,
    "MissingLibrary": ImportError,
    "OtherRankFailed": errors.CheckpointError,
    "SystemFailure": OSError,
    "InternalError": RuntimeError,
    "AccelerateError": RuntimeError,
    "Unavailable": OSError,
}


def test_every_error_is_listed() -> None:
    assert sorted(errors.__all__) == sorted(BUILTIN_TWINS)


@pytest.mark.parametrize("name", BUILTIN_TWINS)
def test_an_error_can_be_caught_as_its_builtin_twin(name: str) -> None:
    with pytest.raises(BUILTIN_TWINS[name], match="what happened"):
        raise getattr(errors, name)("what happened")


@pytest.mark.parametrize("name", sorted(set(BUILTIN_TWINS) - {"InternalError"}))
def test_what_a_caller_can_act_on_is_an_accelerate_error_and_a_runtime_error(name: str) -> None:
    assert issubclass(getattr(errors, name), errors.AccelerateError)
    assert issubclass(getattr(errors, name), RuntimeError)


def test_a_broken_invariant_is_none_of_them() -> None:
    assert not issubclass(errors.InternalError, errors.AccelerateError)


@pytest.mark.parametrize("name", BUILTIN_TWINS)
def test_an_error_travels_between_processes(name: str) -> None:
    error = pickle.loads(pickle.dumps(getattr(errors, name)("what happened")))
    assert type(error) is getattr(errors, name)
    assert str(error) == "what happened"


def test_a_system_failure_keeps_its_number() -> None:
    error = pickle.loads(pickle.dumps(errors.SystemFailure(12, "no memory")))
    assert (error.errno, error.strerror) == (12, "no memory")
