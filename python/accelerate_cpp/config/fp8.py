"""fp8 training is done by a library: which ones there are, and which of them a run uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from accelerate_cpp.config import env_table
from accelerate_cpp.config.libraries import has_code
from accelerate_cpp.errors import MissingLibrary


@dataclass(frozen=True)
class Fp8Library:
    """One library that trains in fp8.

    Attributes:
        title: its name in sentences.
        module: what is imported.
        install: the command that installs it.
        recipe: the handler with its options.
    """

    title: str
    module: str
    install: str
    recipe: str


LIBRARIES: Mapping[str, Fp8Library] = {
    "AO": Fp8Library("torchao", "torchao", "pip install torchao", "AORecipeKwargs"),
    "TE": Fp8Library(
        "TransformerEngine",
        "transformer_engine",
        "pip install --no-build-isolation 'transformer-engine[pytorch]>=2.9'",
        "TERecipeKwargs",
    ),
    "MSAMP": Fp8Library("MS-AMP", "msamp", "build it from github.com/Azure/MS-AMP", "MSAMPRecipeKwargs"),
}
"""By backend name, in the order in which one that is installed is chosen."""


def is_installed(backend: str) -> bool:
    """Whether the library of ``backend`` can be imported; a folder without code that has its name does not count."""
    return has_code(LIBRARIES[backend].module)


def require(backend: str, found: str) -> None:
    """Returns if the library of ``backend`` is installed.

    Args:
        backend: a key of ``LIBRARIES``.
        found: what the caller wrote that asks for it.

    Raises:
        MissingLibrary: it is not; the message says how to install it and what works without it.
    """
    if is_installed(backend):
        return
    library = LIBRARIES[backend]
    raise MissingLibrary(
        f"{found}: fp8 training through {library.title} needs the Python package {library.module}, which is not "
        f"installed; install it ({library.install}), or use {_instead_of(backend)}"
    )


def _instead_of(backend: str) -> str:
    """What works without the library of ``backend``."""
    installed = next((other for other in LIBRARIES if other != backend and is_installed(other)), None)
    if installed is not None:
        return f"{LIBRARIES[installed].recipe}(), for {LIBRARIES[installed].title}, which is installed"
    if backend == "AO":
        return "mixed_precision='bf16'"
    return f"AORecipeKwargs(), for torchao ({LIBRARIES['AO'].install})"


def require_any(found: str) -> None:
    """Returns if any of the libraries is installed, else raises ``MissingLibrary``; ``found`` as in :func:`require`."""
    if not any(is_installed(backend) for backend in LIBRARIES):
        raise MissingLibrary(
            f"{found}: fp8 training needs one of the Python packages "
            f"{', '.join(library.module for library in LIBRARIES.values())}, and none is installed; install torchao "
            f"({LIBRARIES['AO'].install}), which works on CPUs and GPUs, or use mixed_precision='bf16'"
        )


def choose(environ: Mapping[str, str] | None = None) -> str:
    """The backend of a run without a recipe: ``ACCELERATE_FP8_BACKEND``, else the first whose library is installed.

    Raises:
        MissingLibrary: the library is not installed, or none is.
    """
    variable = env_table.FP8_BACKEND
    asked: str = variable.get(environ)
    if asked != "NO":
        require(asked, f"environment variable {variable.name}={asked}")
        return asked
    require_any("mixed_precision='fp8'")
    return next(backend for backend in LIBRARIES if is_installed(backend))
