"""The exceptions of accelerate_cpp. Errors raised in C++ arrive in Python as these types."""

from __future__ import annotations

__all__ = [
    "AccelerateError",
    "BuildMismatch",
    "CheckpointError",
    "ExistingFile",
    "InternalError",
    "InvalidArgument",
    "MismatchedCollective",
    "MissingFile",
    "MissingLibrary",
    "OtherRankFailed",
    "PeerLost",
    "SystemFailure",
    "Timeout",
    "Unavailable",
]


class AccelerateError(RuntimeError):
    """Base of every error that a caller of accelerate_cpp can act on."""


class BuildMismatch(AccelerateError, ImportError):
    """The C++ module is missing, or does not fit the torch that is installed; the message has the command."""


class InvalidArgument(AccelerateError, ValueError):
    """An argument, a flag or a variable has a value that cannot be used; the message says which values can."""


class MissingLibrary(InvalidArgument, ImportError):
    """What was requested needs a Python package that is not installed; the message says how to get it."""


class Unavailable(InvalidArgument, OSError):
    """What an argument names cannot be read, or the Hugging Face Hub does not give it; the message says why."""


class MissingFile(Unavailable, FileNotFoundError):
    """There is no file where an argument says."""


class ExistingFile(InvalidArgument, FileExistsError):
    """There is a file already where one would be written; the message says how to write over it."""


class CheckpointError(AccelerateError):
    """A checkpoint is damaged, incomplete or of another program, or another rank could not write its part of one."""


class OtherRankFailed(CheckpointError):
    """Another rank raised while a checkpoint was saved or loaded by all; the message names the rank and its error."""


class Timeout(AccelerateError, TimeoutError):
    """A collective did not finish before its deadline; the message names the ranks that were waited for."""


class PeerLost(AccelerateError, ConnectionError):
    """Another rank died, left or failed while this one needed it; the message names the rank."""


class MismatchedCollective(AccelerateError):
    """Ranks called different collectives, or the same one with different shapes or dtypes; the message is a table."""


class SystemFailure(OSError, AccelerateError):
    """The operating system refused something (memory, descriptors, sockets); ``errno`` has its number."""


class InternalError(RuntimeError):
    """An invariant of accelerate_cpp itself is broken. This is a bug: please report it with the message."""
