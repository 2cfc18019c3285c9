"""The PEP 517 backend: scikit-build-core, told which torch to build against (see torch_pin)."""

from __future__ import annotations

from scikit_build_core import build as skbuild
from scikit_build_core.build import build_sdist, get_requires_for_build_sdist

from torch_pin import find_torch

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Settings = dict[str, str | list[str]]


def with_torch(config_settings: Settings | None) -> Settings:
    """The settings with torch's folder among the CMake definitions; a folder the caller named stays."""
    return {"cmake.define.ACCELERATE_TORCH_DIR": str(find_torch().folder), **(config_settings or {})}


def get_requires_for_build_wheel(config_settings: Settings | None = None) -> list[str]:
    return skbuild.get_requires_for_build_wheel(with_torch(config_settings))


def get_requires_for_build_editable(config_settings: Settings | None = None) -> list[str]:
    return skbuild.get_requires_for_build_editable(with_torch(config_settings))


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings | None = None) -> str:
    return skbuild.prepare_metadata_for_build_wheel(metadata_directory, with_torch(config_settings))


def prepare_metadata_for_build_editable(metadata_directory: str, config_settings: Settings | None = None) -> str:
    return skbuild.prepare_metadata_for_build_editable(metadata_directory, with_torch(config_settings))


def build_wheel(
    wheel_directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None
) -> str:
    print("accelerate-cpp: compiling the C++ module, which takes about 2 minutes on 2 cores", flush=True)
    return skbuild.build_wheel(wheel_directory, with_torch(config_settings), metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None
) -> str:
    return skbuild.build_editable(wheel_directory, with_torch(config_settings), metadata_directory)
